"""The host loop over quantised graphs: integer caches, the sink prefix, and rows in the place of ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_specs import CACHES, InIntegers, quantised
from step_specs import make_spec
from test_session import PADDABLE, TOKENS, Layers, Witness, expected, layer_kinds, state

from ringstep.contract import PrefixSpec, StepSpec
from ringstep.encoding import Prefix, Table
from ringstep.errors import RingstepError
from ringstep.session import DecodeSession

EVERY: Layers = [("ring", 4), ("append", None), ("roll", 5)]
ids_of = lambda count: st.lists(st.integers(0, TOKENS - 1), min_size=count, max_size=count)


def entry(spec: StepSpec, ids: list[int]) -> dict[tuple[int, str], np.ndarray]:
    """What the Witness leaves in caches for these ids at position 0, as caches hold it."""
    found = {}
    tensors = {(t.layer, t.role.split("_")[0]): t for t in spec.graphs[0].inputs if t.layer is not None}
    for cache in spec.caches:
        for what, values in (("key", np.arange(len(ids)) + 1), ("value", np.array(ids) + 1)):
            own = tensors[cache.layer, what].encoding
            q = values / own.scale + own.zero if own else values
            shape = (1, cache.kv_heads, len(ids), cache.head_dim)
            found[cache.layer, what] = np.broadcast_to(q[:, None], shape).astype(cache.dtype)
    return found


def opened(spec: StepSpec, prefix: list[int] | None = None) -> tuple[DecodeSession, Witness]:
    """A session over the Witness; the prefix's logits say 1000 + token, which the Witness never does."""
    witness = Witness(spec)
    engine: Any = InIntegers(spec, witness) if spec.dtype == "uint16" else witness
    table = None
    if spec.embedding:
        rows = np.ones((spec.vocab, spec.hidden), np.int8)
        table = Table(rows, np.arange(spec.vocab, dtype=np.float32))
    made = None
    if prefix:
        spec = dataclasses.replace(spec, prefix=PrefixSpec("sink.bin", tuple(prefix)))
        logits = np.repeat(np.array(prefix, np.float32)[:, None] + 1000, spec.vocab, 1)
        made = Prefix(tuple(prefix), entry(spec, prefix), logits)
    return DecodeSession(spec, engine, table, made), witness


@settings(max_examples=150, deadline=None)
@given(data=st.data(), context=st.integers(1, 40))
def test_every_split_sees_the_same(data: st.DataObject, context: int) -> None:
    """Integer or float caches, with or without a prefix, however the text is cut and padded."""
    roll = data.draw(st.booleans(), "roll")
    kinds = st.tuples(st.just("roll"), st.none() | st.integers(1, 12)) if roll else layer_kinds
    layers: Any = data.draw(st.lists(kinds | layer_kinds, min_size=1, max_size=3), "layers")
    sizes = {1} if roll else set()
    sizes |= set(data.draw(st.lists(st.integers(1, context), min_size=1, max_size=2), "graphs"))
    spec = make_spec(
        layers, context, tuple(sizes), kv_heads=data.draw(st.integers(1, 2)), ids=data.draw(st.booleans()),
        key_layout=data.draw(st.sampled_from(["plain", "transposed"])),
    )  # fmt: skip
    cache = data.draw(st.sampled_from([*CACHES, ""]), "cache")
    spec = quantised(spec, cache) if cache else spec
    ids = data.draw(ids_of(context), "ids")
    count = data.draw(st.integers(0, context), "prefix")
    session, engine = opened(spec, ids[:count])
    while (start := session.position) < context:
        step = ids[start : start + data.draw(st.integers(1, context - start), "step")]
        logits = session.step(step)
        assert logits.dtype == np.float32 and logits.shape == (len(step), TOKENS)
        copied = [1000 * (start + i < count) for i in range(len(step))]
        assert np.rint(logits[:, 0]).tolist() == [token + more for token, more in zip(step, copied, strict=True)]
    # Padding computes queries past the text; the prefix is never computed.
    assert sorted(q for q in engine.seen if q < context) == list(range(count, context))
    for query in range(count, context):
        assert engine.seen[query] == expected(spec, ids, query)
    for i, own in enumerate(spec.caches):
        positions, keys, values = session.entries(i)
        last = min(own.length, context) if own.kind == "append" else context
        assert positions.tolist() == list(range(max(0, last - own.length), last))
        assert keys.dtype == values.dtype == np.float32
        assert (keys == positions[None, :, None] + 1).all()
        assert (values == np.array([ids[p] + 1 for p in positions]).reshape(1, -1, 1)).all()


@pytest.mark.parametrize("cache", CACHES)
def test_empty_slots_hold_zero(cache: str) -> None:
    """A slot never written stands for 0.0, whatever integer that is; so does one that was taken back."""
    session, engine = opened(quantised(make_spec(EVERY, 16, (1, 4), kv_heads=2), cache))
    fresh = state(session)
    for (_, what), array in session.caches.items():
        assert (array == CACHES[cache][what == "value"].zero).all() and array.dtype == cache
    engine.spoil = fail_at(2)
    with pytest.raises(ValueError):
        session.step([1] * 5)
    assert state(session) == fresh
    engine.spoil = lambda call, outputs: None
    session.step([1] * 5)
    assert state(session) != fresh
    session.reset()
    assert state(session) == fresh


def test_encodings_differ_by_layer() -> None:
    """entries() takes each layer's own scale."""
    spec = quantised(make_spec([("append", None)] * 3, 8), "int16", halve=True)
    session, _ = opened(spec)
    session.step([20])
    for layer in range(3):
        _, keys, values = session.entries(layer)
        assert keys.ravel().tolist() == [1.0] * 2 and values.ravel().tolist() == [21.0] * 2
        assert session.caches[layer, "value"][0, 0, 0, 0] == 21 * 8 * 2**layer - 77


def fail_at(call: int, error: type[BaseException] = ValueError) -> Callable[[int, Any], None]:
    def spoil(at: int, outputs: Any) -> None:
        if at == call:
            raise error("no")

    return spoil


PREFIX = [7, 3, 9]


def prefixed(layers: Layers = EVERY, sizes: tuple[int, ...] = (1, 4), cache: str = "uint8", **options: Any) -> Any:
    spec = make_spec(layers, 16, sizes, **options)
    return opened(quantised(spec, cache) if cache else spec, PREFIX)


@pytest.mark.parametrize("cache", ["", "uint8"])
@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("text", [[8], [8, 9], [1] * 9])
def test_a_text_that_begins_otherwise_changes_nothing(cache: str, before: int, text: list[int]) -> None:
    session, engine = prefixed(cache=cache)
    for token in PREFIX[:before]:
        session.step([token])
    kept = state(session)
    with pytest.raises(RingstepError, match=r"sink prefix has \[.*begin every text with it") as caught:
        session.step(text)
    assert str(PREFIX[before:][: len(text)]) in str(caught.value) and "\n" not in str(caught.value)
    assert state(session) == kept and engine.calls == []
    session.step([*PREFIX[before:], 5])
    assert engine.seen[3] == [[(0, 7), (1, 3), (2, 9), (3, 5)]] * 3


@pytest.mark.parametrize("cache", ["", "uint8"])
@pytest.mark.parametrize("wrong", range(3))
def test_a_prefix_that_goes_wrong_later_changes_nothing(cache: str, wrong: int) -> None:
    session, engine = prefixed(cache=cache)
    text = [*PREFIX, 1, 1]
    text[wrong] += 1
    fresh = state(session)
    with pytest.raises(RingstepError, match="sink prefix"):
        session.step(text)
    assert state(session) == fresh and engine.calls == []


@pytest.mark.parametrize("cache", ["", "uint8", "int16"])
@pytest.mark.parametrize("key_layout", ["plain", "transposed"])
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("before", [0, 2, 3])
def test_failing_after_the_prefix_takes_it_back(cache: str, key_layout: str, call: int, before: int) -> None:
    session, engine = prefixed(cache=cache, key_layout=key_layout)
    for token in PREFIX[:before]:
        session.step([token])
    kept = state(session)
    engine.spoil = fail_at(call, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        session.step([*PREFIX[before:], *[5] * 7])
    assert len(engine.calls) == call and state(session) == kept
    engine.spoil = lambda at, outputs: None
    whole, _ = prefixed(cache=cache, key_layout=key_layout)
    session.step([*PREFIX[before:], *[5] * 7])
    whole.step([*PREFIX, *[5] * 7])
    assert state(session) == state(whole)


def test_the_prefix_alone_runs_nothing() -> None:
    """Graphs of 4 tokens only, and a rolled window, which cannot be padded: the prefix needs neither."""
    session, engine = prefixed(sizes=(4,))
    assert session.step(PREFIX)[:, 0].tolist() == [1007, 1003, 1009]
    assert engine.calls == [] and session.position == 3
    session.step([1, 2, 4, 5])
    assert engine.calls == [4]


def test_rewind_to_inside_the_prefix() -> None:
    session, _ = prefixed(PADDABLE)
    session.step(PREFIX[:2])
    kept, before = session.windows(), state(session)
    session.step([PREFIX[2], 1, 1])
    session.rewind(2, kept)
    assert state(session) == before
    session.step([PREFIX[2], 4])
    assert session.position == 4


def test_reset_asks_for_the_prefix_again() -> None:
    session, _ = prefixed()
    session.step([*PREFIX, 1])
    session.reset()
    with pytest.raises(RingstepError, match="sink prefix"):
        session.step([1])
    session.step([*PREFIX, 1])


def test_the_prefix_counts_in_the_context() -> None:
    session, _ = prefixed()
    with pytest.raises(RingstepError, match="pass the context of 16"):
        session.step([*PREFIX, *[1] * 14])
    assert session.position == 0
    session.step([*PREFIX, *[1] * 13])


def test_a_contract_with_a_prefix_needs_it() -> None:
    spec = dataclasses.replace(make_spec(EVERY, 16), prefix=PrefixSpec("sink.bin", (7,)))
    other = Prefix((8,), entry(spec, [8]), np.zeros((1, TOKENS), np.float32))
    for prefix in (None, other):
        with pytest.raises(RingstepError, match=r"sink prefix.*sink\.bin"):
            DecodeSession(spec, Witness(spec), None, prefix)


@pytest.mark.parametrize("cache", ["", "int8"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_stand_in_for_ids(cache: str, dtype: str) -> None:
    spec = make_spec(PADDABLE, 16, (1, 4), ids=False)
    spec = quantised(spec, cache) if cache else spec
    by_row, _ = opened(spec)
    by_id, _ = opened(spec)
    ids = [5, 0, 49, 8, 1, 2, 3]
    rows = np.repeat(np.array(ids, dtype)[:, None], spec.hidden, 1)
    np.testing.assert_array_equal(by_row.step(rows), by_id.step(ids))
    assert state(by_row) == state(by_id)
    by_row.step([4])  # ids and rows mix


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_change_nothing(value: float) -> None:
    session, engine = opened(quantised(make_spec(EVERY, 16, (1, 4), ids=False)))
    rows = np.zeros((5, 4), np.float32)
    rows[3, 2] = value
    before = state(session)
    with pytest.raises(RingstepError, match="not finite"):
        session.step(rows)
    assert state(session) == before and engine.calls == []


@pytest.mark.parametrize("rows", [np.zeros((2, 5)), np.zeros((2, 3)), np.zeros((0, 4)), np.zeros((2, 4, 1)),
                                  np.zeros((2, 4), complex), np.zeros((2, 4), int)])  # fmt: skip
def test_rows_of_another_shape(rows: np.ndarray) -> None:
    session, engine = opened(make_spec(EVERY, 16, ids=False))
    with pytest.raises(RingstepError):
        session.step(rows)
    assert session.position == 0 and engine.calls == []


def test_rows_where_the_graph_takes_ids_or_a_prefix_is_due() -> None:
    for session, _ in (opened(make_spec(EVERY, 16)), prefixed(ids=False), prefixed(ids=True)):
        with pytest.raises(RingstepError, match=r"rows \[2, 4\].*feed ids"):
            session.step(np.zeros((2, 4), np.float32))
        assert session.position == 0


def test_integers_are_not_asked_to_be_finite() -> None:
    """Every integer is a value: the extremes of a cache's type pass through."""
    session, _ = opened(quantised(make_spec([("append", None)], 8, kv_heads=1)))
    inner = session.engine.run

    def extreme(n: int, inputs: Any, outputs: Any) -> None:
        inner(n, inputs, outputs)
        outputs["new_key_0"][...] = 255
        outputs["logits"][...] = 65535

    session.engine.run = extreme  # type: ignore[method-assign]
    assert (session.step([1]) == np.float32((65535 - 7) / 64)).all()
    assert session.caches[0, "key"][0, 0, 0, 0] == 255
