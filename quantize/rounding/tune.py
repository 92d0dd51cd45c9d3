"""Tuning scales end to end: integers stay, scales and norms learn to give the original's logits.

    for a batch of texts   forward, layer by layer, hidden states kept ─▶ KL and error of the logits against the original's
                           backward, layer by layer, each computed again ─▶ gradients of that layer's scales and norms

Only scales [out, blocks] and norms [hidden] learn (Chen et al. 2024, arXiv 2407.11062, end to end). A layer's weights are in
memory while it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quantize.calibrate import Calibration, Tick
from quantize.grid import QuantisedWeight
from quantize.model import Model
from quantize.torch_graph import Block, run
from quantize.walk import layer_spec
from recipes.step import head_sources, layer_inputs
from recipes.weights import key

Load = Callable[[str], QuantisedWeight | None]


@dataclass
class Learned:
    """What learns, by parameter name: factors of each scale, and factors of each norm's elements."""

    scales: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)

    def all(self) -> list[Tensor]:
        """Every tensor that learns."""
        return [*self.scales.values(), *self.norms.values()]


def spread(factor: Tensor, weight: QuantisedWeight) -> Tensor:
    """One factor a block to one an input."""
    inputs = weight.q.shape[1]
    width = weight.grid.width(inputs)
    return factor if width == inputs else factor.repeat_interleave(width, 1)[:, :inputs]


def weights_of(block: Block, floats: Mapping[str, Tensor], load: Load, learned: Learned) -> dict[str, Tensor]:
    """A block's weights as the present factors make them."""
    made = {}
    for name in block.weights:
        stored = load(name)
        if stored is not None:
            factor = learned.scales.setdefault(name, torch.ones(stored.scale.shape, requires_grad=True))
            made[name] = torch.from_numpy(stored.dequantised()) * spread(factor, stored)
        else:
            factor = learned.norms.setdefault(name, torch.ones(floats[name].shape, requires_grad=True))
            made[name] = floats[name] * factor
    return made


class Layers:
    """What the layers of a model need beside hidden states, for one chunk of n tokens after the sink prefix."""

    def __init__(self, model: Model, found: Calibration) -> None:
        self.model, self.found = model, found
        self.blocks = [model.block(layer) for layer in range(len(model.plan.layers))]

    def feeds(self, layer: int) -> dict[str, Tensor]:
        """A layer's inputs but the hidden state."""
        session, _ = self.model.open_layer(layer)
        entries = {k: array for k, array in self.found.entries.items() if k[0] == layer}
        if entries:
            session.seed(entries)
        buffers = session.buffers[self.model.n]
        buffers.fill(session.position, np.zeros((self.model.n, self.model.plan.hidden), np.float32), None)
        for name, cache, what in buffers.past:
            buffers.inputs[name] = session.caches[cache.layer, what]
        return {name: torch.from_numpy(buffers.inputs[name]) for name in layer_inputs(self.model.spec.caches[layer])}
