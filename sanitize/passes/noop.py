"""Take out nodes that hand on what they are given, bit for bit, and pairs that undo each other.

    x ─ Transpose(0,2,1) ─ Transpose(0,2,1) ─ y          x ─ y
    x ─ Unsqueeze ─ Reshape ─ y                  →       x ─ Reshape ─ y

Adding 0.0 stays: it turns -0.0 into 0.0. Adding -0.0 and subtracting 0.0 go. Casts are narrow-types' business.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target

MOST = 1 << 16  # elements of a constant that is looked at
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")


def run(model: ir.Model, target: Target) -> list[Change]:
    """Remove no-ops and merge chains of Transposes, and of Reshapes and their kin."""
    changes = []
    for node in graphs.every_node(model):
        if node.domain not in ("", "ai.onnx") or not node.inputs or not node.outputs:
            continue
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            continue
        kept = _handed_on(node)
        if kept is not None:
            output = node.outputs[0]
            if node.op_type == "Identity" and output.is_graph_output() and not _may_be_output(kept, node):
                continue
            changes.append(Change(node.name or node.op_type, f"{node.op_type} that changes nothing removed"))
            graphs.merge_shape(kept, output)
            graphs.replace(output, kept)
            graphs.remove(node)
        elif merged := _merge(node):
            changes.append(Change(node.name or node.op_type, merged))
    return changes


def _may_be_output(value: ir.Value, node: ir.Node) -> bool:
    maker = value.producer()
    return maker is not None and maker.graph is node.graph and not value.is_graph_output()


def _handed_on(node: ir.Node) -> ir.Value | None:
    """The input that is the node's output, bit for bit."""
    rule = RULES.get(node.op_type)
    kept = rule(node) if rule is not None else None
    if kept is None:
        kept = _undone(node)
    return kept


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _ints(node: ir.Node, index: int, name: str) -> list[int] | None:
    """What is an attribute in old operator sets and an input in later ones."""
    if (given := graphs.attribute(node, name)) is not None:
        return list(given)
    found = graphs.array(_input(node, index), 64)
    return None if found is None else [int(number) for number in found.reshape(-1)]


def _same_dims(a: ir.Value | None, b: ir.Value | None) -> bool:
    if a is None or b is None or a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return False
    pairs = zip(a.shape, b.shape, strict=True)
    return all(x == y and (isinstance(x, int) or x.value is not None) for x, y in pairs)


def _first(node: ir.Node) -> ir.Value | None:
    return node.inputs[0]


def _if_only(node: ir.Node) -> ir.Value | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


def _if_same_dims(node: ir.Node) -> ir.Value | None:
    return node.inputs[0] if _same_dims(node.inputs[0], node.outputs[0]) else None


def _reshape(node: ir.Node) -> ir.Value | None:
    data, shape = node.inputs[0], graphs.array(_input(node, 1), 64)
    if data is None or data.shape is None or shape is None:
        return _if_same_dims(node)
    wanted = [int(number) for number in shape.reshape(-1)]
    copies = not graphs.attribute(node, "allowzero", 0)
    same = [(entry == 0 and copies) or entry == dim for entry, dim in zip(wanted, data.shape, strict=False)]
    # One -1 among dims that stay can only be the dim in its place.
    if len(wanted) == len(data.shape) and (all(same) or (wanted.count(-1) == 1 and sum(same) == len(same) - 1)):
        return data if all(same) or 0 not in data.shape else None
    return _if_same_dims(node)


def _transpose(node: ir.Node) -> ir.Value | None:
    perm = _perm(node)
    return node.inputs[0] if perm is not None and perm == sorted(perm) else None


def _slice(node: ir.Node) -> ir.Value | None:
    data = node.inputs[0]
    starts, ends = _ints(node, 1, "starts"), _ints(node, 2, "ends")
    axes = _ints(node, 3, "axes") if _input(node, 3) or "axes" in node.attributes else list(range(len(starts or [])))
    steps = _ints(node, 4, "steps") if _input(node, 4) else [1] * len(starts or [])
    if data is None or starts is None or ends is None or axes is None or steps is None:
        return None
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        dim = data.shape[axis] if data.shape is not None and -len(data.shape) <= axis < len(data.shape) else None
        if start != 0 or step != 1 or end < (dim if isinstance(dim, int) else (1 << 31) - 1):
            return None
    return data


def _expand(node: ir.Node) -> ir.Value | None:
    data, shape = node.inputs[0], graphs.array(_input(node, 1), 64)
    if data is not None and data.shape is not None and shape is not None and (shape == 1).all():
        return data if shape.size <= len(data.shape) else None
    return _if_same_dims(node)


def _concat(node: ir.Node) -> ir.Value | None:
    axis = graphs.attribute(node, "axis", 1)
    filled = [value for value in node.inputs if not _is_empty(value, axis)]
    return filled[0] if len(filled) == 1 else None


def _is_empty(value: ir.Value | None, axis: int) -> bool:
    """Whether a value adds nothing along an axis; another dim of 0 says nothing of what it is joined with."""
    dims = value.shape if value is not None else None
    return dims is not None and -len(dims) <= axis < len(dims) and dims[axis] == 0


def _all(index: int, name: str, number: int) -> Callable[[ir.Node], ir.Value | None]:
    def rule(node: ir.Node) -> ir.Value | None:
        given = _ints(node, index, name)
        return node.inputs[0] if given is not None and all(entry == number for entry in given) else None

    return rule


def _dropout(node: ir.Node) -> ir.Value | None:
    training = _input(node, 2)
    off = training is None or graphs.scalar(training) == 0
    return node.inputs[0] if off or graphs.scalar(_input(node, 1)) == 0 else None


def _flatten(node: ir.Node) -> ir.Value | None:
    data = node.inputs[0]
    axis = graphs.attribute(node, "axis", 1)
    return data if data is not None and data.shape is not None and len(data.shape) == 2 and axis in (1, -1) else None


def _neutral(number: float, either: bool) -> Callable[[ir.Node], ir.Value | None]:
    """x op c = x where all of c is this number, down to the sign of a zero; `either`: c may come first."""

    def rule(node: ir.Node) -> ir.Value | None:
        for kept, other in ((0, 1), (1, 0)) if either else ((0, 1),):
            data, held = node.inputs[kept], graphs.array(node.inputs[other], MOST)
            if data is None or held is None or not held.size or not (held == number).all():
                continue
            signed = held.dtype.kind not in "iub"
            if signed and (np.signbit(held.astype(np.float32)) != np.signbit(number)).any():
                continue
            alone = held.size == 1 and data.shape is not None and held.ndim <= len(data.shape)
            if alone or held.ndim == 0 or _same_dims(data, node.outputs[0]):
                return data
        return None

    return rule


def _where(node: ir.Node) -> ir.Value | None:
    condition = graphs.array(node.inputs[0], MOST)
    if condition is None or not condition.size or condition.any() != condition.all():
        return None
    kept = node.inputs[1 if condition.all() else 2]
    return kept if _same_dims(kept, node.outputs[0]) else None


def _undone(node: ir.Node) -> ir.Value | None:
    """What went into a pair of nodes of which the second undoes the first."""
    inner = graphs.made_by(node.inputs[0], "Transpose", *VIEWS)
    if inner is None or not inner.inputs or (origin := inner.inputs[0]) is None:
        return None
    if node.op_type == inner.op_type == "Transpose":
        perm = _composed(inner, node)
        return origin if perm is not None and perm == sorted(perm) else None
    if node.op_type in VIEWS and inner.op_type in VIEWS:
        if _same_dims(origin, node.outputs[0]):
            return origin
        if {node.op_type, inner.op_type} == {"Squeeze", "Unsqueeze"}:
            # Both count axes in the longer of the two shapes.
            first, second = _ints(inner, 1, "axes"), _ints(node, 1, "axes")
            return origin if first and second and sorted(first) == sorted(second) else None
    return None


def _composed(inner: ir.Node, outer: ir.Node) -> list[int] | None:
    first, second = _perm(inner), _perm(outer)
    return None if first is None or second is None else [first[axis] for axis in second]


def _perm(node: ir.Node) -> list[int] | None:
    given, data = graphs.attribute(node, "perm"), node.inputs[0]
    if given is not None or data is None or data.shape is None:
        return None if given is None else list(given)
    return list(reversed(range(len(data.shape))))


def _merge(node: ir.Node) -> str | None:
    """Let the second node of a chain read what the first one read; the first is dead then."""
    inner = graphs.made_by(node.inputs[0], "Transpose", *VIEWS)
    if inner is None or not inner.inputs or (origin := inner.inputs[0]) is None:
        return None
    between = inner.outputs[0]
    if graphs.sole_user(between) is not node or inner.graph is not node.graph:
        return None
    if node.op_type == inner.op_type == "Transpose" and (perm := _composed(inner, node)) is not None:
        node.attributes["perm"] = ir.AttrInt64s("perm", perm)
    elif not (node.op_type in VIEWS and inner.op_type in VIEWS and (_join_axes(inner, node) or _as_reshape(node))):
        return None
    node.replace_input_with(0, origin)
    graphs.remove(inner)
    return f"{inner.op_type} before {node.op_type} merged into it"


def _join_axes(inner: ir.Node, node: ir.Node) -> bool:
    """Give the second of two Squeezes or Unsqueezes the axes of both."""
    if node.op_type != inner.op_type or node.op_type not in ("Squeeze", "Unsqueeze"):
        return False
    first, second = _ints(inner, 1, "axes"), _ints(node, 1, "axes")
    if not first or not second or min(*first, *second) < 0:
        return False
    # Axes of the longer shape stay; those of the shorter one count only what the others leave.
    fixed, moved = (first, second) if node.op_type == "Squeeze" else (second, first)
    left = [axis for axis in range(len(fixed) + max(*fixed, *moved) + 1) if axis not in fixed]
    axes = sorted([*fixed, *(left[axis] for axis in moved)])
    if "axes" in node.attributes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    else:
        node.replace_input_with(1, graphs.constant(node, f"{node.name}/axes", np.array(axes, np.int64)))
    return True


def _as_reshape(node: ir.Node) -> bool:
    """Make a node a Reshape whose shape does not depend on that of its input; False where that is not possible."""
    if node.op_type == "Reshape":
        shape = graphs.array(_input(node, 1), 64)
        if shape is not None and (shape != 0).all():
            return True
    dims = graphs.dims(node.outputs[0])
    if dims is None or 0 in dims:
        return False
    shape_value = graphs.constant(node, f"{node.name}/shape", np.array(dims, np.int64))
    node.op_type = "Reshape"
    node.attributes.clear()
    node.resize_inputs(2)
    node.replace_input_with(1, shape_value)
    return True


RULES: dict[str, Callable[[ir.Node], ir.Value | None]] = {
    "Identity": _first, "Reshape": _reshape, "Squeeze": _if_same_dims, "Unsqueeze": _if_same_dims,
    "Flatten": _flatten, "Transpose": _transpose, "Slice": _slice, "Expand": _expand,
    "Concat": _concat, "Sum": _if_only, "Max": _if_only, "Min": _if_only, "Mean": _if_only,
    "Tile": _all(1, "repeats", 1), "Pad": _all(1, "pads", 0), "Dropout": _dropout,
    "Add": _neutral(-0.0, True), "Sub": _neutral(0.0, False), "Mul": _neutral(1, True), "Div": _neutral(1, False),
    "Pow": _neutral(1, False), "Where": _where, "And": _neutral(1, True), "Or": _neutral(0, True),
}  # fmt: skip

PASS = Pass("no-ops", "remove nodes that change nothing, and pairs that undo each other", run)
