"""Normalisations as exporters spell them, found from the mean of the squares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.tensors import FLOATS


@dataclass(frozen=True)
class Norm:
    """A decomposed RMSNorm; `steps` are square, mean, plus eps, root, (reciprocal,) times x."""

    x: ir.Value
    eps: float
    weight: ir.Value | None
    steps: tuple[ir.Node, ...]
    last: ir.Node


def find_norm(mean: ir.Node) -> Norm | None:
    """The RMSNorm whose mean of squares this is; None if it is none or its inner values are read elsewhere."""
    square = graphs.made_by(mean.inputs[0], "Mul", "Pow")
    if square is None or not match.last_axis(mean, match.rank(mean.inputs[0])):
        return None
    x = square.inputs[0]
    if square.op_type == "Mul" and not same(x, square.inputs[1]):
        return None
    if square.op_type == "Pow" and graphs.scalar(square.inputs[1]) != 2:
        return None
    add = match.next_node(mean.outputs[0], "Add")
    eps = match.with_constant(add)
    if add is None or eps is None or not 0 < eps[1] < 0.1:
        return None
    root = match.next_node(add.outputs[0], "Sqrt", "Pow")
    if root is None or (root.op_type == "Pow" and graphs.scalar(root.inputs[1]) != -0.5):
        return None
    steps = [square, mean, add, root]
    inverse = root.outputs[0]
    if root.op_type == "Sqrt":
        over = match.next_node(inverse, "Reciprocal", "Div")
        if over is None:
            return None
        if over.op_type == "Div" and graphs.scalar(over.inputs[0]) != 1:
            return _weigh(x, over.inputs[0], eps[1], [*steps, over])
        steps.append(over)
        inverse = over.outputs[0]
    scale = match.next_node(inverse, "Mul")
    return _weigh(x, match.other_input(scale, inverse), eps[1], [*steps, scale]) if scale is not None else None


def _weigh(x: ir.Value | None, also: ir.Value | None, eps: float, steps: list[ir.Node]) -> Norm | None:
    if x is None or not same(x, also) or match.inner(x) is None:
        return None
    last, inside = steps[-1], list(steps)
    up, down = cast_back(x, last)
    if up is not None and down is not None:
        x, last = up, down
        inside.append(down)
    last, weight = times_weight(x, last)
    if x.dtype not in FLOATS or not match.closed(inside, last):
        return None
    return Norm(x, eps, weight, tuple(dict.fromkeys(inside)), last)


def cast_back(x: ir.Value, last: ir.Node) -> tuple[ir.Value | None, ir.Node | None]:
    """What x was before it was cast up, and the Cast that brings the result back to that type: what norms do inside."""
    up, down = graphs.made_by(x, "Cast"), match.next_node(last.outputs[0], "Cast")
    before = up.inputs[0] if up is not None else None
    if down is None or before is None or before.dtype != down.outputs[0].dtype or before.dtype not in FLOATS:
        return None, None
    return before, down


def times_weight(x: ir.Value, last: ir.Node) -> tuple[ir.Node, ir.Value | None]:
    """Step over a factor of one number for each element of the last dim."""
    times = match.next_node(last.outputs[0], "Mul")
    other = match.other_input(times, last.outputs[0]) if times is not None else None
    if times is None or other is None or other.dtype != x.dtype or not is_vector(other, x):
        return last, None
    return times, other


def same(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether two values are one, or made alike by a Cast or a Sub of the same values."""
    if a is b:
        return a is not None
    if a is None or b is None or a.dtype != b.dtype:
        return False
    one, two = graphs.made_by(a, "Cast", "Sub"), graphs.made_by(b, "Cast", "Sub")
    return one is not None and two is not None and one.op_type == two.op_type and one.inputs == two.inputs


def is_vector(value: ir.Value, x: ir.Value) -> bool:
    """Whether a value is one number for each element of x's last dim."""
    shape, rank = graphs.dims(value), match.rank(x)
    if not shape or rank is None or len(shape) > rank:
        return False
    return shape[-1] == match.inner(x) and math.prod(shape) == shape[-1]
