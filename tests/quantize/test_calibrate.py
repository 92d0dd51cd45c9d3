"""Calibration: every tensor's range against ONNX Runtime running the whole graph, sinks that were planted, files."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from float_models import Recorder, calibrated, model_of, texts, with_read

import quantize.model
from quantize.activations import MOVES
from quantize.calibrate import Calibration, Sink, calibrate, constant, find_sinks, leading, load, save
from quantize.model import Model
from quantize.observe import BINS, Seen
from ringstep.errors import RingstepError
from ringstep.session import DecodeSession

NAMES = ("llama", "gemma3", "spark")


@functools.cache
def recorded(name: str, skip: int) -> tuple[dict[str, list[np.ndarray]], dict[str, str], dict[str, np.ndarray]]:
    """Every tensor over all texts, the first `skip` tokens of each run but not noted; and what those left."""
    model = model_of(name)
    engine = Recorder(model)
    table = model.table(np.arange(model.plan.vocab))
    spec = dataclasses.replace(model.spec, embedding=None)
    session = DecodeSession(spec, engine, table)
    first: dict[str, np.ndarray] = {}
    for ids in texts(model.plan.vocab):
        session.reset()
        if skip:
            engine.on = False
            first = {"logits": session.step(table[ids[:skip]])}
            for layer in range(len(model.plan.layers)):
                _, keys, values = session.entries(layer)
                first |= {f"key_{layer}": keys, f"value_{layer}": values}
        engine.on = True
        session.step(table[ids[skip : len(ids) - 1 + skip]])
    return engine.seen, engine.kinds, first


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_ranges_are_what_onnx_runtime_computes(name: str, skip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize.model, "HEAD_ROWS", 70)  # the vocabulary comes in pieces
    found = calibrated.__wrapped__(name, skip)  # afresh, in pieces
    want, kinds, first = recorded(name, skip)
    assert found.tokens == 3 * 32 and found.prefix == tuple(texts(1 << 5)[0][:skip])
    rotary = {n for n in found.seen if n.startswith(("cos_", "sin_"))}
    for n in rotary:
        assert (found.seen[n].low, found.seen[n].high) == (-1, 1)
    outputs = {o for o in want if o.startswith(("new_", "hidden_"))}
    moved = {n for n, kind in kinds.items() if kind in MOVES} - outputs
    # Of the embedding only what enters the first layer is seen; the rest is the table's own business.
    embed = {n for n in kinds if n.startswith("/embed/")}
    expected = set(want) - moved - embed - {"x"}
    assert set(found.seen) - rotary - {"x", "embedded"} - embed == expected - {"embedded"}
    for n in expected & set(found.seen):
        parts = list(want[n])
        if n.startswith("new_") and skip:
            what, layer = n.split("_")[1:]
            parts.append(first[f"{what}_{layer}"])
        low, high = min(p.min() for p in parts), max(p.max() for p in parts)
        reach = max(abs(low), abs(high))
        assert abs(found.seen[n].low - low) <= 1e-4 * reach, n
        assert abs(found.seen[n].high - high) <= 1e-4 * reach, n
        if n.startswith(("/layers.0/mlp", "new_")):
            assert found.seen[n].counts.sum() == sum(p.size for p in parts), n


@pytest.mark.parametrize("name", NAMES)
def test_the_prefix_is_what_the_whole_step_leaves(name: str) -> None:
    found = calibrated(name, 1)
    _, _, first = recorded(name, 1)
    layers = len(model_of(name).plan.layers)
    assert sorted(found.entries) == [(i, what) for i in range(layers) for what in ("key", "value")]
    for (layer, what), array in found.entries.items():
        want = first[f"{what}_{layer}"]
        assert array.shape == (1, *want.shape) and array.dtype == np.float32
        np.testing.assert_allclose(array[0], want, atol=1e-4 * np.abs(want).max())
    assert found.logits is not None and found.logits.dtype == np.float32
    np.testing.assert_allclose(found.logits, first["logits"], atol=1e-4 * np.abs(first["logits"]).max())


def test_without_a_prefix_there_is_none() -> None:
    found = calibrated("llama", 0)
    assert found.prefix == () and found.entries == {} and found.logits is None


def test_progress_adds_up() -> None:
    model, ticks = model_of("llama"), list[int]()
    every = [ids[:-1] for ids in texts(160)]
    calibrate(model, every, [], ticks.append)
    assert sum(ticks) == 3 * 32 * (len(model.plan.layers) + 1)
    ticks.clear()
    find_sinks(model, every[0], ticks.append)
    assert sum(ticks) == 32 * len(model.plan.layers)


def planted(model: Model, token: int, size: float) -> Model:
    """The token's embedding row is enlarged: the residual stream carries it through every layer."""
    return dataclasses.replace(model, table=lambda ids: model.table(ids) * np.where(ids == token, size, 1)[:, None]
                               .astype(np.float32))  # fmt: skip


@pytest.mark.parametrize("positions", [(0,), (0, 1), (5,), (0, 17)])
def test_planted_sinks_are_found(positions: tuple[int, ...]) -> None:
    model, token = planted(model_of("llama"), 159, 3000.0), 159
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 150, 32)]
    for position in positions:
        ids[position] = token
    found = find_sinks(model, ids)
    assert [(s.position, s.token) for s in found] == [(p, token) for p in positions]
    reach = float(np.abs(model.table(np.array([token]))).max())
    for sink in found:
        assert sink.ratio > 20 and 0 <= sink.layer < 2
        assert abs(sink.largest / reach - 1) < 0.1  # what layers add is small beside it
    assert leading(found) == {(0,): 1, (0, 1): 2, (5,): 0, (0, 17): 1}[positions]


def test_what_stands_out_a_little_is_no_sink() -> None:
    """The line is drawn at 20 times what other positions reach."""
    ids = [159, *(int(i) for i in np.random.default_rng(1).integers(0, 150, 31))]
    for size, sinks in ((50.0, 0), (200.0, 1)):
        assert len(find_sinks(planted(model_of("llama"), 159, size), ids)) == sinks


def test_no_sinks_in_an_ordinary_model() -> None:
    for name in NAMES:
        assert find_sinks(model_of(name), texts(160)[0][:-1]) == []


@pytest.mark.parametrize("size", [10, 60])  # none before that layer, or a lesser one
def test_a_sink_that_a_later_layer_makes(size: int) -> None:
    """As in SmolLM2, where it appears at layer 12: the second MLP squares a direction that one token has most of."""
    base, at, token = model_of("llama"), 6, 159
    direction = np.eye(64, dtype=np.float32)[3]
    table = lambda ids: np.where(ids[:, None] == token, size * direction, base.table(ids))
    model = dataclasses.replace(base, table=table)
    for name in ("gate_proj", "up_proj"):
        model = with_read(model, f"model.layers.1.mlp.{name}.weight", lambda w: np.tile(4 * direction, (len(w), 1)))
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 150, 32)]
    ids[at] = token
    found = find_sinks(model, ids)
    largest = max(found, key=lambda sink: sink.ratio)
    assert (largest.position, largest.token, largest.layer) == (at, token, 1)
    assert leading(found) == 0


def test_leading() -> None:
    sink = lambda position: Sink(position, 1, 0, 1.0, 30.0)
    assert leading([]) == 0 and leading([sink(1), sink(2)]) == 0
    assert leading([sink(0), sink(1), sink(3)]) == 2


@pytest.mark.parametrize("count", [0, 2])
def test_saved_and_loaded(tmp_path: Path, count: int) -> None:
    random = np.random.default_rng(0)
    seen = {}
    for name in ("x", "/layers.0/attn/q_proj/Gemm_output_0", "new_key_0"):
        low, high = sorted(random.normal(size=2).tolist())
        seen[name] = Seen(low, high, max(-low, high), random.integers(0, 1 << 24, BINS).astype(float))
    number = lambda *shape: random.normal(size=shape).astype(np.float32)
    entries = {(layer, w): number(1, 2, count, 4) for layer in (0, 11) for w in ("key", "value")} if count else {}
    want = Calibration(4096, seen, (7, 3)[:count], entries, number(count, 9) if count else None,
                       [Sink(0, 159, 12, 24920.5, 35.25), Sink(4, 1, 2, 3.5, 21.0)])  # fmt: skip
    save(tmp_path / "c.npz", want)
    have = load(tmp_path / "c.npz")
    assert (have.tokens, have.prefix, have.sinks) == (want.tokens, want.prefix, want.sinks)
    assert list(have.seen) == list(seen) and sorted(have.entries) == sorted(entries)
    for name, own in seen.items():
        mine = have.seen[name]
        assert (mine.low, mine.high, mine.edge) == (own.low, own.high, own.edge)
        np.testing.assert_array_equal(mine.counts, own.counts)
    for k, array in entries.items():
        np.testing.assert_array_equal(have.entries[k], array)
    assert (have.logits is None) == (want.logits is None)
    if want.logits is not None and have.logits is not None:
        np.testing.assert_array_equal(have.logits, want.logits)
    sinkless = dataclasses.replace(want, sinks=[])
    save(tmp_path / "d.npz", sinkless)
    assert load(tmp_path / "d.npz").sinks == []


def test_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    save(path, Calibration(1, {"x": Seen(-1, 1, 1.0)}))
    raw = path.read_bytes()
    spoiled = {"empty": b"", "text": b"hello", "zeros": b"\0" * 1000, "longer": raw[:100] * 3}
    spoiled |= {f"cut at {at}": raw[:at] for at in range(1, len(raw), len(raw) // 40)}
    spoiled |= {f"flipped at {at}": raw[:at] + bytes([raw[at] ^ 255]) + raw[at + 1 :] for at in range(0, 300, 7)}
    for what, content in spoiled.items():
        path.write_bytes(content)
        try:
            load(path)
            assert what.startswith("flipped"), what  # in a value, or in what zip does not look at
        except RingstepError as error:
            assert str(path) in str(error) and "\n" not in str(error), what
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "pickle.npz", names=np.array([{}], object), edges=np.zeros((1, 3)), counts=np.zeros((1, BINS)))
    np.save(tmp_path / "bare.npy", np.zeros(3))
    for name in ("other.npz", "pickle.npz", "bare.npy", "missing.npz", "."):
        with pytest.raises(RingstepError, match="no calibration of ringstep's"):
            load(tmp_path / name)


BAD_KEY = np.full((1, 1, 1, 4), np.nan, np.float32)
SEEN = [Seen(1, -1, 1.0), Seen(-1, np.nan, 1.0), Seen(-1, 1, -1.0), Seen(-1, 1, 1.0, np.full(BINS, -1.0)),
        Seen(-1, 1, 1.0, np.full(BINS, np.inf))]  # fmt: skip


@pytest.mark.parametrize(
    "spoiled",
    [*(Calibration(1, {"x": seen}) for seen in SEEN),
     *(Calibration(1, {"x": Seen(-1, 1, 1.0)}, (5,), {(0, "key"): key}) for key in (BAD_KEY, BAD_KEY.astype(float)))],
)  # fmt: skip
def test_values_that_no_calibration_has(spoiled: Calibration, tmp_path: Path) -> None:
    save(tmp_path / "c.npz", spoiled)
    with pytest.raises(RingstepError, match="no calibration of ringstep's"):
        load(tmp_path / "c.npz")


def overflowing(model: Model) -> Model:
    """Keys of the second layer beyond float32: 1e30 times 1e30."""
    model = with_read(model, "model.layers.1.self_attn.k_proj.weight", lambda w: w * np.float32(1e30))
    return with_read(model, "model.layers.1.input_layernorm.weight", lambda w: w * np.float32(1e30))


def test_a_tensor_that_is_not_finite_is_named() -> None:
    model = overflowing(model_of("llama"))
    every = [ids[:-1] for ids in texts(160)]
    runs: list[Any] = [
        lambda: calibrate(model, every, []),
        lambda: calibrate(model, every, every[0][:1]),  # in the prefix itself
        lambda: find_sinks(model, every[0]),
    ]
    for run in runs:
        with pytest.raises(RingstepError) as caught:
            run()
        message = str(caught.value)
        assert "tensor /layers.1/attn/k_proj/Gemm_output_0" in message and "not finite" in message, message
        assert "\n" not in message


def test_logits_that_are_not_finite_are_named() -> None:
    model = with_read(model_of("qwen3"), "lm_head.weight", lambda w: np.where(np.arange(160)[:, None] == 9, 3e38, w)
                      .astype(np.float32))  # fmt: skip
    with pytest.raises(RingstepError, match=r"tensor .*(logits|head).*not finite"):
        calibrate(model, [texts(160)[0][:-1]], [])


def test_constant_tensors_are_listed() -> None:
    seen = {"a": Seen(0, 0), "b": Seen(-1, 1), "c": Seen(3.5, 3.5), "d": Seen()}
    assert [n for n in constant(seen) if n != "d"] == ["a", "c"]
