"""Squares that overflow fp16 (from |x| = 256 on) under the mean of a norm, and ReduceL2: x is divided by its largest.

x ─ Abs ─ ReduceMax ─ Max(1/64) ─ Pow(-1) ┬ Mul x = u ─ u^2 ─ ReduceMean ─ Add ─ Pow(-0.5) ─ Mul u
                                          └ Mul sqrt(eps) ─────── ^2 ───── ┘

One token of a language model can carry values of 25000 where others stay below 700, so no fixed factor fits all.
Pow(x, 2) becomes Mul(x, x) in any case: of a norm with Pow that ends in `weight * normed` the compiler makes one
operator, which it then cannot finalize ("Memory allocation related error").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.passes import Change, Pass, forms
from sanitize.ranges import span
from sanitize.target import Target

LIMIT = 255.0
SMALL = 0.05  # below, squares run out of fp16's digits: 62 -> 68 dB at 0.02, 41 -> 66 dB at 0.001
FLOOR = 1.0 / 64.0  # the smallest divisor: rows of zeros stay zeros, and 1 / FLOOR^2 eps is far from overflow


@dataclass(frozen=True)
class _Norm:
    """x / sqrt(mean(x^2) + eps) over one axis."""

    x: ir.Value
    axis: int
    eps: float


def run(model: ir.Model, target: Target) -> list[Change]:
    """Scale norms and ReduceL2 whose input may exceed 255, then write squares as products."""
    if not forms.concerned(model, target):
        return []
    changes = []
    opset = graphs.opset(model)
    for node in graphs.every_node(model):
        if node.graph is None or node.domain not in ("", "ai.onnx"):
            continue
        what = ""
        if (norm := _norm(node)) and _overflows(norm.x, target):
            graphs.swap(node, _scaled(forms.Writer(node, node.outputs[0], opset), norm))
            what = "norm scaled by its largest element: 10 -> 68 dB where |x| reaches 1000 (simulated, sm8750)"
        elif (
            node.op_type == "ReduceL2"
            and (x := node.inputs[0]) is not None
            and forms.floating(x)
            and (axis := match.reduced(node)) is not None
            and _known_to_overflow(x, target)
        ):
            write = forms.Writer(node, x, opset)
            largest, _, unit = _unit(write, x, axis)
            total = write.reduce("ReduceSum", write("Mul", unit, unit), axis)
            graphs.swap(node, write("Mul", largest, write("Sqrt", total, like=total), like=total))
            what = "ReduceL2 scaled by its largest element: its squares overflow fp16"
        if what:
            changes.append(Change(node.name or node.op_type, what))
    for node in graphs.every_node(model):
        if graphs.made_by(node.outputs[0], "Pow") and graphs.scalar(node.inputs[1]) == 2.0:
            x = node.inputs[0]
            if x is not None and forms.floating(x) and x.dtype == node.outputs[0].dtype:
                graphs.swap(node, forms.Writer(node, node.outputs[0])("Mul", x, x))
                changes.append(Change(node.name or node.op_type, "Pow(x, 2) written as Mul(x, x)"))
    return changes


def _norm(node: ir.Node) -> _Norm | None:
    """The norm that ends in x * (1 / root), x / root, or x * mean^-0.5."""
    if node.op_type not in ("Mul", "Div") or len(node.inputs) != 2:
        return None
    pairs = (node.inputs, node.inputs[::-1]) if node.op_type == "Mul" else (node.inputs,)
    for x, factor in pairs:
        mean = _root(factor) if node.op_type == "Div" else _inverse_root(factor)
        shifted = graphs.made_by(mean, "Add")
        if x is None or shifted is None or not forms.floating(x):
            continue
        for reduced, constant in (shifted.inputs, shifted.inputs[::-1]):
            eps, average = graphs.scalar(constant), graphs.made_by(reduced, "ReduceMean")
            if eps is None or eps < 0 or average is None or not _is_square(average.inputs[0], x):
                continue
            axis = match.reduced(average)
            if axis is not None:
                return _Norm(x, axis, eps)
    return None


def _inverse_root(value: ir.Value | None) -> ir.Value | None:
    """v of v^-0.5, however it is written."""
    node = graphs.made_by(value, "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op_type == "Pow":
        return node.inputs[0] if graphs.scalar(node.inputs[1]) == -0.5 else None
    if node.op_type == "Div" and graphs.scalar(node.inputs[0]) != 1.0:
        return None
    return _root(node.inputs[-1])


def _root(value: ir.Value | None) -> ir.Value | None:
    """v of sqrt(v)."""
    node = graphs.made_by(value, "Sqrt", "Pow")
    if node is None or (node.op_type == "Pow" and graphs.scalar(node.inputs[1]) != 0.5):
        return None
    return node.inputs[0]


def _is_square(value: ir.Value | None, x: ir.Value) -> bool:
    node = graphs.made_by(value, "Mul", "Pow")
    if node is None or node.inputs[0] is not x:
        return False
    return node.inputs[1] is x if node.op_type == "Mul" else graphs.scalar(node.inputs[1]) == 2.0


def _overflows(x: ir.Value, target: Target) -> bool:
    """Whether squares may overflow or vanish; without ranges they may."""
    low, high = span(x, target)
    return not SMALL <= max(-low, high) <= LIMIT


def _known_to_overflow(x: ir.Value, target: Target) -> bool:
    low, high = span(x, target)
    return LIMIT < max(-low, high) < math.inf


def _unit(write: forms.Writer, x: ir.Value, axis: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(largest element, its inverse, x in units of it), row by row."""
    largest = write.reduce("ReduceMax", write("Abs", x, like=x), axis)
    largest = write("Max", largest, FLOOR, like=largest)
    inverse = write("Pow", largest, -1.0, like=largest)
    return largest, inverse, write("Mul", x, inverse, like=x)


def _scaled(write: forms.Writer, norm: _Norm) -> ir.Value:
    _, inverse, unit = _unit(write, norm.x, norm.axis)
    mean = write.reduce("ReduceMean", write("Mul", unit, unit), norm.axis)
    shift = write("Mul", inverse, math.sqrt(norm.eps), like=inverse)
    mean = write("Add", mean, write("Mul", shift, shift, like=mean), like=mean)
    return write("Mul", unit, write("Pow", mean, -0.5, like=mean))


PASS = Pass("accurate-square", "norms whose squares overflow fp16 scaled, Pow(x, 2) as a product", run, min_db=100.0)
