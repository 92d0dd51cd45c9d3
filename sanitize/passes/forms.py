"""Forms that HTP computes right in fp16 where its own kernels do not, and what the passes accurate-* share.

Every form is an identity, or a fit good to 90 dB, in float32. docs/htp-accuracy.md has the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.target import Target

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# HTP's Exp returns garbage from about -100 down; e^-40 is a clean 0 in fp16.
EXP_LOW = -40.0
Span = tuple[float, float]
EVERYTHING: Span = (-math.inf, math.inf)
WALK = 8
WORTH_DB = 3.0
# Function to (low, high, native kernel's dB, form's dB), simulated on sm8750 over evenly spaced ratios of x.
MEASURED = {
    "SiLU": ((-10.0, -1.0, 44.6, 67.6), (-1.0, 0.0, 62.3, 68.4), (0.0, 1.0, 67.7, 72.5)),
    "Sigmoid": ((-10.0, -1.0, 53.3, 68.3), (-1.0, 0.0, 64.4, 68.3), (0.0, 1.0, 68.5, 72.3)),
}


def concerned(model: ir.Model, target: Target) -> bool:
    """Whether the model is computed in fp16 on HTP (16 bit quantised kernels are right) and can hold the forms."""
    return target.htp and target.precision == "fp16" and graphs.opset(model) >= 11


def gain(function: str, target: Target, span: Span) -> str | None:
    """What rewriting a function gains over a span of its argument, as a clause; None: nothing worth its cost."""
    low, high = span
    rows = [row for row in MEASURED[function] if low < row[1] and high > row[0]]
    best = max(rows, key=lambda row: row[3] - row[2], default=None)
    if best is None or best[3] - best[2] < WORTH_DB or target.chip is None:
        return None
    bottom, top, native, form = best
    return f"{function} rewritten: {native} -> {form} dB over {bottom:g}..{top:g} (simulated, {target.chip.name})"


@dataclass(frozen=True)
class Writer:
    """Adds element-wise nodes before a node: write("Exp", x) returns the new value, in the type and shape of `like`."""

    before: ir.Node
    like: ir.Value

    def __call__(
        self, op: str, *inputs: ir.Value | float | None, like: ir.Value | None = None, **attributes: Any
    ) -> ir.Value:
        """Numbers become constants of the type of `like`; None is an input left out."""
        name = f"{self.before.name or self.before.op_type}/{op}"
        values = [self.number(v, name) if isinstance(v, float) else v for v in inputs]
        return graphs.insert(self.before, op, values, attributes, like=like or self.like, name=name)

    def number(self, value: float, name: str) -> ir.Value:
        """A scalar constant."""
        assert self.like.dtype is not None
        return graphs.constant(self.before, f"{name}_constant", np.array(value, self.like.dtype.numpy()))


def floating(value: ir.Value | None) -> bool:
    """Whether a value is float32 or float16: what the forms are for."""
    return value is not None and value.dtype in FLOATS


def span(value: ir.Value | None, target: Target, depth: int = WALK) -> Span:
    """The smallest and largest element that a value can have, by calibration or by the operator that makes it."""
    if value is None or not depth:
        return EVERYTHING
    if value.name is not None and value.name in target.ranges:
        return target.ranges[value.name]
    constant = graphs.array(value, 1)
    if constant is not None and constant.size == 1:
        return (float(constant.reshape(-1)[0]),) * 2
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or not node.inputs:
        return EVERYTHING
    inner = lambda index: span(node.inputs[index], target, depth - 1) if index < len(node.inputs) else EVERYTHING
    match node.op_type:
        case "Abs" | "Relu" | "Exp" | "Sqrt" | "ReduceSumSquare" | "ReduceL2":
            return 0.0, math.inf
        case "Mul" if node.inputs[0] is node.inputs[1]:
            return 0.0, math.inf
        case "Sigmoid" | "Softmax" | "HardSigmoid":
            return 0.0, 1.0
        case "Tanh" | "Erf" | "Sin" | "Cos":
            return -1.0, 1.0
        case "Neg":
            low, high = inner(0)
            return -high, -low
        case "Clip":
            (low, high), bottom, top = inner(0), graphs.scalar(_input(node, 1)), graphs.scalar(_input(node, 2))
            return (low if bottom is None else max(low, bottom)), (high if top is None else min(high, top))
        case "Max" | "Min":
            spans = [inner(index) for index in range(len(node.inputs))]
            pick = max if node.op_type == "Max" else min
            return pick(s[0] for s in spans), pick(s[1] for s in spans)
        case "Reshape" | "Transpose" | "Squeeze" | "Unsqueeze" | "Identity" | "Slice" | "Split" | "Cast" | "Expand":
            return inner(0)
    return EVERYTHING


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def sigmoid(write: Writer, x: ir.Value) -> ir.Value:
    """exp(min(x, 0)) (1 + tanh(|x| / 2)) / 2: no division, and the tail keeps its relative precision."""
    upper = write("Add", write("Mul", write("Tanh", write("Abs", write("Mul", x, 0.5))), 0.5), 0.5)
    return write("Mul", upper, write("Exp", write("Clip", x, EXP_LOW, 0.0)))


def silu(write: Writer, x: ir.Value, scale: float = 1.0) -> ir.Value:
    """x * sigmoid(scale * x), see sigmoid."""
    half = write("Mul", x, 0.5)
    scaled = x if scale == 1.0 else write("Mul", x, scale)
    angle = half if scale == 1.0 else write("Mul", x, scale / 2.0)
    low = write("Mul", half, write("Exp", write("Clip", scaled, EXP_LOW, 0.0)))
    return write("Add", low, write("Mul", low, write("Tanh", write("Abs", angle))))
