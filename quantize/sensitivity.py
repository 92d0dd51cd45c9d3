"""How much each linear's rounding adds to the noise of the logits, all linears from the same few backward passes.

For small dW the logits move by J dW, J their Jacobian by the weight. With random signs r, E <d(r . logits)/dW, dW>^2
is the energy |J dW|^2 (Hutchinson 1989): one backward pass gives every linear a sample of it. Layers are computed
forward, then backward with each computed again, so that one layer's weights are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quantize.calibrate import Tick
from quantize.model import Model
from quantize.torch_graph import Block, run
from quantize.walk import Entries
from recipes.step import head_sources, layer_inputs
from recipes.weights import key

Weight = Callable[[str], np.ndarray | None]


def noise(model: Model, texts: Sequence[Sequence[int]], prefix: Entries, rounded: Weight,
          tick: Tick = lambda _: None) -> tuple[dict[str, float], float]:  # fmt: skip
    """The energy that each linear's rounding adds to the logits, by weight name, and the logits' own.

    `texts` are ids that follow the sink prefix of these entries, model.n each, one sample each; `rounded(name)`
    gives a linear as it is after rounding [out, in], None where it stays in float. Noise is taken at the original's
    weights.
    """
    feeds = [fixed_inputs(model, layer, prefix) for layer in range(len(model.plan.layers))]
    blocks = [model.block(layer) for layer in range(len(model.plan.layers))]
    source = [hidden(block, own) for block, own in zip(blocks, feeds, strict=True)]
    states = [[torch.from_numpy(model.embedded(ids))] for ids in texts]
    with torch.no_grad():
        for layer, block in enumerate(blocks):
            weights = floats(model, layer)
            for kept in states:
                kept.append(run(block, feeds[layer] | {source[layer]: kept[-1]}, weights)[f"hidden_{layer}"])
            tick(len(texts))
    energy, signal, back = {}, 0.0, []
    head, weights = model.head(), head_floats(model)
    generator = torch.Generator().manual_seed(0)
    for kept in states:
        x = kept.pop().requires_grad_()
        logits = run(head, {head.inputs[0]: x}, weights)["logits"]
        signal += float(logits.detach().square().sum()) / len(texts)
        signs = torch.randint(0, 2, logits.shape, generator=generator).mul_(2).sub_(1).to(logits.dtype)
        (grad,) = torch.autograd.grad(logits, x, signs)
        back.append(grad)
    del weights
    for layer in reversed(range(len(blocks))):
        weights = floats(model, layer)
        moved = {n: torch.from_numpy(np.ascontiguousarray(v)) - w for n, w in weights.items()
                 if (v := rounded(n)) is not None}  # fmt: skip
        for name in moved:
            weights[name].requires_grad_()
            energy[name] = 0.0
        for i, kept in enumerate(states):
            x = kept.pop().requires_grad_()
            made = run(blocks[layer], feeds[layer] | {source[layer]: x}, weights)[f"hidden_{layer}"]
            grads = torch.autograd.grad(made, [x, *(weights[n] for n in moved)], back[i])
            back[i] = grads[0]
            for name, grad in zip(moved, grads[1:], strict=True):
                energy[name] += float((grad * moved[name]).sum()) ** 2 / len(texts)
        tick(len(texts))
    return energy, signal


def fixed_inputs(model: Model, layer: int, prefix: Entries) -> dict[str, Tensor]:
    """A layer's inputs but the hidden state, for the first chunk after the sink prefix: the same for every text."""
    session, _ = model.open_layer(layer)
    if entries := {k: array for k, array in prefix.items() if k[0] == layer}:
        session.seed(entries)
    buffers = session.buffers[model.n]
    buffers.fill(session.position, np.zeros((model.n, model.plan.hidden), np.float32), None)
    inputs: Mapping[str, np.ndarray] = buffers.inputs | {
        name: session.caches[cache.layer, what] for name, cache, what in buffers.past}  # fmt: skip
    return {name: torch.from_numpy(inputs[name]) for name in layer_inputs(model.spec.caches[layer])}


def floats(model: Model, layer: int) -> dict[str, Tensor]:
    """A layer's parameters as the checkpoint has them."""
    return {name: torch.from_numpy(model.read(source)) for name, (_, source) in model.sources(layer).items()}


def head_floats(model: Model) -> dict[str, Tensor]:
    """The head's parameters as the checkpoint has them."""
    return {key(source): torch.from_numpy(model.read(source)) for source in head_sources(model.plan).values()}


def hidden(block: Block, feeds: dict[str, Tensor]) -> str:
    """The name of a layer's hidden input: the one that is not fixed."""
    return next(name for name in block.inputs if name not in feeds)
