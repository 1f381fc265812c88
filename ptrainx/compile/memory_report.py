"""What `lowered.memory()` tells, as a table."""

from __future__ import annotations

import dataclasses

__all__ = ["Holder", "MemoryReport"]


@dataclasses.dataclass(frozen=True)
class Holder:
    """A buffer that is alive at the peak.

    Attributes:
        bytes: its size.
        what: an argument's path, or the operator that made it.
        source: `file:line` of the user's code.
        phase: in which it was made.
        layer: the parameter that it serves.
        role: parameter, gradient, activation, or "".
    """

    bytes: int
    what: str
    source: str
    phase: str
    layer: str
    role: str


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory of one call on one rank; prints with the largest holders.

    Attributes:
        peak_bytes: the most that is alive at once, arguments and captured values included.
        argument_bytes: of arguments and captured values, at the start.
        result_bytes: of results, in memory of their own or of donated arguments.
        source, phase: where the peak is.
        holders: everything that is alive then, the largest first.
    """

    peak_bytes: int
    argument_bytes: int
    result_bytes: int
    source: str
    phase: str
    holders: tuple[Holder, ...]

    def __str__(self) -> str:
        shown = self.holders[:12]
        rows = [(f"{h.bytes:,}", h.role, h.layer, h.what, h.source) for h in shown]
        head = ("bytes", "role", "layer", "made by", "source")
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = [
            f"peak {self.peak_bytes:,} bytes at {self.source} ({self.phase}); "
            f"arguments {self.argument_bytes:,}, results {self.result_bytes:,}"
        ]
        for row in (head, *rows):
            cells = (cell.ljust(w) if i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            lines.append("  ".join(cells).rstrip())
        rest = self.holders[len(shown) :]
        if rest:
            lines.append(f"and {len(rest)} more, {sum(h.bytes for h in rest):,} bytes")
        return "\n".join(lines)
