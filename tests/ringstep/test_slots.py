"""Slot arithmetic against a list that simply remembers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringstep.contract import CacheKind
from ringstep.slots import held_positions, visible, writes

EMPTY = -1
lengths = st.integers(1, 12)
splits = st.lists(st.integers(1, 30), min_size=1, max_size=12)
kinds = st.sampled_from(["ring", "append", "roll"])


def store(kind: CacheKind, slots: list[int], position: int, count: int) -> None:
    """One token after the other, the way a host without chunks would."""
    for p in range(position, position + count):
        if kind == "roll":
            slots[:] = [*slots[1:], p]
        elif kind == "ring":
            slots[p % len(slots)] = p
        elif p < len(slots):
            slots[p] = p


def copied(slots: list[int], position: int, copies: list[tuple[int, int, int]]) -> list[int]:
    """The slots after the copies of `writes`."""
    after = list(slots)
    for source, slot, count in copies:
        for i in range(count):
            after[slot + i] = position + source + i
    return after


@settings(max_examples=300)
@given(kind=kinds, length=lengths, split=splits)
def test_held_and_written(kind: CacheKind, length: int, split: list[int]) -> None:
    slots, position = [EMPTY] * length, 0
    for count in split:
        assert held_positions(kind, length, position).tolist() == slots
        before = list(slots)
        store(kind, slots, position, count)
        if kind != "roll":
            copies = writes(kind, length, position, count)
            assert copied(before, position, copies) == slots
            assert len(copies) <= 2
            assert all(0 <= slot < slot + size <= length and 0 <= source < source + size <= count
                       for source, slot, size in copies)  # fmt: skip
        position += count
    assert held_positions(kind, length, position).tolist() == slots


@settings(max_examples=300)
@given(
    kind=kinds, length=lengths, position=st.integers(0, 40), n=st.integers(1, 20),
    window=st.none() | st.integers(1, 30),
)  # fmt: skip
def test_visible_is_its_definition(kind: CacheKind, length: int, position: int, n: int, window: int | None) -> None:
    slots = [EMPTY] * length
    store(kind, slots, 0, position)
    keys = slots + list(range(position, position + n))
    seen = visible(held_positions(kind, length, position), position, n, window)
    assert seen.shape == (n, length + n) and seen.dtype == np.bool_
    for i in range(n):
        q = position + i
        want = [p != EMPTY and p <= q and (window is None or q - p < window) for p in keys]
        assert seen[i].tolist() == want


@settings(max_examples=300)
@given(kind=kinds, window=st.integers(1, 14), split=splits)
def test_every_query_sees_exactly_its_window(kind: CacheKind, window: int, split: list[int]) -> None:
    """A cache of window - 1 slots is enough for any split, chunks larger than the window included."""
    length = max(1, window - 1) if kind != "append" else sum(split)
    slots, position = [EMPTY] * length, 0
    for count in split:
        seen = visible(held_positions(kind, length, position), position, count, window)
        keys = np.array(slots + list(range(position, position + count)))
        for i in range(count):
            q = position + i
            assert sorted(keys[seen[i]]) == list(range(max(0, q - window + 1), q + 1))
        slots = copied(slots, position, writes(kind, length, position, count)) if kind != "roll" else slots
        if kind == "roll":
            store(kind, slots, position, count)
        position += count


@pytest.mark.parametrize("count", [1, 2, 5])
def test_append_has_no_slot_for_the_last_position(count: int) -> None:
    context = 8
    assert writes("append", context - 1, context - count, count) == ([(0, 8 - count, count - 1)] if count > 1 else [])


def test_a_write_that_straddles_the_end_is_two_copies() -> None:
    assert writes("ring", 5, 3, 4) == [(0, 3, 2), (2, 0, 2)]
    assert writes("ring", 5, 3, 12) == [(7, 0, 5)]
    assert writes("ring", 5, 4, 12) == [(7, 1, 4), (11, 0, 1)]
    assert writes("ring", 1, 7, 3) == [(2, 0, 1)]


def test_the_picture_in_the_docstring() -> None:
    held = held_positions("ring", 3, 7)
    assert held.tolist() == [6, 4, 5]
    want = ["xxxx..", "x.xxx.", "x..xxx"]
    assert ["".join(".x"[v] for v in row) for row in visible(held, 7, 3, 4).astype(int)] == want
