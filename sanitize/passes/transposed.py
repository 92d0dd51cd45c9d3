"""Store a weight once where it and its transpose are both held: the MatMul that read one reads the other by Gemm.

    wte [V, H] ──── Gather            wte [V, H] ─┬─ Gather
    lm_head [H, V] ─ MatMul      →                └─ Gemm(transB=1)       never a Transpose of a weight at run time

A Transpose of a constant weight before a MatMul goes the same way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterator

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target
from sanitize.tensors import Reader, nbytes

SMALLEST = 1 << 16  # bytes of a weight that are worth two Reshapes
SAMPLES = 64
BLOCK = 8 << 20  # bytes of each of the two tensors that are compared at a time
Scope = tuple[ir.Graph, ...]


def run(model: ir.Model, target: Target) -> list[Change]:
    """Let users of a transposed copy read the original; both must be two-dimensional and equal to the last bit."""
    changes = []
    for node in graphs.every_node(model):
        if weight := _transposed_weight(node):
            users = graphs.users(node.outputs[0])
            if users and not node.outputs[0].is_graph_output() and all(_takes(u, node.outputs[0]) for u in users):
                for user in users:
                    _read_turned(user, node.outputs[0], weight)
                graphs.prune(node.outputs[0])
                changes.append(Change(node.name or node.op_type, f"Gemm reads {weight.name} transposed"))
    for copy, original in _copies(model):
        users = graphs.users(copy)
        for user in users:
            _read_turned(user, copy, original)
        graphs.prune(copy)
        changes.append(Change(copy.name or "", f"transpose of {original.name}, which is read by Gemm instead"))
    return changes


def _transposed_weight(node: ir.Node) -> ir.Value | None:
    if node.op_type != "Transpose" or node.domain not in ("", "ai.onnx"):
        return None
    weight = node.inputs[0]
    return weight if weight is not None and _weight(weight) else None


def _weight(value: ir.Value) -> bool:
    found = graphs.tensor(value)
    if found is None or len(found.shape) != 2 or not found.dtype.is_floating_point() or found.dtype.bitwidth < 8:
        return False
    return value.is_initializer() and not value.is_graph_output() and nbytes(found) >= SMALLEST


def _copies(model: ir.Model) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Weights that can go, each with the weight that equals its transpose."""
    kinds: dict[Hashable, list[ir.Value]] = {}
    scopes: dict[ir.Graph, Scope] = {}
    for inner, scope in graphs.scopes(model.graph):
        scopes[inner] = scope
        for value in inner.initializers.values():
            if _weight(value) and (tensor := value.const_value) is not None:
                kinds.setdefault((tensor.dtype, *sorted(tensor.shape.numpy())), []).append(value)
    for values in kinds.values():
        seen: dict[Hashable, ir.Value] = {}
        for value in values if len(values) > 1 else ():
            tensor, graph = value.const_value, value.graph
            assert tensor is not None and isinstance(graph, ir.Graph)
            rows, columns = tensor.shape.numpy()
            own, turned = (rows, columns, _sample(tensor, turned=False)), (columns, rows, _sample(tensor, turned=True))
            other = next((seen[around, turned] for around in scopes[graph] if (around, turned) in seen), None)
            gone = None
            if other is not None and _is_transpose(tensor, other.const_value):
                if _can_go(value):
                    gone = value
                    yield value, other
                elif other.graph is graph and _can_go(other):
                    gone = other
                    del seen[graph, turned]
                    yield other, value
            if gone is not value:
                seen.setdefault((graph, own), value)


def _can_go(weight: ir.Value) -> bool:
    return all(_takes(user, weight) for user in graphs.users(weight))


def _sample(tensor: ir.TensorProtocol, *, turned: bool) -> bytes:
    """Some elements of the tensor, or those at the same places of its transpose."""
    rows, columns = tensor.shape.numpy()
    size, chance = tensor.dtype.itemsize, random.Random(0)
    picked = []
    with Reader(tensor) as reader:
        for _ in range(SAMPLES):
            x, y = chance.random(), chance.random()
            row, column = (int(y * rows), int(x * columns)) if turned else (int(x * rows), int(y * columns))
            picked.append(reader.read((row * columns + column) * int(size), int(size)))
    return b"".join(picked)


def _is_transpose(a: ir.TensorProtocol, b: ir.TensorProtocol | None) -> bool:
    """Compare block by block: rows of the longer tensor against pieces of the other's rows."""
    assert b is not None
    if a.shape.numpy()[0] < a.shape.numpy()[1]:
        a, b = b, a
    rows, columns = a.shape.numpy()
    size = int(a.dtype.itemsize)
    number = np.dtype(f"u{size}")
    step = max(1, BLOCK // (columns * size))
    with Reader(a) as one, Reader(b) as other:
        for start in range(0, rows, step):
            count = min(step, rows - start)
            block = np.frombuffer(one.read(start * columns * size, count * columns * size), number)
            pieces = [other.read((column * rows + start) * size, count * size) for column in range(columns)]
            turned = np.frombuffer(b"".join(pieces), number).reshape(columns, count)
            if not np.array_equal(block.reshape(count, columns), turned.T):
                return False
    return True


def _takes(node: ir.Node, weight: ir.Value) -> bool:
    """Whether a node can read the transpose of this weight instead."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm") or node.inputs[1] is not weight:
        return False
    if node.inputs[0] is weight or weight in node.inputs[2:]:
        return False
    if node.op_type == "Gemm":
        return True
    data, output = node.inputs[0], node.outputs[0]
    if data is None or data.shape is None or len(data.shape) < 2 or output.shape is None:
        return False
    open_ = [dim for dim in output.shape if not isinstance(dim, int)]
    return len(data.shape) == 2 or (len(open_) <= 1 and 0 not in output.shape)


def _read_turned(node: ir.Node, weight: ir.Value, original: ir.Value) -> None:
    if node.op_type == "Gemm":
        node.attributes["transB"] = ir.AttrInt64("transB", 1 - graphs.attribute(node, "transB", 0))
        node.replace_input_with(1, original)
        return
    data, output = node.inputs[0], node.outputs[0]
    assert data is not None and data.shape is not None and output.shape is not None
    name = node.name or node.op_type
    columns, rows = graphs.dims(original) or (-1, -1)
    flat = len(data.shape) == 2
    if not flat:
        kept = [dim for dim in data.shape[:-1]]
        known = [dim for dim in kept if isinstance(dim, int)]
        count = math.prod(known) if len(known) == len(kept) else None
        to = graphs.constant(node, f"{name}/rows", np.array([-1, rows], np.int64))
        data = graphs.insert(node, "Reshape", [data, to], name=f"{name}/flat", like=data, shape=[count, rows])
        shape = [count, columns]
    made = graphs.insert(
        node, "Gemm", [data, original], {"transB": 1}, name=f"{name}/gemm", like=output, shape=None if flat else shape
    )
    if not flat:
        dims = [dim if isinstance(dim, int) else -1 for dim in output.shape]
        to = graphs.constant(node, f"{name}/dims", np.array(dims, np.int64))
        made = graphs.insert(node, "Reshape", [made, to], name=f"{name}/unflat", like=output)
    graphs.swap(node, made)


# Gemm may add up in another order than MatMul.
PASS = Pass("transposed-weights", "store a weight once where its transpose is held as well", run, min_db=100)
