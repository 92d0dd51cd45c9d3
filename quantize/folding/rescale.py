"""Input channels scaled by their activations and folded into what is before: loud channels are rounded with more care.

    norm / s ─ q, k, v, g * s          norm / s ─ gate, up * s          (up / s: its rows) ─ act(gate) * up ─ down * s

The product of a weight's column and its input stays; a column that is multiplied by s has its rounding error divided by
s (AWQ, Lin et al. 2023, arXiv 2306.00978). Where a graph has another form than these, it is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quantize.grid import Floats, Grid
from quantize.model import Model, Read
from quantize.rounding import nearest
from quantize.scheme import Scheme, grid_for
from quantize.torch_graph import Block
from quantize.walk import Entries, prefix_through, through
from recipes.plan import Source
from recipes.weights import key

ALPHAS = tuple(i / 10 for i in range(1, 11))
FLOOR = 1e-4  # of the loudest channel: what is silent in calibration need not be so in use
IN, OUT = "in ", "out "

Scales = Mapping[str, NDArray[np.float32]]
"""By "in NAME": what the columns of that weight are multiplied by; by "out NAME": what its rows, or the elements of a
norm, are divided by. NAME is the parameter's key (recipes.weights.key)."""


@dataclass(frozen=True)
class Group:
    """Linears that read one tensor, and the parameter whose outputs are that tensor's channels."""

    source: str
    input: str
    linears: tuple[str, ...]


class Squares:
    """The hook that sums the squares of each linear's input by channel, float64 [in]."""

    def __init__(self, block: Block) -> None:
        self.inputs = {step.inputs[0] for step in block.steps if step.op == "Gemm"}
        self.sums: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name in self.inputs:
            own = x.double().square().sum(0)
            self.sums[name] = self.sums[name] + own if name in self.sums else own
        return x


def groups(block: Block) -> list[Group]:
    """What a layer's graph lets us scale: tensors that nothing but linears reads, made by a norm or by gate * up."""
    readers: dict[str, list[Any]] = {}
    for step in block.steps:
        for name in step.inputs:
            readers.setdefault(name, []).append(step)
    made = {name: step for step in block.steps for name in step.outputs}
    found = []
    for step in block.steps:
        name = step.outputs[0]
        own = readers.get(name, [])
        gemms = [r for r in own if r.op == "Gemm" and r.inputs[0] == name]
        linears = tuple(r.inputs[1] for r in gemms if r.inputs[1] in block.weights)
        if not own or len(linears) < len(own) or name in block.outputs:
            continue
        if step.op == "RMSNormalization" and step.inputs[1] in block.weights:
            found.append(Group(step.inputs[1], name, linears))
        elif step.op == "Mul":
            # A factor that is a linear's output and used nowhere else; of gate * up with an activation only up is.
            plain = [made[n] for n in step.inputs if n in made and made[n].op == "Gemm" and len(readers[n]) == 1]
            if plain and len(plain[0].inputs) == 2 and plain[0].inputs[1] in block.weights:
                found.append(Group(plain[0].inputs[1], name, linears))
    return found


def find(model: Model, sequences: Sequence[Sequence[int]], prefix: Sequence[int], scheme: Scheme,
         tick: Callable[[int], Any] = lambda _: None) -> dict[str, NDArray[np.float32]]:  # fmt: skip
    """The scales of every group that gains by them, from one walk of the float model.

    `sequences` are ids that follow `prefix`, whose own channels do not count: a sink is louder than all text. Weights
    are judged by the scheme's grids. `tick(tokens)` is called for each sequence of each layer.
    """
    found: dict[str, NDArray[np.float32]] = {}
    states = [model.embedded(ids) for ids in sequences]
    first = model.embedded(prefix) if prefix else np.zeros((0, model.plan.hidden), np.float32)
    for layer in range(len(model.plan.layers)):
        session, engine = model.open_layer(layer)
        entries: Entries | None = None
        if prefix:
            first, entries = prefix_through(session, first)
        engine.hook = squares = Squares(engine.block)
        for i, rows in enumerate(states):
            states[i] = through(session, rows, entries)
            tick(len(rows))
        paths = {name: path for name, (path, _) in model.sources(layer).items()}
        for group in groups(engine.block):
            weights = [(engine.weights[n].numpy(), grid) for n in group.linears if (grid := grid_for(scheme, paths[n]))]
            scale = search(weights, squares.sums[group.input].numpy())
            if scale is not None:
                found[OUT + group.source] = scale
                found |= {IN + name: scale for name in group.linears}
    return found


def search(weights: Sequence[tuple[Floats, Grid]], squares: NDArray[Any]) -> NDArray[np.float32] | None:
    """The scale [in] with which weights [out, in] that read one tensor lose least; None where none gains.

    `squares` are the sums of squares of their input's channels. Scales are root mean squares to a power, with a
    geometric mean of 1.
    """
    rms = np.sqrt(squares)
    rms = np.log(np.maximum(rms, FLOOR * rms.max())) if rms.max() else np.zeros_like(rms)
    best, least = None, sum(loss(weight, grid, 1.0, squares) for weight, grid in weights)
    for alpha in ALPHAS:
        scale = np.exp(alpha * (rms - rms.mean())).astype(np.float32)
        own = sum(loss(weight, grid, scale, squares) for weight, grid in weights)
        if own < least:
            best, least = scale, own
    return best


def loss(weight: Floats, grid: Grid, scale: Any, squares: NDArray[Any]) -> float:
    """What rounding to nearest adds to a linear's outputs, were its inputs independent of each other."""
    error = nearest.quantise(weight * scale, grid).dequantised() / scale - weight
    return float(np.square(error).sum(0, dtype=np.float64) @ squares)


def rescaled(read: Read, scales: Scales) -> Read:
    """A read of the same model with other weights, to use in place of `read`."""

    def changed(source: Source) -> Floats:
        weight = read(source)
        rows, columns = scales.get(OUT + key(source)), scales.get(IN + key(source))
        if rows is not None:
            weight = weight / rows.reshape(-1, *[1] * (weight.ndim - 1))
        return weight if columns is None else weight * columns

    return changed


def changes(scales: Scales, source: Source) -> bool:
    """Whether a parameter is another one once it is rescaled."""
    return IN + key(source) in scales or OUT + key(source) in scales
