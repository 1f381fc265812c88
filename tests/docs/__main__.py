"""`python -m tests.docs [PAGE ...]`: writes into the pages what their blocks print now."""

from __future__ import annotations

import os
import sys

from tests.docs.examples import python_blocks, run_page
from tests.docs.pages import PAGES, ROOT, matches, name_of


def refresh(wanted: list[str]) -> None:
    """Replaces every output that is no longer what is printed."""
    os.chdir(ROOT)
    for page in PAGES:
        if wanted and name_of(page) not in wanted:
            continue
        content = page.read_text()
        pairs = list(zip(python_blocks(page), run_page(page), strict=True))
        for block, printed in reversed(pairs):
            if block.output is not None and not matches(block.output.text, printed):
                content = content[: block.output.start] + printed + content[block.output.stop :]
            elif block.output is None and printed:
                print(f"{name_of(page)} lacks an output block:\n{block.text}prints\n{printed}")
        page.write_text(content)


if __name__ == "__main__":
    refresh(sys.argv[1:])
