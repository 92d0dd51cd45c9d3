"""Forms that HTP computes right in fp16 where its own kernels do not, and what the passes accurate-* share.

Each is an identity in float32, or a fit good to 89 dB and more. `ringstep ops` measures these very functions, under the
name that the docstring gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.ops import table as tables
from sanitize.ranges import EVERYTHING, Span
from sanitize.target import Target
from sanitize.tensors import FLOATS

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
V = TypeVar("V")
CORE: Span = (-8.0, 8.0)


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


def floating(value: ir.Value | None) -> bool:
    """Whether a value is float32 or float16 and was not quantised before: what the forms are for."""
    return value is not None and value.dtype in FLOATS and graphs.dequantised(value) is None


class Write(Protocol[V]):
    """Adds a node and returns its result; a form is written by a pass (V an ir.Value) as it is measured (a name)."""

    def __call__(self, op: str, *inputs: V | float, like: V | None = None) -> V: ...

    def reduce(self, op: str, x: V, axis: int) -> V:
        """Reduce one axis, which stays as 1."""
        ...


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


def sigmoid(write: Write[V], x: V) -> V:
    """Sigmoid/tanh-abs: exp(min(x, 0)) (1 + tanh(|x| / 2)) / 2; no division, and the tail keeps its precision."""
    upper = write("Add", write("Mul", write("Tanh", write("Abs", write("Mul", x, 0.5))), 0.5), 0.5)
    return write("Mul", upper, write("Exp", write("Clip", x, EXP_LOW, 0.0)))


def silu(write: Write[V], x: V, scale: float = 1.0) -> V:
    """SiLU/tanh-abs: x * sigmoid(scale * x), see sigmoid."""
    half = write("Mul", x, 0.5)
    scaled = x if scale == 1.0 else write("Mul", x, scale)
    angle = half if scale == 1.0 else write("Mul", x, scale / 2.0)
    gate = write("Add", write("Tanh", write("Abs", angle)), 1.0)
    return write("Mul", half, write("Mul", gate, write("Exp", write("Clip", scaled, EXP_LOW, 0.0))))


def gelu(write: Write[V], x: V) -> V:
    """Gelu/relu5: relu(x) - a exp(fit(a)), a = min(|x|, 6)."""
    size = write("Min", write("Abs", x), GELU_END)
    return write("Sub", write("Relu", x), write("Mul", size, write("Exp", _horner(write, size, GELU_TAIL))))


def gelu_tanh(write: Write[V], x: V) -> V:
    """GeluTanh/abs: 0.5 (1 + tanh(u)) = sigmoid(2 u), written as sigmoid(|2 u|) exp(min(2 u, 0))."""
    # Beyond 8 GELU is x or 0, and the square would overflow in the end.
    bounded = write("Clip", x, -8.0, 8.0)
    square = write("Mul", bounded, bounded)
    logit = write("Mul", bounded, write("Add", write("Mul", square, TANH_LOGIT[1]), TANH_LOGIT[0]))
    gate = write("Mul", x, write("Sigmoid", write("Abs", logit)))
    return write("Mul", gate, write("Exp", write("Clip", logit, EXP_LOW, 0.0)))


def softplus(write: Write[V], x: V) -> V:
    """Softplus/fit: relu(x) + e fit(e), e = exp(-|x|)."""
    e = write("Exp", write("Max", write("Neg", write("Abs", x)), EXP_LOW))
    return write("Add", write("Relu", x), write("Mul", e, _horner(write, e, LOG1P)))


def elu(write: Write[V], x: V, alpha: float = 1.0) -> V:
    """Elu/exp: relu(x) + alpha (exp(min(x, 0)) - 1)."""
    below = write("Sub", write("Exp", write("Clip", x, EXP_LOW, 0.0)), 1.0)
    return write("Add", write("Relu", x), below if alpha == 1.0 else write("Mul", below, alpha))


def _horner(write: Write[V], x: V, terms: tuple[float, ...]) -> V:
    """terms[0] + terms[1] x + ..."""
    total = write("Add", write("Mul", x, terms[-1]), terms[-2])
    for term in terms[-3::-1]:
        total = write("Add", write("Mul", x, total), term)
    return total


def softmax(write: Write[V], x: V, axis: int) -> V:
    """Softmax/pow: exp(x - max) times its sum's Pow(-1), which HTP rounds right where Reciprocal does not."""
    shifted = write("Sub", x, write.reduce("ReduceMax", x, axis))
    weights = write("Exp", write("Max", shifted, EXP_LOW))
    total = write.reduce("ReduceSum", weights, axis)
    return write("Mul", weights, write("Pow", total, -1.0, like=total))


def log_softmax(write: Write[V], x: V, axis: int) -> V:
    """LogSoftmax/explicit: x - max - log(sum(exp(x - max)))."""
    shifted = write("Sub", x, write.reduce("ReduceMax", x, axis))
    total = write.reduce("ReduceSum", write("Exp", write("Max", shifted, EXP_LOW)), axis)
    return write("Sub", shifted, write("Log", total, like=total))
