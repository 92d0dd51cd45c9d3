"""Rescaling input channels: the float model stays, and what rounding costs goes down where channels are loud."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from float_models import model_of, with_read

from quantize.fake import logits
from quantize.folding import rescale
from quantize.folding.rescale import IN, OUT, find, groups, rescaled, search
from quantize.folding.rotate import rotated, rotation
from quantize.grid import Grid
from quantize.model import Model
from quantize.rounding import nearest
from quantize.rounding.walk import Hessians
from quantize.scheme import Override, Scheme, Weights
from quantize.walk import through
from recipes.weights import key

NAMES = ["llama", "qwen3", "spark", "gemma3"]
SCHEME = Scheme("test", weights=Weights(bits=4))
TEXTS = [[int(i) for i in np.random.default_rng(seed).integers(0, 96, 17)] for seed in (1, 2)]
SEQUENCES, PREFIX = [ids[1:] for ids in TEXTS], [5]
MLP_NORM = {"gemma3": "pre_mlp_norm"}


def loud(name: str) -> Model:
    """A model with three loud channels behind each norm, and rows of up_proj that make loud channels of their own."""
    model = model_of(name)
    for layer in range(len(model.plan.layers)):
        for path, source in model.plan.layer_sources(layer).items():
            if path in ("input_norm.weight", f"{MLP_NORM.get(name, 'post_norm')}.weight", "mlp.up_proj.weight"):
                model = with_read(model, source.name, louder)
    return model


def louder(values: np.ndarray) -> np.ndarray:
    made = values.copy()
    made[[3, 17, 30]] *= 30
    return made


def walked(model: Model, weight: Any = lambda _: None) -> np.ndarray:
    return logits(model, [*PREFIX, *SEQUENCES[0]], {}, weight, None)


def errors(model: Model, scales: Any) -> dict[str, float]:
    """What each linear's outputs lose with the rescaled model rounded to nearest, on the inputs of the original."""
    found, states = {}, [model.embedded(ids) for ids in SEQUENCES]
    for layer in range(len(model.plan.layers)):
        session, engine = model.open_layer(layer)
        engine.hook = hessians = Hessians(engine.block)
        states = [through(session, rows, None) for rows in states]
        for name in hessians.inputs:
            path, source = model.sources(layer)[name]
            weight, h = model.read(source), hessians.of(name).double().numpy()
            rows, columns = scales.get(OUT + name, np.ones(1))[:, None], scales.get(IN + name, 1.0)
            off = nearest.quantise(weight / rows * columns, Grid(4)).dequantised() * rows / columns - weight
            found[path] = float(np.einsum("oi,ij,oj", off, h, off) / np.einsum("oi,ij,oj", weight, h, weight))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_float_model_stays(name: str) -> None:
    model = loud(name)
    scales = find(model, SEQUENCES, PREFIX, SCHEME)
    made = dataclasses.replace(model, read=rescaled(model.read, scales))
    want = walked(model)
    assert np.abs(walked(made) - want).max() < 1e-4 * np.abs(want).max()
    sources = model.plan.layer_sources(1)
    norms = ["input_norm", MLP_NORM.get(name, "post_norm")]
    for path in (*norms, "mlp.up_proj"):
        assert scales[OUT + key(sources[f"{path}.weight"])].max() > 1.5, path
        assert (made.read(sources[f"{path}.weight"]) != model.read(sources[f"{path}.weight"])).any()
    readers = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    readers += ["attn.g_proj"] * ("attn.g_proj.weight" in sources)
    layers = [model.plan.layer_sources(i) for i in range(len(model.plan.layers))]
    assert {n for n in scales if n.startswith(IN)} == {IN + key(own[f"{p}.weight"]) for own in layers for p in readers}
    before, after = errors(model, {}), errors(model, scales)
    for path in before:
        # Linears of one group share their scales: one may lose a little for the others.
        assert after[path] < 1.1 * before[path], path
    assert sum(after.values()) < 0.7 * sum(before.values())


def test_rotated_then_rescaled() -> None:
    plain = loud("qwen3")
    plan, read = rotated(plain.plan, plain.read)
    stream = rotation(plan.hidden)
    model = dataclasses.replace(plain, plan=plan, read=read, table=lambda ids: stream.after(plain.table(ids)))
    scales = find(model, SEQUENCES, PREFIX, SCHEME)
    made, want = dataclasses.replace(model, read=rescaled(read, scales)), walked(plain)
    assert scales and np.abs(walked(made) - want).max() < 1e-4 * np.abs(want).max()
    norms = [s for s in plan.layer_sources(1).values() if len(s.out_shape) == 1 and OUT + key(s) in scales]
    assert norms
    np.testing.assert_allclose(made.read(norms[0]), 1 / scales[OUT + key(norms[0])], rtol=1e-6)


def test_squares_are_those_of_the_text_after_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = loud("llama"), []
    monkeypatch.setattr(rescale, "search", lambda weights, squares: seen.append(squares))
    assert find(model, SEQUENCES, PREFIX, SCHEME) == {}
    want = np.zeros(64)
    for ids in SEQUENCES:
        x = model.embedded(ids).astype(np.float64)
        norm = model.read(model.plan.layer_sources(0)["input_norm.weight"])
        want += np.square(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * norm).sum(0)
    np.testing.assert_allclose(seen[0], want, rtol=1e-4)
    assert len(seen) == 2 * 3


def test_only_what_can_be_scaled() -> None:
    """Norms of queries and keys, and those behind attention, feed no linear; o_proj is behind shared heads."""
    for name, norms in (("qwen3", 2), ("gemma3", 2), ("spark", 2)):
        model = model_of(name)
        paths = {n: path.removeprefix("layers.0.") for n, (path, _) in model.sources(0).items()}
        found = {paths[g.source]: [paths[n] for n in g.linears] for g in groups(model.block(0))}
        assert len(found) == norms + 1 and found["mlp.up_proj"] == ["mlp.down_proj"]
        assert found[MLP_NORM.get(name, "post_norm")] == ["mlp.gate_proj", "mlp.up_proj"]
        assert sorted(found["input_norm"])[-3:] == ["attn.k_proj", "attn.q_proj", "attn.v_proj"]


def test_a_tensor_with_another_reader_is_left() -> None:
    block = model_of("llama").block(0)
    normed = block.steps[0].outputs[0]
    more = dataclasses.replace(block.steps[-1], inputs=("x", normed), outputs=("more",))
    assert len(groups(dataclasses.replace(block, steps=(*block.steps, more)))) == 2
    assert len(groups(dataclasses.replace(block, outputs=(*block.outputs, normed)))) == 2
    up = next(s for s in block.steps if s.inputs[-1].endswith("up_proj.weight")).outputs[0]
    more = dataclasses.replace(more, inputs=("x", up))
    assert len(groups(dataclasses.replace(block, steps=(*block.steps, more)))) == 2


GRIDS = [Grid(4), Grid(4, block=16), Grid(4, True, 16, True), Grid(4, False), Grid(3)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_search_finds_the_best_of_the_grid(grid: Grid) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 48, generator=generator).numpy()
    x[:, [2, 20, 40]] *= 25
    weights = [torch.randn(rows, 48, generator=generator).numpy() for rows in (24, 8)]
    squares = np.square(x).sum(0)

    def loss(scale: Any) -> float:
        """With inputs that are independent of each other."""
        errors = [nearest.quantise(w * scale, grid).dequantised() / scale - w for w in weights]
        return float(sum((np.square(e).astype(np.float64) * squares).sum() for e in errors))

    scale = search([(w, grid) for w in weights], squares)
    assert scale is not None and abs(np.log(scale).mean()) < 1e-5 and scale.dtype == np.float32
    assert loss(scale) < 0.5 * loss(1.0)
    for alpha in np.arange(11) / 10:
        other = np.sqrt(squares) ** alpha
        assert loss(scale) <= 1.0001 * loss((other / np.exp(np.log(other).mean())).astype(np.float32))
    # With the real inputs as well.
    output = lambda s: sum(
        np.square(x @ (nearest.quantise(w * s, grid).dequantised() / s - w).T).sum() for w in weights)  # fmt: skip
    assert output(scale) < 0.7 * output(1.0)


def test_search_without_gain() -> None:
    weight = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    assert search([(weight, Grid(4))], np.ones(16)) is None
    assert search([(weight, Grid(4))], np.zeros(16)) is None
    assert search([], np.arange(16.0)) is None
    silent = search([(weight, Grid(4))], np.array([0.0, 1e6, *[1.0] * 14]))
    assert silent is None or (np.isfinite(silent).all() and silent.min() > 0)


def test_floats_are_not_scaled_for() -> None:
    """Linears that stay in float have no say; a group of them has no scale."""
    model = loud("llama")
    keys = (("bits", 16), ("dtype", "float16"))
    attn = dataclasses.replace(SCHEME, override=(Override("*attn*", keys),))
    scales = find(model, SEQUENCES, PREFIX, attn)
    changed = {n for n in scales if "attn" in n or "input_layernorm" in n}
    assert not changed and len([n for n in scales if n.startswith(OUT)]) == 2 * 2
    ticks: list[int] = []
    find(model, SEQUENCES, [], SCHEME, ticks.append)
    assert ticks == list(itertools.repeat(16, 2 * 2))
