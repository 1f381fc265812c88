"""`python -m tests.errors` writes `messages.txt` anew; read the difference before committing it."""

from __future__ import annotations

from tests.errors.test_messages import MESSAGES, document

if __name__ == "__main__":
    MESSAGES.write_text(document())
