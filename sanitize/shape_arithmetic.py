"""Shape arithmetic where only some dims are static: what Shape, Gather, Concat and the like give, entry by entry.

Shape(x)   of x [batch, 8, 64]      batch  8  64
Gather 1                                   8                  a constant, though batch is not known
Concat(Gather 0, 32, 16)            batch  32  16             a Reshape of x to it:  0  32  16
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs

Entry = int | str
"""An entry of a shape: a number, or the name of a dim that is not static."""
Read = Callable[[ir.Value], np.ndarray | None]


def shape_entries(
    node: ir.Node, entries: Mapping[ir.Value, list[Entry]], read: Read
) -> tuple[list[Entry], tuple[int, ...]] | None:
    """What shape arithmetic gives: its entries, and the shape they are in (a scalar or a vector); None: unknown."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if node.op_type in ("Shape", "Size"):
        if source.shape is None:
            return None
        dims: list[Entry] = [_entry(source, axis) for axis in range(len(source.shape))]
        if node.op_type == "Shape":
            picked = dims[slice(graphs.attribute(node, "start", 0), graphs.attribute(node, "end"))]
            return picked, (len(picked),)
        if not all(isinstance(dim, int) for dim in dims):
            return None
        return [math.prod(int(dim) for dim in dims)], ()
    if not any(value in entries for value in node.inputs if value is not None):
        return None

    def part(value: ir.Value | None) -> list[Entry] | None:
        if value is None:
            return None
        if value in entries:
            return entries[value]
        found = read(value)
        if found is None or found.dtype != np.int64 or found.ndim > 1:
            return None
        return [int(number) for number in found.reshape(-1)]

    if node.op_type == "Concat":
        parts = [part(value) for value in node.inputs]
        if any(one is None for one in parts):
            return None
        joined = [entry for one in parts for entry in one or []]
        return joined, (len(joined),)
    if node.op_type == "Equal":
        a, b = (part(value) for value in node.inputs)
        if a is None or b is None or 1 != len(b) != len(a):
            return None
        pairs = list(zip(a, b * len(a) if len(b) == 1 else b, strict=True))
        if all(_decided(x, y) for x, y in pairs):
            return [x == y for x, y in pairs], (len(pairs),)
        return None
    if node.op_type in ("Mul", "Add"):
        factors = [part(value) for value in node.inputs]
        if any(one is None or len(one) != 1 or (isinstance(one[0], int) and one[0] < 0) for one in factors):
            return None
        # Some number that is not negative: all that an open entry has to be.
        return [f"{id(node.outputs[0])}"], (1,)
    if source not in entries:
        return None
    held, others = entries[source], [None if value is None else read(value) for value in node.inputs[1:]]
    if node.op_type == "Identity":
        return held, (len(held),)
    if any(value is not None and other is None for value, other in zip(node.inputs[1:], others, strict=True)):
        return None
    if node.op_type == "Gather" and others[0] is not None and others[0].ndim <= 1:
        chosen = [int(index) for index in others[0].reshape(-1)]
        if all(-len(held) <= index < len(held) for index in chosen):
            return [held[index] for index in chosen], others[0].shape
    elif node.op_type == "Slice" and len(others) >= 2 and all(o is None or o.size == 1 for o in others):
        start, stop = (int(other.reshape(-1)[0]) for other in others[:2])  # type: ignore[union-attr]
        step = int(others[3].reshape(-1)[0]) if len(others) > 3 and others[3] is not None else 1
        if step == 1:
            return (cut := held[slice(start, stop)]), (len(cut),)
    elif node.op_type == "Squeeze" and len(held) == 1:
        return held, ()
    elif node.op_type == "Unsqueeze" and len(held) == 1:
        return held, (1,)
    elif node.op_type == "Reshape" and len(held) == 1 and others[0] is not None and others[0].size <= 1:
        return held, others[0].shape and (1,)
    return None


def _decided(x: Entry, y: Entry) -> bool:
    """Whether it is known if they are equal: a dim is never negative, whatever it is."""
    if isinstance(x, int) and isinstance(y, int):
        return True
    return (isinstance(x, int) and x < 0) or (isinstance(y, int) and y < 0)


def _entry(value: ir.Value, axis: int) -> Entry:
    assert value.shape is not None
    dim = value.shape[axis]
    if isinstance(dim, int):
        return dim
    return str(dim.value) if dim.value is not None else f"{id(value)}.{axis}"


def settle(node: ir.Node, shape: list[Entry] | None) -> tuple[int, ...] | None:
    """A constant that means the same as this shape: 0 copies a dim that stays in its place, one other may be -1."""
    data = node.inputs[0]
    if shape is None or data is None or data.shape is None:
        return None
    if 0 in shape:
        return None
    copied = [axis < len(data.shape) and isinstance(e, str) and _entry(data, axis) == e for axis, e in enumerate(shape)]
    open_ = [axis for axis, entry in enumerate(shape) if isinstance(entry, str) and not copied[axis]]
    if len(open_) + shape.count(-1) > 1:
        return None
    return tuple(0 if copied[axis] else -1 if isinstance(entry, str) else entry for axis, entry in enumerate(shape))
