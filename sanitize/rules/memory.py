"""What one graph will allocate on the tensor processor, against what it may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.rules.subject import Hit, Subject
from sanitize.rules.weights import constants
from sanitize.tensors import nbytes, place

# HTP computes floats in half precision and 64-bit integers in 32 bits.
NARROWED = {ir.DataType.FLOAT: 16, ir.DataType.DOUBLE: 16, ir.DataType.INT64: 32, ir.DataType.UINT64: 32}

# What the compiler's own estimate adds to the weights: it put 2240 MiB at 2347229 KB, 1.023 times that.
OVERHEAD = 1.025


def compiled_bytes(dtype: ir.DataType, size: int) -> int:
    """Bytes of a tensor after compilation."""
    return -(-size * NARROWED.get(dtype, dtype.bitwidth) // 8)


def weight_bytes(subject: Subject) -> int:
    """Bytes of all constants in the compiled graph, each stored once."""
    total = 0
    seen: set[object] = set()
    for value in constants(subject):
        tensor = value.const_value
        if tensor is None or not nbytes(tensor):
            continue
        where = place(tensor) or id(tensor)
        if where not in seen:
            seen.add(where)
            total += compiled_bytes(tensor.dtype, tensor.size)
    return total


def live_bytes(subject: Subject) -> int:
    """Most bytes of activations alive at one time in the main graph, its inputs and outputs throughout."""
    graph = subject.model.graph
    edges = {id(v): v for v in (*graph.inputs, *graph.outputs) if not v.is_initializer()}
    fixed = sum(_value_bytes(value) for value in edges.values())
    left: Counter[int] = Counter()
    for node in graph:
        for value in node.inputs:
            if value is not None:
                left[id(value)] += 1
    alive = most = 0
    for node in graph:
        if id(node) in subject.folded:
            continue
        for value in node.outputs:
            if id(value) not in edges:
                alive += _value_bytes(value)
        most = max(most, alive)
        for value in node.inputs:
            if value is None:
                continue
            left[id(value)] -= 1
            if not left[id(value)] and id(value) not in edges and not subject.constant(value):
                alive -= _value_bytes(value)
    return fixed + most


def _value_bytes(value: ir.Value) -> int:
    dims = graphs.dims(value)
    if dims is None or value.dtype in (None, ir.DataType.STRING, ir.DataType.UNDEFINED):
        return 0
    size = 1
    for dim in dims:
        size *= dim
    assert value.dtype is not None
    return compiled_bytes(value.dtype, size)


def over_limit(subject: Subject) -> Iterator[Hit]:
    """A graph that the compiler would refuse for its size."""
    assert subject.target.chip is not None
    limit = subject.target.chip.graph_limit_mb << 20
    weights, live = round(OVERHEAD * weight_bytes(subject)), live_bytes(subject)
    if weights + live > limit:
        # Activations are needed in every part.
        parts = -(-weights // max(1, limit - live)) if live < limit else 0
        split = f"cut it into {max(2, parts)} parts" if parts else "its activations alone are too many"
        sizes = f"{weights / 2**20:.0f} MiB of weights and {live / 2**20:.0f} MiB of activations"
        yield Hit("", f"{sizes} exceed {limit / 2**20:.0f} MiB: {split}")
