"""Reshape with allowzero=1, as the dynamo exporter writes it, without the attribute.

allowzero=1 says that a 0 in the shape is a dimension of size 0; without it a 0 copies the input's dimension. Where the
shape holds no 0 both mean the same. The shape is a constant, or made of constants and of dims of static tensors; then
it becomes a constant. Where a 0 cannot be ruled out, converters for phones would go wrong, so that is an error for
qnn-htp; runtimes on a CPU know the attribute and keep it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target

Dims = tuple[int, ...]
DEPTH = 64
ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum}


def run(model: ir.Model, target: Target) -> list[Change]:
    """Clear allowzero everywhere. Raises RingstepError naming the node where it must stay and the target is qnn-htp."""
    changes: list[Change] = []
    known: dict[ir.Value, Dims | None] = {}
    for node in graphs.every_node(model):
        if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx"):
            continue
        shape = node.inputs[1]
        if shape is None or not graphs.attribute(node, "allowzero", 0):
            continue
        sizes = evaluate(shape, known)
        if sizes is None:
            sizes = _from_output(node)
        if sizes is None or 0 in sizes:
            if target.htp:
                raise RingstepError(_why(node, shape, sizes))
            continue
        what = "allowzero=1 cleared"
        if graphs.tensor(shape) is None:
            node.replace_input_with(1, graphs.constant(node, f"{shape.name}_sizes", np.array(sizes, np.int64)))
            what += ", its shape folded"
        del node.attributes["allowzero"]
        changes.append(Change(node.name or "Reshape", what))
    return changes


def _why(node: ir.Node, shape: ir.Value, sizes: Dims | None) -> str:
    where = f"node {node.name or node.outputs[0].name!r} (Reshape with allowzero=1)"
    if sizes is None:
        return (
            f"{where}: its shape {shape.name!r} is computed from sizes that are not fixed, so a 0 cannot be ruled out; "
            "export with fixed input shapes, or fix them with --dim"
        )
    return f"{where}: its shape {list(sizes)} holds a 0: an empty tensor, which the NPU cannot hold; cut that part off"


def _from_output(node: ir.Node) -> Dims | None:
    """The output's static shape, if the input is static as well and has as many elements, and some."""
    source, result = graphs.dims(node.inputs[0]), graphs.dims(node.outputs[0])
    if source is None or result is None or not np.prod(source) or np.prod(source) != np.prod(result):
        return None
    return result


def evaluate(value: ir.Value | None, known: dict[ir.Value, Dims | None], depth: int = DEPTH) -> Dims | None:
    """The numbers in a 1-D or 0-D integer tensor made of constants and static shapes; None if not all are known."""
    if value is None:
        return None
    if value not in known:
        known[value] = None if depth == 0 else _compute(value, known, depth - 1)
    return known[value]


def _compute(value: ir.Value, known: dict[ir.Value, Dims | None], depth: int) -> Dims | None:
    constant = graphs.array(value, 64)
    if constant is not None:
        return tuple(map(int, constant.reshape(-1))) if constant.dtype.kind in "iu" and constant.ndim < 2 else None
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or not node.inputs:
        return None
    if node.op_type == "Shape":
        dims = graphs.dims(node.inputs[0])
        return None if dims is None else dims[graphs.attribute(node, "start", 0) : graphs.attribute(node, "end")]
    if node.op_type == "Size":
        dims = graphs.dims(node.inputs[0])
        return None if dims is None else (int(np.prod(dims)),)
    parts = [evaluate(v, known, depth) for v in node.inputs if v is not None]
    if any(part is None for part in parts):
        return None
    first, rest = parts[0] or (), [part or () for part in parts[1:]]
    if node.op_type in ("Identity", "Squeeze", "Unsqueeze", "Reshape"):
        return first
    if node.op_type == "Cast":
        integral = graphs.attribute(node, "to") in (ir.DataType.INT64, ir.DataType.INT32)
        return first if integral and all(abs(x) < 1 << 31 for x in first) else None
    if node.op_type == "Concat":
        return sum((first, *rest), ())
    if node.op_type == "Gather" and rest:
        return tuple(first[i] for i in rest[0]) if all(-len(first) <= i < len(first) for i in rest[0]) else None
    if node.op_type == "Slice" and len(rest) >= 2 and all(len(part) == 1 for part in rest):
        step = rest[3][0] if len(rest) > 3 else 1
        return first[rest[0][0] : rest[1][0] : step] if step > 0 else None
    if len(rest) == 1 and (len(first) == len(rest[0]) or 1 in (len(first), len(rest[0]))):
        a, b = np.array(first), np.array(rest[0])
        if node.op_type in ARITHMETIC:
            return tuple(map(int, ARITHMETIC[node.op_type](a, b)))
        if node.op_type == "Div" and min(first + rest[0], default=0) > 0:
            return tuple(map(int, a // b))
    return None


PASS = Pass("reshape-allowzero", "clear Reshape's allowzero=1 where the shape holds no 0", run)
