"""The table of passes in docs/sanitize.md: `python -m sanitize.docs` writes it into the page."""

from __future__ import annotations

import math
from pathlib import Path

from sanitize.order import LAYOUTS, PASSES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sanitize.md"
START, END = "<!-- passes -->\n", "<!-- end -->\n"


def table() -> str:
    """One row a pass: name, what it does, what it promises."""
    rows = ["| pass | what it does | outputs in float32 |", "| --- | --- | --- |"]
    for p in (*PASSES, *LAYOUTS):
        promise = "bit-equal" if math.isinf(p.min_db) else f"{p.min_db:.0f} dB"
        off = " (`--with`)" if p in LAYOUTS else ""
        rows.append(f"| `{p.name}`{off} | {p.about} | {promise} |")
    return "\n".join(rows) + "\n"


def updated(page: str) -> str:
    """The page with the table of today."""
    head, rest = page.split(START)
    return head + START + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
