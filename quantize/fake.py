"""The quantised model computed in torch floats: quantised weights, activations rounded to their encodings.

What a chip's own arithmetic adds to that is the difference to the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantize.activations import MOVES, Activation
from quantize.model import Model
from quantize.torch_graph import Block, Hook, run
from quantize.walk import through
from recipes.step import head_sources
from recipes.weights import key
from ringstep.contract import INTEGERS

Weight = Callable[[str], np.ndarray | None]


def fake_hook(block: Block, activations: Mapping[str, Activation]) -> Hook:
    """Rounds every computed tensor and input of a block to its encoding."""
    moved = {n for step in block.steps if step.op in MOVES for n in step.outputs} - set(block.outputs)

    def hook(name: str, x: Tensor) -> Tensor:
        own = activations.get(name)
        if own is None or name in moved:
            return x
        low, high = INTEGERS[own.dtype]
        return torch.fake_quantize_per_tensor_affine(x, own.encoding.scale, own.encoding.zero, low, high)

    return hook


def logits(model: Model, ids: Sequence[int], entries: Mapping[tuple[int, str], np.ndarray], weight: Weight,
           activations: Mapping[str, Activation] | None, tick: Any = None) -> np.ndarray:  # fmt: skip
    """Logits [len(ids), vocab] of ids that follow the sink prefix whose float entries are given.

    `weight(name)` is a quantised parameter's float values [out, in], None for one that stays as it is; without
    `activations` only weights are quantised.
    """
    rows = model.embedded(ids)
    for layer in range(len(model.plan.layers)):
        session, engine = model.open_layer(layer)
        engine.weights |= {n: torch.from_numpy(np.ascontiguousarray(v)) for n in engine.weights
                           if (v := weight(n)) is not None}  # fmt: skip
        if activations is not None:
            engine.hook = fake_hook(engine.block, activations)
        own = {k: array for k, array in entries.items() if k[0] == layer}
        rows = through(session, rows, own or None)
        if tick:
            tick(1)
    block, sources = model.head(), head_sources(model.plan)
    name, norm = key(sources["lm_head.weight"]), key(sources["norm.weight"])
    values = weight(name)
    head = torch.from_numpy(np.ascontiguousarray(model.read(sources["lm_head.weight"]) if values is None else values))
    own_weights = {norm: torch.from_numpy(model.read(sources["norm.weight"])), name: head}
    hook = fake_hook(block, activations) if activations is not None else None
    made = []
    with torch.inference_mode():
        for at in range(0, len(rows), model.n):
            feed = {block.inputs[0]: torch.from_numpy(rows[at : at + model.n])}
            made.append(run(block, feed, own_weights, hook)["logits"].numpy())
    return np.concatenate(made)
