"""Linear layers as exporters write them, and their weights cut, joined and turned without being read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.tensors import FLOATS


@dataclass(frozen=True)
class Linear:
    """x [..., k] times a constant weight, plus a constant bias [n]: a Gemm or a MatMul."""

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    rows: bool
    """The weight is [n, k] (Gemm with transB): its outputs are rows. Else [k, n]."""
    k: int
    n: int

    @property
    def y(self) -> ir.Value:
        """The output."""
        return self.node.outputs[0]


def linear(node: ir.Node) -> Linear | None:
    """The linear layer a node is, None if it is none or its weight or bias is no plain float constant."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Gemm", "MatMul"):
        return None
    x, weight = node.inputs[:2]
    shape, data = graphs.dims(weight), graphs.tensor(weight)
    if x is None or weight is None or shape is None or len(shape) != 2 or data is None or data.dtype not in FLOATS:
        return None
    if graphs.tensor(x) is not None or x.shape is None or len(x.shape) < 2:
        return None
    if node.op_type == "MatMul":
        return Linear(node, x, weight, None, False, *shape)
    one = lambda name: graphs.attribute(node, name, 1.0) == 1.0
    if graphs.attribute(node, "transA", 0) or not one("alpha") or not one("beta"):
        return None
    rows = bool(graphs.attribute(node, "transB", 0))
    n, k = shape if rows else shape[::-1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and (graphs.tensor(bias) is None or graphs.dims(bias) not in ((n,), (1, n))):
        return None
    return Linear(node, x, weight, bias, rows, k, n)


def linears(model: ir.Model) -> Iterator[Linear]:
    """Every linear layer of a model, at any depth, in order."""
    for node in graphs.every_node(model):
        if (found := linear(node)) is not None:
            yield found


def reshaped(data: ir.TensorProtocol, shape: Sequence[int]) -> ir.TensorProtocol:
    """The same elements in another shape; those in a file stay there."""
    if isinstance(data, ir.ExternalTensor):
        return _region(data, data.offset or 0, shape)
    return lazy(data, shape, lambda array: array.reshape(shape))


def turned(data: ir.TensorProtocol, shape: Sequence[int]) -> ir.TensorProtocol:
    """A matrix transposed, then reshaped; done when the file is written, one tensor at a time."""
    return lazy(data, shape, lambda array: array.T.reshape(shape))


def lazy(
    data: ir.TensorProtocol, shape: Sequence[int], change: Callable[[np.ndarray], np.ndarray]
) -> ir.TensorProtocol:
    """A tensor computed from another one each time it is read; nothing is kept."""
    make = lambda: ir.tensor(np.ascontiguousarray(change(data.numpy())))
    return ir.LazyTensor(make, data.dtype, ir.Shape(shape), name=data.name)


def _region(data: ir.ExternalTensor, offset: int, shape: Sequence[int]) -> ir.ExternalTensor:
    length = int(np.prod(shape, dtype=np.int64)) * int(data.dtype.itemsize)
    return ir.ExternalTensor(
        data.location, offset, length, data.dtype, shape=ir.Shape(shape), name=data.name or "",
        base_dir=data.base_dir,
    )  # fmt: skip


def joined(parts: Sequence[ir.TensorProtocol], axis: int) -> ir.TensorProtocol:
    """Tensors one behind the other on an axis; parts that lie side by side in one file stay there."""
    shape = list(parts[0].shape.numpy())
    shape[axis] = sum(int(part.shape.numpy()[axis]) for part in parts)
    first = parts[0]
    if axis == 0 and isinstance(first, ir.ExternalTensor) and _side_by_side(parts):
        return _region(first, first.offset or 0, shape)
    make = lambda: ir.tensor(np.concatenate([part.numpy() for part in parts], axis))
    return ir.LazyTensor(make, first.dtype, ir.Shape(shape), name=first.name)


def cut(data: ir.TensorProtocol, start: int, stop: int, axis: int) -> ir.TensorProtocol:
    """Elements [start, stop) of the first or last axis; rows of a tensor in a file stay there."""
    shape = list(data.shape.numpy())
    shape[axis] = stop - start
    if axis == 0 and isinstance(data, ir.ExternalTensor):
        row = int(np.prod(shape[1:], dtype=np.int64)) * int(data.dtype.itemsize)
        return _region(data, (data.offset or 0) + start * row, shape)
    return lazy(data, shape, lambda array: array[start:stop] if axis == 0 else array[..., start:stop])


def _side_by_side(parts: Sequence[ir.TensorProtocol]) -> bool:
    next_to: tuple[str, int] | None = None
    for part in parts:
        if not isinstance(part, ir.ExternalTensor) or next_to not in (None, (part.path, part.offset or 0)):
            return False
        next_to = part.path, (part.offset or 0) + part.size * int(part.dtype.itemsize)
    return True
