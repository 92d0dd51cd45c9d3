"""How much the logits mind an error at each output of each linear: second moments of gradients, from one backward pass.

For every linear A = sum g g^T over calibration tokens [out, out], with g the gradient at its output of a mix of
    log p(token), token drawn from the model's own prediction    A is then the Fisher information: what KL grows by
    random signs . logits                                        and the logits' square error, what SNR falls by
The two have independent signs, so that the sum of both gradients has the sum of both moments.

Layers are computed forward, their inputs kept in a file, then backward with each computed again: one layer's weights
and moments are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantize.calibrate import Tick
from quantize.model import Model
from quantize.sensitivity import fixed_inputs, floats, head_floats, hidden
from quantize.torch_graph import Block, run
from quantize.walk import Entries
from ringstep.errors import RingstepError

STATES = "states.bin"
TOKENS = 12288  # a third of them gives per-channel int4 of SmolLM2 next to nothing, these 1.4 dB


class Moments:
    """Second moments of each linear's output gradients, a file each in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}

    def keep(self, name: str, moment: Tensor) -> None:
        """Store the moment [out, out] of a weight by name, its diagonal scaled to a mean of 1."""
        mean = float(moment.diagonal().mean())
        if not np.isfinite(mean):
            raise RingstepError(f"tensor {name}: the gradients at its output are not finite")
        self.files[name] = self.folder / f"{len(self.files)}.npy"
        # float16 is well within what the sampling leaves uncertain.
        np.save(self.files[name], (moment / mean if mean > 0 else moment).numpy().astype(np.float16))

    def of(self, name: str) -> Tensor | None:
        """The moment of a weight, None where none was taken."""
        if name not in self.files:
            return None
        return torch.from_numpy(np.load(self.files[name]).astype(np.float32))


class Probes:
    """The hook that adds a zero to each linear's output, so that its gradient can be asked for."""

    def __init__(self, block: Block) -> None:
        self.weights = {step.outputs[0]: step.inputs[1] for step in block.steps if step.op == "Gemm"}
        self.zeros: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name not in self.weights:
            return x
        self.zeros[self.weights[name]] = zero = torch.zeros_like(x, requires_grad=True)
        return x + zero


def moments(model: Model, texts: Sequence[Sequence[int]], prefix: Entries, folder: Path,
            tick: Tick = lambda _: None) -> Moments:  # fmt: skip
    """The moments of every linear of the layers.

    `texts` are ids that follow the sink prefix of these entries, model.n each. `folder` takes the files; it holds
    tokens * hidden * 4 bytes for each layer while this runs. Raises RingstepError naming a tensor whose gradients are
    not finite.
    """
    layers, shape = len(model.plan.layers), (len(texts), model.n, model.plan.hidden)
    file = folder / STATES
    states = np.memmap(file, np.float32, "w+", shape=(layers + 1, *shape))
    for i, ids in enumerate(texts):
        states[0, i] = model.embedded(ids)
    for layer in range(layers):
        block, feeds, weights = model.block(layer), fixed_inputs(model, layer, prefix), floats(model, layer)
        with torch.inference_mode():
            for i in range(len(texts)):
                made = run(block, feeds | {hidden(block, feeds): torch.from_numpy(states[layer, i])}, weights)
                states[layer + 1, i] = made[f"hidden_{layer}"].numpy()
                tick(model.n)
    back = at_logits(model, states[layers])
    found = Moments(folder)
    for layer in reversed(range(layers)):
        block, feeds, weights = model.block(layer), fixed_inputs(model, layer, prefix), floats(model, layer)
        sums: dict[str, Tensor] = {}
        for i in range(len(texts)):
            x, probes = torch.from_numpy(states[layer, i]).requires_grad_(), Probes(block)
            output = run(block, feeds | {hidden(block, feeds): x}, weights, probes)[f"hidden_{layer}"]
            grads = torch.autograd.grad(output, [x, *probes.zeros.values()], back[i])
            back[i] = grads[0]
            for name, grad in zip(probes.zeros, grads[1:], strict=True):
                size = grad.shape[-1]
                sums.setdefault(name, torch.zeros(size, size)).addmm_(grad.t(), grad)
            tick(2 * model.n)
        for name, moment in sums.items():
            found.keep(name, moment)
    del states
    file.unlink()
    return found


def at_logits(model: Model, last: np.ndarray) -> list[Tensor]:
    """The gradients at the last hidden states [texts, n, hidden], both kinds with the same energy."""
    head, weights = model.head(), head_floats(model)
    random = torch.Generator().manual_seed(0)
    back = []
    for rows in last:
        x = torch.from_numpy(rows).requires_grad_()
        logits = run(head, {head.inputs[0]: x}, weights)["logits"]
        drawn = draw(logits.detach(), random)
        signs = torch.randint(0, 2, logits.shape, generator=random, dtype=torch.int8).mul_(2).sub_(1).to(logits.dtype)
        likely = logits.log_softmax(-1).gather(-1, drawn).sum()
        (fisher,) = torch.autograd.grad(likely, x, retain_graph=True)
        (square,) = torch.autograd.grad(logits, x, signs)
        back.append(unit(fisher) + unit(square))
    return back


def unit(grad: Tensor) -> Tensor:
    """A gradient with an energy of 1, unless it is zero."""
    return grad / grad.norm().clamp(min=torch.finfo(grad.dtype).tiny)


def draw(logits: Tensor, random: torch.Generator) -> Tensor:
    """A token of each row's softmax [n, 1], by its cumulative sum, ten times as fast as multinomial."""
    below = logits.softmax(-1, dtype=torch.float64).cumsum_(-1)
    wanted = torch.rand(len(logits), 1, generator=random, dtype=torch.float64) * below[:, -1:]
    return torch.searchsorted(below, wanted).clamp_(max=logits.shape[-1] - 1)
