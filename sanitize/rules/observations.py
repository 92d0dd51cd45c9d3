"""What was seen when the rules were checked against the compiler and its simulator; docs/lint.md shows it."""

from __future__ import annotations

OBSERVED: dict[str, tuple[str, ...]] = {}
