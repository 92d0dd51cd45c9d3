"""Forms that HTP computes right in fp16 where its own kernels do not, and what the passes accurate-* share.

Each is an identity in float32, or a fit good to 89 dB and more, and is measured under the name its docstring gives: the
tables are those of `ringstep ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.ops import table as tables
from sanitize.target import Target

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# HTP's Exp returns garbage from about -100 down; e^-40 is a clean 0 in fp16.
EXP_LOW = -40.0
WORTH_DB = 3.0
FULL_DB = 74.0  # one rounding to fp16; more says nothing
# Logarithm of GELU's gate at -a as a polynomial of a in 0..6: the least error of a exp(fit).
GELU_TAIL = (-0.69326301, -0.7969805, -0.32034052, -0.034609737, 0.0044202485, -0.00026355498)
GELU_END = 6.0
TANH_LOGIT = (2.0 * math.sqrt(2.0 / math.pi), 2.0 * math.sqrt(2.0 / math.pi) * 0.044715)
# log(1 + e) / e for e in 0..1.
LOG1P = (0.99988818, -0.49637029, 0.30467558, -0.15602763, 0.04106185)
Span = tuple[float, float]
EVERYTHING: Span = (-math.inf, math.inf)
CORE: Span = (-8.0, 8.0)
DEPTH = 16


def concerned(model: ir.Model, target: Target) -> bool:
    """Whether the model is computed in fp16 on HTP (16 bit quantised kernels are right) and can hold the forms."""
    return target.htp and target.precision == "fp16" and graphs.opset(model) >= 13


def gain(target: Target, native: str, form: str, span: Span = EVERYTHING, size: int | None = None) -> str | None:
    """What a form gains over a span of its argument, as a clause; None: nothing worth its cost.

    `native` and `form` are names in the operator table, such as SiLU/native and SiLU/tanh-abs.
    """
    if target.chip is None:
        return None
    table = tables.load(target.chip.name, target.precision)
    ours = {(row.low, row.high, row.size): min(row.snr_db, FULL_DB) for row in table.overlapping(form, *span, size)}
    found = [(ours[key] - min(row.snr_db, FULL_DB), row) for row in table.overlapping(native, *span, size)
             if (key := (row.low, row.high, row.size)) in ours]  # fmt: skip
    # Where values lie, if they may lie there; beyond, kernels fail on what is next to nothing.
    inside = [pair for pair in found if CORE[0] <= pair[1].low and pair[1].high <= CORE[1] and pair[0] >= WORTH_DB]
    best, row = max(inside or found, key=lambda pair: pair[0], default=(0.0, None))
    if row is None or best < WORTH_DB:
        return None
    after = ours[row.low, row.high, row.size]
    function, low, high = native.split("/")[0], f"{row.low:g}", f"{row.high:g}"
    before = "garbage" if row.snr_db <= -300.0 else f"{row.snr_db:.1f}"
    return f"{function} rewritten: {before} -> {after:.1f} dB over {low}..{high} (simulated, {table.chip})"


def swap(node: ir.Node, new: ir.Value) -> None:
    """Put a new value in a node's place, and take out what then has no use."""
    graphs.replace(node.outputs[0], new)
    pending: list[ir.Node | None] = [node]
    while pending:
        dead = pending.pop()
        if dead is None or dead.graph is None or any(o.uses() or o.is_graph_output() for o in dead.outputs):
            continue
        pending += [value.producer() for value in dead.inputs if value is not None]
        graphs.remove(dead)


def floating(value: ir.Value | None) -> bool:
    """Whether a value is float32 or float16 and was not quantised before: what the forms are for."""
    return value is not None and value.dtype in FLOATS and graphs.dequantised(value) is None


@dataclass(frozen=True)
class Writer:
    """Adds nodes before a node: write("Exp", x) returns the new value, in the type and shape of `like`."""

    before: ir.Node
    like: ir.Value
    opset: int = 13

    @property
    def name(self) -> str:
        """What new nodes are named after; operators' types would be searched for a free number each time."""
        return self.before.name or self.before.outputs[0].name or self.before.op_type

    def __call__(self, op: str, *inputs: ir.Value | float, like: ir.Value | None = None, **attributes: Any) -> ir.Value:
        """Numbers become constants of the type of `like`."""
        name = f"{self.name}/{op}"
        values = [self.number(v, name) if isinstance(v, float) else v for v in inputs]
        return graphs.insert(self.before, op, values, attributes, like=like or self.like, name=name)

    def reduce(self, op: str, x: ir.Value, axis: int) -> ir.Value:
        """ReduceMax, ReduceMean or ReduceSum over one axis, which stays as 1."""
        name = f"{self.name}/{op}"
        inputs, attributes = [x], {"keepdims": 1}
        if self.opset >= 18 or op == "ReduceSum":
            inputs.append(graphs.constant(self.before, f"{name}_axes", np.array([axis], np.int64)))
        else:
            attributes["axes"] = [axis]  # type: ignore[assignment]
        shape = None if x.shape is None else [1 if i == axis % len(x.shape) else d for i, d in enumerate(x.shape)]
        return graphs.insert(self.before, op, inputs, attributes, dtype=x.dtype, shape=shape, name=name)

    def number(self, value: float, name: str) -> ir.Value:
        """A scalar constant."""
        # Inference may know nothing of the node's own output.
        dtype = next(v.dtype for v in (self.like, *self.before.inputs) if v is not None and v.dtype in FLOATS)
        return graphs.constant(self.before, f"{name}_constant", np.array(value, dtype.numpy()))


def sigmoid(write: Writer, x: ir.Value) -> ir.Value:
    """Sigmoid/tanh-abs: exp(min(x, 0)) (1 + tanh(|x| / 2)) / 2; no division, and the tail keeps its precision."""
    upper = write("Add", write("Mul", write("Tanh", write("Abs", write("Mul", x, 0.5))), 0.5), 0.5)
    return write("Mul", upper, write("Exp", write("Clip", x, EXP_LOW, 0.0)))


def silu(write: Writer, x: ir.Value, scale: float = 1.0) -> ir.Value:
    """SiLU/tanh-abs: x * sigmoid(scale * x), see sigmoid."""
    half = write("Mul", x, 0.5)
    scaled = x if scale == 1.0 else write("Mul", x, scale)
    angle = half if scale == 1.0 else write("Mul", x, scale / 2.0)
    gate = write("Add", write("Tanh", write("Abs", angle)), 1.0)
    return write("Mul", half, write("Mul", gate, write("Exp", write("Clip", scaled, EXP_LOW, 0.0))))


def gelu(write: Writer, x: ir.Value) -> ir.Value:
    """Gelu/relu5: relu(x) - a exp(fit(a)), a = min(|x|, 6)."""
    size = write("Min", write("Abs", x), GELU_END)
    return write("Sub", write("Relu", x), write("Mul", size, write("Exp", _horner(write, size, GELU_TAIL))))


def gelu_tanh(write: Writer, x: ir.Value) -> ir.Value:
    """GeluTanh/abs: 0.5 (1 + tanh(u)) = sigmoid(2 u), written as sigmoid(|2 u|) exp(min(2 u, 0))."""
    # Beyond 8 GELU is x or 0, and the square would overflow in the end.
    bounded = write("Clip", x, -8.0, 8.0)
    square = write("Mul", bounded, bounded)
    logit = write("Mul", bounded, write("Add", write("Mul", square, TANH_LOGIT[1]), TANH_LOGIT[0]))
    gate = write("Mul", x, write("Sigmoid", write("Abs", logit)))
    return write("Mul", gate, write("Exp", write("Clip", logit, EXP_LOW, 0.0)))


def softplus(write: Writer, x: ir.Value) -> ir.Value:
    """Softplus/fit: relu(x) + e fit(e), e = exp(-|x|)."""
    e = write("Exp", write("Max", write("Neg", write("Abs", x)), EXP_LOW))
    return write("Add", write("Relu", x), write("Mul", e, _horner(write, e, LOG1P)))


def elu(write: Writer, x: ir.Value, alpha: float) -> ir.Value:
    """Elu/exp: relu(x) + alpha (exp(min(x, 0)) - 1)."""
    below = write("Sub", write("Exp", write("Clip", x, EXP_LOW, 0.0)), 1.0)
    return write("Add", write("Relu", x), below if alpha == 1.0 else write("Mul", below, alpha))


def _horner(write: Writer, x: ir.Value, terms: tuple[float, ...]) -> ir.Value:
    """terms[0] + terms[1] x + ..."""
    total = write("Add", write("Mul", x, terms[-1]), terms[-2])
    for term in terms[-3::-1]:
        total = write("Add", write("Mul", x, total), term)
    return total


def softmax(write: Writer, x: ir.Value, axis: int) -> ir.Value:
    """Softmax/pow: exp(x - max) times its sum's Pow(-1), which HTP rounds right where Reciprocal does not."""
    shifted = write("Sub", x, write.reduce("ReduceMax", x, axis))
    weights = write("Exp", write("Max", shifted, EXP_LOW))
    total = write.reduce("ReduceSum", weights, axis)
    return write("Mul", weights, write("Pow", total, -1.0, like=total))


def log_softmax(write: Writer, x: ir.Value, axis: int) -> ir.Value:
    """LogSoftmax/explicit: x - max - log(sum(exp(x - max)))."""
    shifted = write("Sub", x, write.reduce("ReduceMax", x, axis))
    total = write.reduce("ReduceSum", write("Exp", write("Max", shifted, EXP_LOW)), axis)
    return write("Sub", shifted, write("Log", total, like=total))


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


def _of(value: ir.Value | None, op: str, first: ir.Value | None) -> bool:
    """Whether an operator with that first input makes a value."""
    node = graphs.made_by(value, op)
    return node is not None and node.inputs[0] is first
