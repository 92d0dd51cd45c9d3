"""Single questions to the compiler beyond "does it take this operator": shapes, types, constants, old chips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sanitize.support.cases import Built


def all_probes() -> Iterator[tuple[str, Built]]:
    """Name and model of every probe."""
    yield from ()


def verdict(result: dict[str, Any]) -> str:
    """One word or figure: "refused", "crash", "wrong (SNR dB)", "taken"."""
    if "refused" in result:
        return "crash" if result["refused"].startswith("crash") else "refused"
    if result.get("run") or (result["db"] is not None and result["db"] < 20):
        return f"wrong ({result.get('run') or result['db']})"
    return "taken"
