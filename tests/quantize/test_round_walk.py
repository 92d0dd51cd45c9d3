"""The walk that rounds: what a layer's Hessians are taken from."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from float_models import model_of

from quantize.grid import Grid, QuantisedWeight
from quantize.model import Model
from quantize.rounding import clip
from quantize.rounding import walk as rounding
from quantize.scheme import Scheme, Weights
from quantize.walk import through

IDS = [[int(i) for i in np.random.default_rng(seed).integers(0, 160, 24)] for seed in (1, 2)]
SCHEME = Scheme("test", weights=Weights(bits=4, rounding="clip"), head=Weights(bits=4, rounding="clip"))


def rounded(model: Model, scheme: Scheme) -> dict[str, QuantisedWeight]:
    made: dict[str, QuantisedWeight] = {}
    rounding.round_weights(model, IDS, {}, scheme, lambda path, name, weight: made.__setitem__(name, weight))
    return made


def replaced(model: Model, made: dict[str, QuantisedWeight], layers: int) -> Model:
    """The model with the rounded weights in its first layers."""
    names = [name for layer in range(layers) for name in model.sources(layer) if name in made]
    values = {name: made[name].dequantised() for name in names}
    return dataclasses.replace(model, read=lambda s: values[s.name] if s.name in values else model.read(s))


def hessian(model: Model, layer: int, name: str) -> torch.Tensor:
    """Of one linear, over all texts, by a float walk of the model."""
    states = [model.embedded(ids) for ids in IDS]
    for at in range(layer + 1):
        session, engine = model.open_layer(at)
        engine.hook = hessians = rounding.Hessians(engine.block)
        states = [through(session, rows, None) for rows in states]
    return hessians.of(name)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_hessians_come_from_the_layers_before(name: str, sequential: bool) -> None:
    model = model_of(name)
    made = rounded(model, dataclasses.replace(SCHEME, sequential=sequential))
    other = rounded(model, dataclasses.replace(SCHEME, sequential=not sequential))
    for layer in range(2):
        # The layers before are rounded, this one is not.
        walked = replaced(model, made, layer) if sequential else model
        for weight, (path, source) in model.sources(layer).items():
            if weight in made:
                want = clip.quantise(torch.from_numpy(model.read(source)), hessian(walked, layer, weight), Grid(4))
                np.testing.assert_array_equal(made[weight].q, want.q, err_msg=path)
                np.testing.assert_array_equal(made[weight].scale, want.scale, err_msg=path)
    assert all((made[w].scale == other[w].scale).all() for w in model.sources(0) if w in made)
    assert not all((made[w].scale == other[w].scale).all() for w in model.sources(1) if w in made)


def test_the_head_reads_what_the_rounded_layers_make(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = model_of("llama"), {}
    one = rounding.round_one

    def watched(path: str, name: str, weight: Any, hessians: Any, scheme: Scheme, *rest: Any) -> Any:
        seen[path] = hessians.of(name)
        return one(path, name, weight, hessians, scheme, *rest)

    monkeypatch.setattr(rounding, "round_one", watched)
    made = rounded(model, dataclasses.replace(SCHEME, sequential=True))
    for layers, alike in ((2, True), (0, False)):
        walked = replaced(model, made, layers)
        states = [walked.embedded(ids) for ids in IDS]
        for layer in range(2):
            session, _ = walked.open_layer(layer)
            states = [through(session, rows, None) for rows in states]
        x = torch.from_numpy(np.concatenate(states))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * torch.from_numpy(model.read(model.plan.norm))
        error = float((x.T @ x - seen["head"]).abs().max() / seen["head"].abs().max())
        assert (error < 1e-5) == alike
