"""What the fusions and lowerings share: constants by value, chains by sole use, new nodes with inferred types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.opset import raise_opset
from sanitize.passes import Change

TOLERANCE = {ir.DataType.FLOAT16: 2e-3, ir.DataType.BFLOAT16: 1.6e-2}
"""How far a constant may be off what was meant, relative; a little more than its type's rounding."""
AXES_AS_INPUTS = 13  # what the lowerings are written in


def near(number: float | None, wanted: float, dtype: ir.DataType | None) -> bool:
    """Whether a constant is the one that was meant, in a tensor's precision."""
    relative = TOLERANCE.get(dtype, 1e-5) if dtype is not None else 1e-5
    return number is not None and abs(number - wanted) <= relative * abs(wanted)


def with_constant(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """The variable operand and the constant of a two-input node such as Mul(x, c), Add(c, x)."""
    if node is None or len(node.inputs) != 2:
        return None
    for at in (1, 0):
        number, other = graphs.scalar(node.inputs[at]), node.inputs[1 - at]
        if number is not None and other is not None and graphs.tensor(other) is None:
            return other, number
    return None


def scaled(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """x and f where the node is x * f, written as Mul or as Div by a constant."""
    if node is None or node.op_type not in ("Mul", "Div") or node.domain not in ("", "ai.onnx"):
        return None
    found = with_constant(node)
    if found is None or node.op_type == "Mul":
        return found
    return (found[0], 1 / found[1]) if found[0] is node.inputs[0] and found[1] else None


def next_node(value: ir.Value, *ops: str) -> ir.Node | None:
    """The only reader of a value that is no graph output, if it is one of these operators in the same graph."""
    node, maker = graphs.sole_user(value), value.producer()
    if node is None or node.op_type not in ops or node.domain not in ("", "ai.onnx"):
        return None
    return node if maker is None or node.graph is maker.graph else None


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other operand of a two-input node; None if it reads only this value."""
    found = [v for v in node.inputs if v is not value]
    return found[0] if len(found) == 1 else None


def reduced(node: ir.Node) -> int | None:
    """The one axis that a Reduce* node reduces and keeps, as it is written; None if there are more or it is unknown."""
    if graphs.attribute(node, "keepdims", 1) != 1:
        return None
    axes = graphs.attribute(node, "axes")
    if axes is None and len(node.inputs) > 1:
        found = graphs.array(node.inputs[1])
        axes = None if found is None else found.reshape(-1).tolist()
    return int(axes[0]) if axes is not None and len(axes) == 1 else None


def last_axis(node: ir.Node, rank: int | None) -> bool:
    """Whether a Reduce* node reduces the last dim alone and keeps it."""
    axis = reduced(node)
    return axis == -1 or (axis is not None and rank is not None and axis == rank - 1)


def rank(value: ir.Value | None) -> int | None:
    """Number of dims, None if unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def inner(value: ir.Value | None) -> int | None:
    """The last dim if it is known."""
    if value is None or value.shape is None or not len(value.shape):
        return None
    last = value.shape[-1]
    return last if isinstance(last, int) else None


def closed(nodes: Iterable[ir.Node], last: ir.Node) -> bool:
    """Whether nothing but these nodes reads what they make, except the last one's result, all in one graph."""
    inside = set(nodes) | {last}
    for node in inside:
        if node.graph is not last.graph:
            return False
        if node is last:
            continue
        for value in node.outputs:
            if value.is_graph_output() or any(use.node not in inside for use in value.uses()):
                return False
    return True


def emit(before: ir.Node, op: str, *inputs: ir.Value | np.ndarray | None, **attributes: Any) -> ir.Value:
    """Add a node before another one, named after it; arrays become initializers, type and shape are inferred."""
    return emit_all(before, op, 1, *inputs, **attributes)[0]


def emit_all(
    before: ir.Node, op: str, outputs: int, *inputs: ir.Value | np.ndarray | None, **attributes: Any
) -> list[ir.Value]:
    """As emit, for a node of several results."""
    graph = before.graph
    assert isinstance(graph, ir.Graph)
    base = f"{before.name or before.op_type}/{op}"
    as_value = lambda at, v: graphs.constant(graph, f"{base}_{at}", v) if isinstance(v, np.ndarray) else v
    values = [as_value(at, v) for at, v in enumerate(inputs)]
    node = ir.node(op, values, attributes, num_outputs=outputs, name=graphs.unique_name(graph, base))
    for value in node.outputs:
        value.name = graphs.unique_name(graph, f"{base}_output")
    _infer(node)
    graph.insert_before(before, node)
    return list(node.outputs)


def _infer(node: ir.Node) -> None:
    """Types and shapes of a new node's results, by the operator's own schema."""
    types, data = {}, {}
    proto = ir.serde.serialize_node(node)
    for value in node.inputs:
        if value is None or value.type is None:
            continue
        info = ir.serde.serialize_value(value)
        types[value.name or ""] = info.type
        # Shapes, axes and sizes decide the result's shape; other constants do not.
        if value.dtype == ir.DataType.INT64 and (sizes := graphs.array(value, 64)) is not None:
            data[value.name or ""] = onnx.numpy_helper.from_array(sizes)
    try:
        schema = onnx.defs.get_schema(node.op_type, 23, node.domain)
        found = onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=[onnx.helper.make_opsetid("", 23)]
        )
    except Exception:
        return  # unknown input types: infer_types fills in what it can later
    for value in node.outputs:
        kind = found.get(value.name or "")
        if kind is not None:
            value.dtype = ir.DataType(kind.tensor_type.elem_type)
            value.shape = ir.serde.deserialize_type_proto_for_shape(kind)


def floats(value: ir.Value, numbers: Any) -> np.ndarray:
    """Numbers in the value's float type."""
    kind = value.dtype or ir.DataType.FLOAT
    return np.array(numbers, dtype=kind.numpy())


def ints(*numbers: int) -> np.ndarray:
    """A shape, axes or sizes input."""
    return np.array(numbers, dtype=np.int64)


def static(node: ir.Node, value: ir.Value | None, what: str) -> tuple[int, ...]:
    """The static shape of a node's tensor. Raises RingstepError naming both if any of it is open."""
    shape = graphs.dims(value)
    if shape is None:
        raise RingstepError(
            f"node {node.name or node.op_type} ({node.op_type}): the shape of {what} is not static; fix the model's "
            "input shapes first"
        )
    return shape


def refuse(node: ir.Node, what: str) -> RingstepError:
    """The error for a feature that cannot be lowered."""
    return RingstepError(f"node {node.name or node.op_type} ({node.op_type}): {what}")


def lower(
    model: ir.Model, kinds: Iterable[tuple[str, str]], build: Callable[[ir.Node], Sequence[ir.Value | None]], what: str
) -> list[Change]:
    """Replace every node of these (domain, operator) kinds by what `build` makes before it, output for output.

    Raises RingstepError where the model cannot be brought to opset 13, and what `build` raises.
    """
    wanted = set(kinds)
    domain = lambda node: "" if node.domain == "ai.onnx" else node.domain
    found = [node for node in graphs.every_node(model) if (domain(node), node.op_type) in wanted]
    reason = raise_opset(model, AXES_AS_INPUTS) if found else ""
    if reason:
        raise refuse(found[0], f"its lowering needs opset {AXES_AS_INPUTS}, out of reach because of {reason}")
    changes = []
    for node in found:
        name = node.name or node.op_type
        for old, new in zip(node.outputs, build(node), strict=False):
            if new is not None:
                graphs.replace(old, new)
        graphs.remove(node)
        changes.append(Change(name, f"{node.op_type} {what}"))
    if changes:
        graphs.infer_types(model)  # of other domains' operators nothing was known behind them
    return changes


def used(node: ir.Node, at: int) -> bool:
    """Whether anything reads a node's output."""
    return at < len(node.outputs) and (bool(node.outputs[at].uses()) or node.outputs[at].is_graph_output())


def given(node: ir.Node, at: int) -> ir.Value | None:
    """A node's input, None where it is left out."""
    return node.inputs[at] if at < len(node.inputs) else None


def refuse_inputs(node: ir.Node, unsupported: Mapping[int, str]) -> None:
    """Raise RingstepError where one of these inputs, by index, is given."""
    for at, name in unsupported.items():
        if given(node, at) is not None:
            raise refuse(node, f"its input {name} has no lowering; export without it")
