"""A run of a session over a text, kept whole, so that any two runs can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringstep.parity.metrics import agreement
from ringstep.parity.report import CacheEntries, Report, Truth, compare_entries, compare_logits, steps
from ringstep.session import DecodeSession


def record(session: DecodeSession, ids: Sequence[int], source: str, tick: Callable[[int], Any] | None = None,
           each: int | None = None) -> Truth:  # fmt: skip
    """Feed a text from position 0 on, `each` tokens at a time (default: as `steps` says, every graph runs).

    Returns every logit and every cache entry as it was when it was new, long before a ring overwrites it. Of a chunk
    longer than a ring only what the ring still holds is seen.
    """
    session.reset()
    sizes = [each] * -(-len(ids) // each) if each else steps(session.spec, len(ids))
    logits: list[np.ndarray] = []
    parts: list[list[CacheEntries]] = [[] for _ in session.spec.caches]
    for size in sizes:
        at = session.position
        logits.append(session.step(ids[at : at + size]))
        for layer, own in enumerate(parts):
            positions, keys, values = session.entries(layer)
            new = positions >= at
            own.append((positions[new], keys[:, new], values[:, new]))
        if tick:
            tick(len(logits[-1]))
    caches = [(np.concatenate([p for p, _, _ in own]), np.concatenate([k for _, k, _ in own], axis=1),
               np.concatenate([v for _, _, v in own], axis=1)) for own in parts]  # fmt: skip
    return Truth(source, list(ids), np.concatenate(logits), caches)


def compare_runs(report: Report, reference: Truth, run: Truth, copied: int = 0) -> Report:
    """Fill a report with all that both runs have in common after the first `copied` positions; returns it."""
    first = compare_logits(report, run.ids, reference.logits, run.logits, copied)
    pairs = zip(reference.caches, run.caches, strict=True)
    found = [compare_entries(layer, want, have, first) for layer, (want, have) in enumerate(pairs)]
    report.caches = [layer for layer in found if layer]
    return report


def greedy(reference: Truth, run: Truth, start: int, count: int) -> dict[str, Any] | None:
    """Whether a run would have given the reference's greedy answer, which its text holds from `start` on.

    Fed the answer itself, a run answers alike for as long as each of its first tokens is the reference's; where it
    first differs decides the verdict. None where it was not fed so far.
    """
    rows = range(start - 1, start + count - 1)
    if count < 1 or start < 1 or rows.stop > min(len(reference.logits), len(run.logits)):
        return None
    verdicts = [agreement(reference.logits[i], run.logits[i]) for i in rows]
    same = next((i for i, verdict in enumerate(verdicts) if verdict != "equal"), count)
    return {"tokens": count, "same": same, "verdict": "equal" if same == count else verdicts[same]}
