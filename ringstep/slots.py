"""Cache slot arithmetic: which position a slot holds, what a query may see, where new entries go.

Everything here is plain integer arithmetic over one cache of `length` slots; docs/step-contract.md states the
same rules for hosts in other languages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringstep.contract import CacheKind


def held_positions(kind: CacheKind, length: int, position: int) -> NDArray[np.int64]:
    """The position each slot holds when `position` tokens have been processed, -1 where never written.

    append: slot p holds position p. ring: position p lies in slot p % length, the newest wins.
    roll: the newest position lies in the last slot.
    """
    slots = np.arange(length)
    if kind == "append":
        return np.where(slots < position, slots, -1)
    newest = position - 1
    held = newest - (newest - slots) % length if kind == "ring" else position - length + slots
    return np.where(held >= 0, held, -1)


def visible(held: NDArray[np.int64], position: int, n: int, window: int | None) -> NDArray[np.bool_]:
    """What queries position .. position + n - 1 see, bool [n, length + n]: the slots, then the new tokens.

        window 4, ring of 3 slots holding 6 4 5, a chunk of n = 3 at position 7:
                   6 4 5 | 7 8 9
            q = 7  x x x | x . .
            q = 8  x . x | x x .
            q = 9  x . . | x x x
    """
    queries = position + np.arange(n)[:, None]
    keys = np.concatenate([held, position + np.arange(n)])[None, :]
    seen = (keys >= 0) & (keys <= queries)
    if window is not None:
        seen &= queries - keys < window
    return seen


def writes(kind: CacheKind, length: int, position: int, count: int) -> list[tuple[int, int, int]]:
    """Copies (first new entry, first slot, how many) that store `count` new entries for positions from `position`.

    At most two copies: a ring write may straddle the end. Entries that no later query can see are left out: a
    ring keeps the last `length`, and append has no slot for the last position of the context.
    """
    if kind == "append":
        fit = min(count, length - position)
        return [(0, position, fit)] if fit > 0 else []
    skip = max(0, count - length)
    keep, slot = count - skip, (position + skip) % length
    first = min(keep, length - slot)
    copies = [(skip, slot, first), (skip + first, 0, keep - first)]
    return [copy for copy in copies if copy[2] > 0]
