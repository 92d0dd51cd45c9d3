"""The numbers that a value can be: as calibration saw it, by its encoding, or by the operators that make it."""

from __future__ import annotations

import math

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.target import Target

Span = tuple[float, float]
"""Smallest and largest element."""
EVERYTHING: Span = (-math.inf, math.inf)
DEPTH = 16  # nodes looked back


def span(value: ir.Value | None, target: Target) -> Span:
    """The smallest and largest element that a value can have, by calibration or by the operators that make it."""
    return _span(value, target, DEPTH, {})


def _span(value: ir.Value | None, target: Target, depth: int, known: dict[ir.Value, Span]) -> Span:
    if value is None or not depth:
        return EVERYTHING
    if value not in known:
        # A value read twice is looked at once, or chains of x + x would take exponential time.
        known[value] = EVERYTHING
        low, high = _made_within(value, target, depth, known)
        known[value] = (-math.inf if math.isnan(low) else low), (math.inf if math.isnan(high) else high)
    return known[value]


def _made_within(value: ir.Value, target: Target, depth: int, known: dict[ir.Value, Span]) -> Span:
    if value.name is not None and value.name in target.ranges:
        return target.ranges[value.name]
    constant = graphs.scalar(value)
    if constant is not None:
        return constant, constant
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or not node.inputs:
        return EVERYTHING
    inner = lambda index: _span(node.inputs[index], target, depth - 1, known)
    match node.op_type:
        case "DequantizeLinear":
            return _encoded(node)
        case "Abs" | "Relu" | "Sqrt" | "ReduceSumSquare" | "ReduceL2" | "Softplus":
            return 0.0, math.inf
        case "Sigmoid" | "Softmax" | "HardSigmoid":
            return 0.0, 1.0
        case "Tanh" | "Erf" | "Sin" | "Cos":
            return -1.0, 1.0
        case "Exp":
            return tuple(math.exp(min(bound, 700.0)) for bound in inner(0))  # type: ignore[return-value]
        case "Pow" if graphs.scalar(node.inputs[1]) == 2.0:
            return 0.0, math.inf
        case "Mul" if node.inputs[0] is node.inputs[1]:
            return 0.0, math.inf
        case "Mul":
            corners = [0.0 if not a or not b else a * b for a in inner(0) for b in inner(1)]
            return min(corners), max(corners)
        case "Neg":
            low, high = inner(0)
            return -high, -low
        case "Add":
            return inner(0)[0] + inner(1)[0], inner(0)[1] + inner(1)[1]
        case "Sub" if _of(node.inputs[1], "ReduceMax", node.inputs[0]):
            return -math.inf, 0.0
        case "Sub":
            return inner(0)[0] - inner(1)[1], inner(0)[1] - inner(1)[0]
        case "Clip":
            low, high = inner(0)
            bottom, top = (graphs.scalar(node.inputs[i]) if i < len(node.inputs) else None for i in (1, 2))
            return (low if bottom is None else max(low, bottom)), (high if top is None else min(high, top))
        case "Max" | "Min":
            spans = [inner(index) for index in range(len(node.inputs))]
            pick = max if node.op_type == "Max" else min
            return pick(s[0] for s in spans), pick(s[1] for s in spans)
        case "Reshape" | "Transpose" | "Squeeze" | "Unsqueeze" | "Identity" | "Slice" | "Split" | "Expand":
            return inner(0)
        case "ReduceMean" | "ReduceMax" | "ReduceMin":
            return inner(0)
        case "ReduceSum":
            low, high = inner(0)
            return (0.0 if low >= 0.0 else -math.inf), (0.0 if high <= 0.0 else math.inf)
    return EVERYTHING


def _encoded(node: ir.Node) -> Span:
    """The range of a quantised tensor's encoding."""
    data, scale = node.inputs[0], graphs.scalar(node.inputs[1])
    zero = graphs.scalar(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else 0.0
    if data is None or data.dtype is None or scale is None or zero is None:
        return EVERYTHING
    low = -(1 << (data.dtype.bitwidth - 1)) if data.dtype.is_signed() else 0
    return (low - zero) * scale, (low + (1 << data.dtype.bitwidth) - 1 - zero) * scale


def _of(value: ir.Value | None, op: str, first: ir.Value | None) -> bool:
    """Whether an operator with that first input makes a value."""
    node = graphs.made_by(value, op)
    return node is not None and node.inputs[0] is first
