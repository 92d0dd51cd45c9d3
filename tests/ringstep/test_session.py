"""The host loop on an engine that reports what its masks let it see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_specs import ANGLE, make_spec

from ringstep.contract import CacheSpec, StepSpec
from ringstep.encoding import open_table
from ringstep.engines.base import Arrays
from ringstep.errors import RingstepError
from ringstep.session import DecodeSession

TOKENS = 50  # the vocabulary


class Witness:
    """Keys carry their position + 1, values their token + 1; what each query sees is written down, layer by layer."""

    name = "witness"

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.seen: dict[int, list[list[tuple[int, int]]]] = {}  # query position -> a list a layer
        self.calls: list[int] = []
        self.spoil: Callable[[int, Arrays], None] = lambda call, outputs: None

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        self.calls.append(n)
        # The rotary table alone says which positions these are.
        positions = np.rint(np.arctan2(inputs["sin_rope"][:, 0], inputs["cos_rope"][:, 0]) / ANGLE).astype(int)
        assert positions.tolist() == list(range(positions[0], positions[0] + n))
        tokens = inputs["input_ids"] if "input_ids" in inputs else np.rint(inputs["x"][:, 0]).astype(int)
        for query in positions:
            self.seen[int(query)] = []
        for cache in self.spec.caches:
            keys, values = self.attend(cache, n, inputs, positions, tokens)
            prefix, new = ("present", slice(n, None)) if cache.kind == "roll" else ("new", slice(-n, None))
            array = outputs[f"{prefix}_key_{cache.layer}"]
            array[:] = keys[None, None, None, new] if transposed(cache) else keys[None, None, new, None]
            outputs[f"{prefix}_value_{cache.layer}"][:] = values[None, None, new, None]
        outputs["logits"][:] = tokens[:, None] + np.arange(self.spec.vocab) / 64
        self.spoil(len(self.calls), outputs)

    def attend(
        self, cache: CacheSpec, n: int, inputs: Arrays, positions: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        past = inputs[f"past_key_{cache.layer}"][0, -1]
        past = past[-1] if transposed(cache) else past[:, -1]
        keys = np.concatenate([past, positions + 1.0])
        values = np.concatenate([inputs[f"past_value_{cache.layer}"][0, -1, :, -1], tokens + 1.0])
        mask = inputs[f"mask_{cache.mask}"]
        assert mask.shape == (1, 1, n, len(keys))
        assert np.isin(mask, [0.0, self.spec.mask_value]).all()
        for row, query in zip(mask[0, 0], positions, strict=True):
            where = row == 0.0
            pairs = zip(keys[where].astype(int) - 1, values[where].astype(int) - 1, strict=True)
            self.seen[int(query)].append(sorted((int(p), int(t)) for p, t in pairs))
        return keys, values

    def close(self) -> None:
        self.calls.append(0)


def transposed(cache: CacheSpec) -> bool:
    return cache.key_layout == "transposed"


def witnessed(spec: StepSpec) -> tuple[DecodeSession, Witness]:
    engine = Witness(spec)
    table = None
    if spec.embedding:
        table = np.repeat(np.arange(spec.vocab, dtype=spec.dtype)[:, None], spec.hidden, axis=1)
    return DecodeSession(spec, engine, table), engine


def expected(spec: StepSpec, ids: list[int], query: int) -> list[list[tuple[int, int]]]:
    """Positions max(0, q - W + 1) .. q with their tokens, for each layer."""
    first = [0 if c.window is None else max(0, query - c.window + 1) for c in spec.caches]
    return [[(p, ids[p]) for p in range(start, query + 1)] for start in first]


windows = st.integers(1, 12)
layer_kinds = st.one_of(
    st.tuples(st.just("ring"), windows), st.tuples(st.just("append"), st.none() | windows)
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), layers=st.lists(layer_kinds, min_size=1, max_size=3), context=st.integers(1, 40))
def test_every_split_sees_the_same(data: st.DataObject, layers: Any, context: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, context), min_size=1, max_size=3, unique=True), "graphs")
    spec = make_spec(
        layers, context, tuple(sizes), kv_heads=data.draw(st.integers(1, 2)), ids=data.draw(st.booleans()),
        key_layout=data.draw(st.sampled_from(["plain", "transposed"])),
        dtype=data.draw(st.sampled_from(["float32", "float16"])),
    )  # fmt: skip
    session, engine = witnessed(spec)
    ids = data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=context, max_size=context), "ids")
    while session.position < context:
        count = data.draw(st.integers(1, context - session.position), "step")
        start = session.position
        logits = session.step(ids[start : start + count])
        assert logits.shape == (count, TOKENS) and logits.dtype == np.float32
        assert np.rint(logits[:, 0]).tolist() == ids[start : start + count]
    assert session.position == context
    for query in range(context):
        assert engine.seen[query] == expected(spec, ids, query)
    for cache in spec.caches:
        positions, keys, values = session.entries(cache.layer)
        # append has no slot for the last position: nothing can follow it
        last = min(cache.length, context) if cache.kind == "append" else context
        held = list(range(max(0, last - cache.length), last))
        assert positions.tolist() == held
        assert keys.shape == values.shape == (cache.kv_heads, len(held), cache.head_dim)
        assert (keys == np.array(held)[None, :, None] + 1).all()
        assert (values == np.array([ids[p] for p in held])[None, :, None] + 1).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), window=st.none() | windows, context=st.integers(1, 40))
def test_roll_sees_the_same(data: st.DataObject, window: int | None, context: int) -> None:
    n = data.draw(st.integers(1, context), "chunk")
    spec = make_spec([("roll", window), ("ring", 5)], context, tuple({1, n}))
    session, engine = witnessed(spec)
    ids = data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=context, max_size=context), "ids")
    while session.position < context:
        count = data.draw(st.integers(1, context - session.position), "step")
        session.step(ids[session.position : session.position + count])
    for query in range(context):
        assert engine.seen[query] == expected(spec, ids, query)
    length = spec.caches[0].length
    assert session.entries(0)[0].tolist() == list(range(max(0, context - length), context))


def test_rolling_allocates_nothing() -> None:
    session, _ = witnessed(make_spec([("roll", 4)], 16))
    arrays = {id(session.caches[0, "key"]), id(session.buffers[1].outputs["present_key_0"])}
    for token in range(6):
        session.step([token])
        assert {id(session.caches[0, "key"]), id(session.buffers[1].outputs["present_key_0"])} == arrays


@pytest.mark.parametrize(
    ("sizes", "count", "calls"),
    [
        ((1, 8), 8, [8]),
        ((1, 8), 1, [1]),
        ((1, 8), 3, [8]),  # padded: a chunk costs little more than a token
        ((1, 8), 17, [8, 8, 1]),
        ((1, 8), 19, [8, 8, 8]),
        ((8,), 1, [8]),
        ((1,), 3, [1, 1, 1]),
        ((1, 4, 16), 7, [4, 4]),
        ((1, 4, 16), 22, [16, 4, 4]),
    ],
)
def test_which_graphs_run(sizes: tuple[int, ...], count: int, calls: list[int]) -> None:
    session, engine = witnessed(make_spec([("ring", 4), ("append", None)], 32, sizes))
    session.step(list(range(count)))
    assert engine.calls == calls
    assert session.position == count


def test_padding_is_never_stored() -> None:
    spec = make_spec([("ring", 8), ("append", None)], 32, (1, 6))
    padded, _ = witnessed(spec)
    plain, _ = witnessed(spec)
    padded.step([5, 6, 7])
    for token in (5, 6, 7):
        plain.step([token])
    assert state(padded) == state(plain)


def test_padding_past_the_context() -> None:
    session, engine = witnessed(make_spec([("ring", 4), ("append", None)], 7, (6,)))
    session.step([1] * 6)
    session.step([2])
    assert session.position == 7
    assert engine.seen[6][1] == [(p, 1) for p in range(6)] + [(6, 2)]


def state(session: DecodeSession) -> tuple[int, dict[tuple[int, str], bytes]]:
    return session.position, {key: array.tobytes() for key, array in session.caches.items()}


Layers = list[tuple[Any, int | None]]
EVERY: Layers = [("ring", 4), ("append", None), ("roll", 5), ("append", 3)]
PADDABLE: Layers = [("ring", 4), ("append", None), ("append", 3)]


def running(layers: Layers = EVERY, sizes: tuple[int, ...] = (1, 4), **options: Any) -> tuple[DecodeSession, Witness]:
    """A session of context 16 at position 9."""
    session, engine = witnessed(make_spec(layers, 16, sizes, **options))
    session.step(list(range(9)) if 1 in sizes else list(range(8)))
    engine.calls.clear()
    return session, engine


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "non-empty"),
        (np.zeros((0,), np.int64), "non-empty"),
        ([1.0, 2.0], "whole numbers"),
        ([1, 2.5], "whole numbers"),
        ([True, False], "whole numbers"),
        (["1"], "whole numbers"),
        ([None], "whole numbers"),
        (None, "whole numbers"),
        (3, "whole numbers"),
        ([[1, 2]], "whole numbers"),
        ([[1, 2], [3]], "whole numbers"),
        ([1 << 70], "whole numbers"),
        ([float("nan")], "whole numbers"),
        ([-1], "outside 0..49"),
        ([1, 50], "outside 0..49"),
        ([1 << 40], "outside 0..49"),
        (np.array([255], np.uint8), "outside 0..49"),
        ([1] * 8, "pass the context of 16"),
        ([1] * 100, "pass the context of 16"),
    ],
)
def test_misuse_changes_nothing(ids: Any, words: str) -> None:
    session, engine = running()
    before = state(session)
    with pytest.raises(RingstepError, match=words):
        session.step(ids)
    assert state(session) == before
    assert engine.calls == []
    session.step(np.array([1, 2], np.uint8))


@pytest.mark.parametrize("output", ["logits", "new_key_0", "new_value_1", "present_key_2", "present_value_2"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("transposed_keys", [False, True])
@pytest.mark.parametrize(("count", "call"), [(1, 1), (4, 1), (7, 1), (7, 2), (7, 4)])
def test_values_that_are_not_finite_change_nothing(
    output: str, value: float, transposed_keys: bool, count: int, call: int
) -> None:
    session, engine = running(key_layout="transposed" if transposed_keys else "plain")
    before = state(session)

    def spoil(at: int, outputs: Arrays) -> None:
        if at == call:
            outputs[output].flat[-1] = value

    engine.spoil = spoil
    with pytest.raises(RingstepError, match=f"output {output} .* not finite"):
        session.step([3] * count)
    assert len(engine.calls) == call  # some calls had succeeded
    assert state(session) == before
    engine.spoil = lambda at, outputs: None
    again, _ = running(key_layout="transposed" if transposed_keys else "plain")
    np.testing.assert_array_equal(session.step([4] * count), again.step([4] * count))
    assert state(session) == state(again)


@pytest.mark.parametrize("output", ["logits", "new_key_0", "new_value_1", "present_key_2"])
def test_an_output_left_unwritten_is_seen(output: str) -> None:
    session, engine = running()
    right = engine.run

    def lazy(n: int, inputs: Arrays, outputs: Arrays) -> None:
        stale = outputs[output].copy()  # what the last call left there, and the session's own mark
        right(n, inputs, outputs)
        outputs[output][:] = stale

    engine.run = lazy  # type: ignore[method-assign]
    before = state(session)
    with pytest.raises(RingstepError, match=f"output {output} .* never wrote"):
        session.step([3])
    assert state(session) == before


def test_padding_may_be_anything() -> None:
    session, engine = running(PADDABLE)

    def spoil(at: int, outputs: Arrays) -> None:
        outputs["logits"][3:] = np.nan

    engine.spoil = spoil
    assert np.isfinite(session.step([1, 2, 3])).all()


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 3])
def test_an_engine_that_fails_changes_nothing(error: type[BaseException], call: int) -> None:
    session, engine = running()
    before = state(session)

    def spoil(at: int, outputs: Arrays) -> None:
        if at == call:
            raise error("no")

    engine.spoil = spoil
    with pytest.raises(error):
        session.step([1] * 7)
    assert state(session) == before


def test_a_rolled_window_cannot_be_padded() -> None:
    session, _ = running(sizes=(4,))
    before = state(session)
    for count in (1, 3):
        with pytest.raises(RingstepError, match=f"{count} tokens left and the smallest graph takes 4; .*--chunk 1"):
            session.step([1] * count)
    with pytest.raises(RingstepError, match="2 tokens left"):
        session.step([1] * 6)  # the first 4 would have fitted
    assert state(session) == before
    assert session.step([1] * 8).shape == (8, TOKENS)


def test_reset_forgets_everything() -> None:
    session, _ = running()
    fresh, _ = witnessed(session.spec)
    session.reset()
    assert state(session) == state(fresh)
    np.testing.assert_array_equal(session.step([7, 8, 9]), fresh.step([7, 8, 9]))
    assert state(session) == state(fresh)


def test_logits_belong_to_the_caller() -> None:
    session, _ = running()
    first = session.step([7])
    kept = first.copy()
    session.step([8])
    np.testing.assert_array_equal(first, kept)


def test_the_masks_of_a_shared_name_are_one_input() -> None:
    session, _ = running([("ring", 4), ("ring", 4)])
    assert [n for n in session.buffers[1].inputs if n.startswith("mask")] == ["mask_ring_4"]


def test_a_table_of_another_shape() -> None:
    spec = make_spec([("ring", 4)], 8, ids=False)
    for table in (None, np.zeros((50, 5), np.float32), np.zeros(200, np.float32)):
        with pytest.raises(RingstepError, match="table"):
            DecodeSession(spec, Witness(spec), table)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    spec = make_spec([("ring", 4)], 8, ids=False)
    with pytest.raises(RingstepError, match="which is the embedding table"):
        open_table(tmp_path, spec)
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "embedding.bin").write_bytes(b"\0" * 4100)
    with pytest.raises(RingstepError, match="which is the embedding table"):
        open_table(tmp_path, spec)
    rows = np.arange(200, dtype=np.float32)
    (tmp_path / "onnx" / "embedding.bin").write_bytes(b"\0" * 4096 + rows.tobytes())
    table = open_table(tmp_path, spec)
    assert table is not None
    np.testing.assert_array_equal(table[np.arange(50)], rows.reshape(50, 4))
    assert open_table(tmp_path, dataclasses.replace(spec, embedding=None)) is None


def test_an_unknown_engine(tmp_path: Path) -> None:
    make_spec([("ring", 4)], 8).save(tmp_path / "step.json")
    with pytest.raises(RingstepError, match=r"did you mean ort\?"):
        DecodeSession.open(tmp_path, "orte")


def test_leaving_closes_the_engine() -> None:
    session, engine = running()
    with session:
        session.step([1])
    assert engine.calls == [1, 0]
