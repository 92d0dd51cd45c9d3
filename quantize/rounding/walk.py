"""Rounding every linear of a model, a layer at a time, on what calibration text puts into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantize.calibrate import Tick
from quantize.grid import QuantisedWeight, joined
from quantize.model import Model
from quantize.rounding import nearest
from quantize.scheme import Scheme, grid_for, weights_for
from quantize.torch_graph import Block, run
from quantize.walk import Entries, through
from recipes.step import head_sources
from recipes.weights import key
from ringstep.errors import RingstepError

Keep = Callable[[str, str, QuantisedWeight], Any]
Moment = Callable[[str], Tensor | None]


class Hessians:
    """The hook that sums x x^T of each linear's input, float32 [in, in]."""

    def __init__(self, block: Block) -> None:
        self.inputs = {step.inputs[1]: step.inputs[0] for step in block.steps if step.op == "Gemm"}
        self.sums: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name in self.inputs.values():
            self.sums.setdefault(name, torch.zeros(x.shape[-1], x.shape[-1])).addmm_(x.t(), x)
        return x

    def of(self, weight: str) -> Tensor:
        """The sum for a linear's weight."""
        return self.sums[self.inputs[weight]]


def round_weights(model: Model, sequences: Sequence[Sequence[int]], prefix: Entries, scheme: Scheme, keep: Keep,
                  tick: Tick = lambda _: None, moment: Moment = lambda _: None) -> None:  # fmt: skip
    """Round all linears and the head: keep(path, name, weight) takes each as it is done.

    `sequences` are ids that follow the sink prefix, whose entries are given. A linear that stays in float is not
    kept. With a sequential scheme a layer's Hessians are those of its float weights on what the rounded layers before
    it hand on. `moment(name)` gives the second moment of the gradients at a linear's output [out, out], for two-sided
    rounding (quantize/gradients.py). Raises RingstepError naming a tensor that cannot be rounded.
    """
    # Rounding to nearest looks at no text.
    every = [path for layer in range(len(model.plan.layers)) for path, _ in model.sources(layer).values()]
    needed = any(weights_for(scheme, path).rounding != "nearest" for path in [*every, "head"])
    states = [model.embedded(ids) for ids in sequences] if needed else []
    for layer in range(len(model.plan.layers)):
        session, engine = model.open_layer(layer)
        engine.hook = hessians = Hessians(engine.block)
        entries = {k: array for k, array in prefix.items() if k[0] == layer} or None
        after = []
        for rows in states:
            after.append(through(session, rows, entries))
            tick(len(rows))
        for name, (path, _) in model.sources(layer).items():
            if name in hessians.inputs:
                made = round_one(path, name, engine.weights[name], hessians, scheme, moment)
                if made is not None:
                    keep(path, name, made)
                    if scheme.sequential:
                        engine.weights[name] = torch.from_numpy(made.dequantised())
        if scheme.sequential:
            engine.hook = None
            after = [through(session, rows, entries) for rows in states]
        states = after
    block, sources = model.head(), head_sources(model.plan)
    norm, name = key(sources["norm.weight"]), key(sources["lm_head.weight"])
    watch = Hessians(block)
    if weights_for(scheme, "head").rounding != "nearest":
        with torch.inference_mode():
            for rows in states:
                feed = {block.inputs[0]: torch.from_numpy(rows)}
                one = {norm: model.weight(norm, sources["norm.weight"]), name: torch.zeros(1, model.plan.hidden)}
                run(block, feed, one, watch)
    # Rows are rounded one by one: a vocabulary's come in pieces.
    pieces = [round_one("head", name, weight, watch, scheme) for weight in model.head_pieces()]
    if pieces[0] is not None:
        keep("head", name, joined([p for p in pieces if p is not None]))


def round_one(path: str, name: str, weight: Tensor, hessians: Hessians, scheme: Scheme,
              moment: Moment = lambda _: None) -> QuantisedWeight | None:  # fmt: skip
    """Round one weight [out, in] as the scheme says; None where it stays in float."""
    grid, own = grid_for(scheme, path), weights_for(scheme, path)
    if grid is None:
        return None
    try:
        if own.rounding == "nearest":
            return nearest.quantise(weight.numpy(), grid)
        from quantize.rounding import clip, gptq, outputs

        hessian = hessians.of(name)
        if own.rounding == "clip":
            return clip.quantise(weight, hessian, grid)
        if own.rounding == "two-sided" and (metric := moment(name)) is not None:
            return outputs.quantise(weight, hessian, metric, grid, own.damping)
        return gptq.quantise(weight, hessian, grid, own.damping)
    except RingstepError as error:
        raise RingstepError(f"tensor {name}: {error}") from None
