"""A block's ONNX graph in torch, with a hook on every tensor: calibration reads there, fake quantisation writes.

One block is held at a time: its weights are handed in by name, so memory does not grow with layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from ringstep.errors import RingstepError

Hook = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """One node: what it computes, from which names, into which names."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """Part of a step's graph, from its activations `inputs` and `weights` to its `outputs`."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    constants: Mapping[str, Tensor]


def block_of(graph: ir.Graph, prefix: str, outputs: tuple[str, ...], is_weight: Callable[[str], bool]) -> Block:
    """The nodes named `prefix`..., such as "/layers.7/"; initializers for which `is_weight` is false are constants.

    Raises RingstepError for an operator that has no torch form here.
    """
    steps: list[Step] = []
    made: set[str] = set()
    inputs: dict[str, None] = {}
    weights: dict[str, None] = {}
    constants: dict[str, Tensor] = {}
    for node in graph:
        if not (node.name or "").startswith(prefix):
            continue
        if node.op_type not in OPERATORS or node.domain not in ("", "ai.onnx"):
            raise RingstepError(f"node {node.name}: no torch form of {node.op_type} (quantize/torch_graph.py)")
        for value in node.inputs:
            if value is None or str(value.name) in made:
                continue
            name = str(value.name)
            if value.const_value is None:
                inputs[name] = None
            elif is_weight(name):
                weights[name] = None
            elif name not in constants:
                constants[name] = torch.from_numpy(np.array(value.const_value.numpy()))
        made |= {str(v.name) for v in node.outputs}
        steps.append(Step(
            node.op_type, str(node.name), tuple(str(v.name) if v is not None else "" for v in node.inputs),
            tuple(str(v.name) for v in node.outputs), {k: a.value for k, a in node.attributes.items()},
        ))  # fmt: skip
    return Block(tuple(steps), tuple(inputs), outputs, tuple(weights), constants)


def run(block: Block, feeds: Mapping[str, Tensor], weights: Mapping[str, Tensor], hook: Hook | None = None,
        ) -> dict[str, Tensor]:  # fmt: skip
    """Compute a block: `feeds` holds its inputs, `weights` its parameters; returns its outputs.

    `hook(name, tensor)` sees every input and every node's output, and what it returns is used in its place.
    """
    values: dict[str, Tensor] = dict(block.constants) | dict(weights)
    last = {name: i for i, step in enumerate(block.steps) for name in step.inputs}
    for name in block.inputs:
        values[name] = hook(name, feeds[name]) if hook else feeds[name]
    for i, step in enumerate(block.steps):
        results = OPERATORS[step.op](step.attributes, *(values[n] if n else None for n in step.inputs))
        for name, result in zip(step.outputs, results if isinstance(results, tuple) else (results,), strict=False):
            values[name] = hook(name, result) if hook else result
        for name in step.inputs:
            if last.get(name) == i and name not in block.outputs:
                values.pop(name, None)
    return {name: values[name] for name in block.outputs}


def _gemm(attributes: Mapping[str, Any], x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    x = x.t() if attributes.get("transA") else x
    product = F.linear(x if alpha == 1.0 else alpha * x, w if attributes.get("transB") else w.t())
    return product if bias is None else product + beta * bias


def _split(attributes: Mapping[str, Any], x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    if sizes is None:
        count, length = attributes["num_outputs"], x.shape[axis]
        each = -(-length // count)
        return torch.split(x, [max(0, min(each, length - i * each)) for i in range(count)], axis)
    return torch.split(x, sizes.tolist(), axis)


def _reshape(attributes: Mapping[str, Any], x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())])


def _slice(attributes: Mapping[str, Any], x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None,
           steps: Tensor | None = None) -> Tensor:  # fmt: skip
    index = [slice(None)] * x.dim()
    every = axes.tolist() if axes is not None else list(range(len(starts)))
    strides = steps.tolist() if steps is not None else [1] * len(every)
    for axis, start, end, stride in zip(every, starts.tolist(), ends.tolist(), strides, strict=True):
        index[axis] = slice(start, min(end, x.shape[axis]), stride)
    return x[tuple(index)]


def _rms_norm(attributes: Mapping[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[attributes.get("axis", -1) :], weight, attributes.get("epsilon", 1e-5))


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(attributes: Mapping[str, Any], x: Tensor, axes: Tensor | None = None) -> Tensor:
        dims = axes.tolist() if axes is not None else list(attributes.get("axes", range(x.dim())))
        return function(x, dims, keepdim=bool(attributes.get("keepdims", 1)))

    return reduce


def _squeeze(attributes: Mapping[str, Any], x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


def _unsqueeze(attributes: Mapping[str, Any], x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + axes.numel()  # axes are those of the result
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def _clip(attributes: Mapping[str, Any], x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)


def _transpose(attributes: Mapping[str, Any], x: Tensor) -> Tensor:
    return x.permute(*attributes.get("perm", range(x.dim() - 1, -1, -1)))


def _gather(attributes: Mapping[str, Any], x: Tensor, indices: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % x.dim()
    return x[(slice(None),) * axis + (indices,)]


OPERATORS: dict[str, Callable[..., Any]] = {
    "Gemm": _gemm,
    "MatMul": lambda a, x, y: x @ y,
    "Add": lambda a, x, y: x + y,
    "Sub": lambda a, x, y: x - y,
    "Mul": lambda a, x, y: x * y,
    "Div": lambda a, x, y: x / y,
    "Pow": lambda a, x, y: x.pow(y),
    "Max": lambda a, *xs: functools.reduce(torch.maximum, xs),
    "Min": lambda a, *xs: functools.reduce(torch.minimum, xs),
    "Abs": lambda a, x: x.abs(),
    "Neg": lambda a, x: -x,
    "Exp": lambda a, x: x.exp(),
    "Sqrt": lambda a, x: x.sqrt(),
    "Reciprocal": lambda a, x: x.reciprocal(),
    "Relu": lambda a, x: x.relu(),
    "Tanh": lambda a, x: x.tanh(),
    "Sigmoid": lambda a, x: x.sigmoid(),
    "Swish": lambda a, x: x * (a.get("alpha", 1.0) * x).sigmoid(),
    "Erf": lambda a, x: x.erf(),
    "Gelu": lambda a, x: F.gelu(x, approximate=a.get("approximate", "none")),
    "Softmax": lambda a, x: x.softmax(a.get("axis", -1)),
    "RMSNormalization": _rms_norm,
    "ReduceMax": _reduce(torch.amax),
    "ReduceSum": _reduce(torch.sum),
    "ReduceMean": _reduce(torch.mean),
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Concat": lambda a, *xs: torch.cat(xs, a["axis"]),
    "Split": _split,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Clip": _clip,
    "Identity": lambda a, x: x,
    "Gather": _gather,
}
