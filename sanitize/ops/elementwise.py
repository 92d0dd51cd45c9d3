"""Operators and forms of one value (or two) that `ringstep ops` measures.

`op` is forms.Ops: op.Exp(x) adds a node. Constants are rounded to the graph's type, as an export's are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sanitize.ops.forms import (
    A16_NEGATIVE,
    A16_POSITIVE,
    A16_SPANS,
    ANGLES,
    EDGES,
    EXP_HIGH,
    POSITIVE,
    Build,
    Exact,
    Form,
    Ops,
    elementwise,
    gelu,
    gelu_tanh,
    quotients,
    sigmoid,
    steps,
)
from sanitize.passes import forms
from sanitize.passes.forms import EXP_LOW

# 0.5 (1 + erf(x / sqrt(2))) = sigmoid(x (c0 + c1 x^2 + c2 x^4)), least squares on what GELU errs (98 dB on -4..4).
LOGIT = (1.594678, 0.07433558, -0.0007548742)
TANH_LOGIT = (*forms.TANH_LOGIT, 0.0)
# Logarithm of GELU's gate at -a as a polynomial of a in 0..6, weighted so that a exp(fit) errs least; at the end 0.
TAIL = (-0.6941216, -0.79151975, -0.33041269, -0.027128968, 0.0020549755)
TANH_TAIL = (-0.69423074, -0.78939116, -0.33730609, -0.019540115, 0.00093358887, -0.00067737139)
# 2 pi as numbers of few bits, so that whole multiples up to 1000 are exact in fp16, and the rest.
TURN = (6.0, 0.25, 0.03125, 2.0 * math.pi - 6.28125)


def written(form: Callable[[forms.Write[str], str], str]) -> Build:
    """A form as the passes write it."""
    return lambda op, x: form(Spelled(op), x)


@dataclass(frozen=True)
class Spelled:
    """What the passes' forms are written with, over names of values."""

    op: Ops

    def __call__(self, op: str, *inputs: str | float, like: str | None = None) -> str:
        """Add a node; types follow from the graph's."""
        return str(getattr(self.op, op)(*inputs))

    def reduce(self, op: str, x: str, axis: int) -> str:
        """Reduce one axis, which stays as 1."""
        return str(getattr(self.op, op)(x, np.array([axis])))


def newton(op: Ops, x: str, by: str) -> str:
    """x / by, corrected once."""
    quotient = op.Div(x, by)
    return op.Add(quotient, op.Div(op.Sub(x, op.Mul(quotient, by)), by))


def newton_inverse(op: Ops, x: str) -> str:
    """1 / x, corrected once."""
    inverse = op.Reciprocal(x)
    return op.Add(inverse, op.Mul(inverse, op.Sub(1.0, op.Mul(x, inverse))))


def one_plus_exp_neg(op: Ops, x: str) -> str:
    """1 + exp(-x) where HTP's Exp is right."""
    return op.Add(op.Exp(op.Clip(op.Neg(x), EXP_LOW, EXP_HIGH)), 1.0)


def exp_below(op: Ops, x: str) -> str:
    """exp(min(x, 0))."""
    return op.Exp(op.Clip(x, EXP_LOW, 0.0))


def silu_relu(op: Ops, x: str) -> str:
    """relu(x) - |x| sigmoid(|x|) exp(-|x|)."""
    size = op.Abs(x)
    below = op.Max(op.Neg(size), EXP_LOW)
    return op.Add(op.Relu(x), op.Mul(op.Mul(below, op.Exp(below)), op.Sigmoid(size)))


def logit(op: Ops, x: str, terms: tuple[float, float, float], factor: float = 1.0) -> str:
    """The odd polynomial whose sigmoid is GELU's gate; beyond 8 the fit turns back and the square overflows."""
    c0, c1, c2 = (term * factor for term in terms)
    bounded = op.Clip(x, -8.0, 8.0)
    square = op.Mul(bounded, bounded)
    inner = op.Add(op.Mul(square, c2), c1) if c2 else c1
    return op.Mul(bounded, op.Add(op.Mul(square, inner), c0))


def gelu_logit(terms: tuple[float, float, float]) -> Build:
    """x / (1 + exp(-logit(x))), corrected once: what recipes/blocks.py writes."""
    return lambda op, x: newton(op, x, one_plus_exp_neg(op, logit(op, x, terms)))


def gelu_abs(terms: tuple[float, float, float]) -> Build:
    """x sigmoid(|u|) exp(min(u, 0)), u the logit."""

    def build(op: Ops, x: str) -> str:
        u = logit(op, x, terms)
        return op.Mul(op.Mul(x, op.Sigmoid(op.Abs(u))), exp_below(op, u))

    return build


def gelu_by_tanh(terms: tuple[float, float, float]) -> Build:
    """0.5 x (1 + tanh(u / 2)), the bounds in between hide it from the fusion to Gelu."""
    return lambda op, x: op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(logit(op, x, terms, 0.5)), 1.0))


def horner(op: Ops, x: str, terms: tuple[float, ...]) -> str:
    """terms[0] + terms[1] x + ..."""
    total: str | float = terms[-1]
    for term in terms[-2::-1]:
        total = op.Add(op.Mul(x, total), term)
    return str(total)


def gelu_relu(terms: tuple[float, ...], end: float) -> Build:
    """relu(x) - a exp(fit(a)), a = min(|x|, end): no division, and the positive side is all but exact."""

    def build(op: Ops, x: str) -> str:
        a = op.Min(op.Abs(x), end)
        return op.Sub(op.Relu(x), op.Mul(a, op.Exp(horner(op, a, terms))))

    return build


def exp_neg_abs(op: Ops, x: str) -> str:
    """exp(-|x|)."""
    return op.Exp(op.Max(op.Neg(op.Abs(x)), EXP_LOW))


def within_turn(op: Ops, x: str) -> str:
    """x less whole turns, within -pi..pi, without rounding up to 1000 (Cody and Waite)."""
    turns = op.Round(op.Mul(x, 1.0 / (2.0 * math.pi)))
    for part in TURN:
        x = op.Sub(x, op.Mul(turns, part))
    return x


def gelu_erf(op: Ops, x: str) -> str:
    """The expansion that exporters write; it is fused to Gelu."""
    return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, math.sqrt(2.0))), 1.0)), 0.5)


def elementwise_forms() -> list[Form]:
    """Operators and forms of one value."""
    wide, positive = elementwise(steps(EDGES)), elementwise(steps(POSITIVE))
    spans = elementwise(A16_SPANS)
    silu: Exact = lambda x: x * sigmoid(x)
    quick: Exact = lambda x: x * sigmoid(1.702 * x)
    mish: Exact = lambda x: x * np.tanh(np.logaddexp(0.0, x))
    hard_sigmoid: Exact = lambda x: np.clip(x / 6.0 + 0.5, 0.0, 1.0)
    softplus: Exact = lambda x: np.logaddexp(0.0, x)
    elu: Exact = lambda x: np.maximum(x, 0.0) + np.expm1(np.minimum(x, 0.0))
    erf: Exact = lambda x: np.vectorize(math.erf)(x)
    sixth = {"alpha": 1.0 / 6.0, "beta": 0.5}
    anywhere: list[tuple[str, Build, Exact]] = [
        ("Neg", lambda op, x: op.Neg(x), np.negative),
        ("Abs", lambda op, x: op.Abs(x), np.abs),
        ("Relu", lambda op, x: op.Relu(x), lambda x: np.maximum(x, 0.0)),
        ("Clip", lambda op, x: op.Clip(x, -6.0, 6.0), lambda x: np.clip(x, -6.0, 6.0)),
        ("LeakyRelu", lambda op, x: op.LeakyRelu(x), lambda x: np.where(x > 0.0, x, 0.01 * x)),
        ("Add", lambda op, x: op.Add(x, 1.0), lambda x: x + 1.0),
        ("Sub", lambda op, x: op.Sub(1.0, x), lambda x: 1.0 - x),
        ("Sigmoid/native", lambda op, x: op.Sigmoid(x), sigmoid),
        ("Sigmoid/exp", lambda op, x: op.Reciprocal(one_plus_exp_neg(op, x)), sigmoid),
        ("Sigmoid/newton", lambda op, x: newton_inverse(op, one_plus_exp_neg(op, x)), sigmoid),
        ("Sigmoid/abs", lambda op, x: op.Mul(op.Sigmoid(op.Abs(x)), exp_below(op, x)), sigmoid),
        ("Sigmoid/tanh", lambda op, x: op.Add(op.Mul(op.Tanh(op.Mul(x, 0.5)), 0.5), 0.5), sigmoid),
        ("Sigmoid/tanh-abs", written(forms.sigmoid), sigmoid),
        ("SiLU/native", lambda op, x: op.Mul(x, op.Sigmoid(x)), silu),
        ("SiLU/swish", lambda op, x: op.Swish(x), silu),
        ("SiLU/exp", lambda op, x: op.Div(x, one_plus_exp_neg(op, x)), silu),
        ("SiLU/newton", lambda op, x: newton(op, x, one_plus_exp_neg(op, x)), silu),
        ("SiLU/abs", lambda op, x: op.Mul(x, op.Mul(op.Sigmoid(op.Abs(x)), exp_below(op, x))), silu),
        ("SiLU/tanh", lambda op, x: (lambda half: op.Mul(half, op.Add(op.Tanh(half), 1.0)))(op.Mul(x, 0.5)), silu),
        ("SiLU/tanh-abs", written(forms.silu), silu),
        ("SiLU/relu", silu_relu, silu),
        ("Gelu/native", lambda op, x: op.Gelu(x), gelu),
        ("Gelu/erf", gelu_erf, gelu),
        ("Gelu/newton", gelu_logit(LOGIT), gelu),
        ("Gelu/abs", gelu_abs(LOGIT), gelu),
        ("Gelu/tanh", gelu_by_tanh(LOGIT), gelu),
        ("Gelu/relu", gelu_relu(TAIL, 6.0), gelu),
        ("Gelu/relu5", written(forms.gelu), gelu),
        ("GeluTanh/native", lambda op, x: op.Gelu(x, approximate="tanh"), gelu_tanh),
        ("GeluTanh/newton", gelu_logit(TANH_LOGIT), gelu_tanh),
        ("GeluTanh/abs", written(forms.gelu_tanh), gelu_tanh),
        ("GeluTanh/relu", gelu_relu(TANH_TAIL, 5.5), gelu_tanh),
        ("GeluTanh/tanh", gelu_by_tanh(TANH_LOGIT), gelu_tanh),
        ("QuickGelu/native", lambda op, x: op.Mul(x, op.Sigmoid(op.Mul(x, 1.702))), quick),
        ("QuickGelu/newton", lambda op, x: newton(op, x, one_plus_exp_neg(op, op.Mul(x, 1.702))), quick),
        ("QuickGelu/abs", lambda op, x: (lambda u: op.Mul(x, op.Mul(op.Sigmoid(op.Abs(u)), exp_below(op, u))))(
            op.Mul(x, 1.702)), quick),
        ("Tanh", lambda op, x: op.Tanh(x), np.tanh),
        ("Erf/native", lambda op, x: op.Erf(x), erf),
        ("Erf/tanh", lambda op, x: op.Tanh(logit(op, op.Mul(x, math.sqrt(2.0)), LOGIT, 0.5)), erf),
        ("HardSigmoid", lambda op, x: op.HardSigmoid(x, **sixth), hard_sigmoid),
        ("HardSwish/native", lambda op, x: op.HardSwish(x), lambda x: x * hard_sigmoid(x)),
        ("HardSwish/x*HardSigmoid", lambda op, x: op.Mul(x, op.HardSigmoid(x, **sixth)), lambda x: x * hard_sigmoid(x)),
        ("HardSwish/HardSigmoid*x", lambda op, x: op.Mul(op.HardSigmoid(x, **sixth), x), lambda x: x * hard_sigmoid(x)),
        ("HardSwish/clip", lambda op, x: op.Mul(x, op.Clip(op.Add(op.Mul(x, 1.0 / 6.0), 0.5), 0.0, 1.0)),
         lambda x: x * hard_sigmoid(x)),
        ("Softplus/native", lambda op, x: op.Softplus(x), softplus),
        ("Softplus/log", lambda op, x: op.Add(op.Relu(x), op.Log(op.Add(exp_neg_abs(op, x), 1.0))), softplus),
        ("Softplus/fit", written(forms.softplus), softplus),
        ("Softplus/sigmoid", lambda op, x: op.Sub(op.Relu(x), op.Log(op.Sigmoid(op.Abs(x)))), softplus),
        ("Elu/native", lambda op, x: op.Elu(x), elu),
        ("Elu/exp", written(forms.elu), elu),
        ("Mish/native", lambda op, x: op.Mish(x), mish),
        ("Mish/fit", lambda op, x: op.Mul(x, op.Tanh(written(forms.softplus)(op, x))), mish),
        ("Square/Mul", lambda op, x: op.Mul(x, x), np.square),
        ("Square/Pow", lambda op, x: op.Pow(x, 2.0), np.square),
        ("Square/scaled", lambda op, x: (lambda small: op.Mul(small, small))(op.Mul(x, 1.0 / 256.0)),
         lambda x: np.square(x / 256.0)),
        ("Cube/Pow", lambda op, x: op.Pow(x, 3.0), lambda x: x**3),
        ("Cube/Mul", lambda op, x: op.Mul(op.Mul(x, x), x), lambda x: x**3),
    ]  # fmt: skip
    found = [Form(name, build, exact, wide, spans) for name, build, exact in anywhere]
    above: list[tuple[str, Build, Exact]] = [
        ("Log", lambda op, x: op.Log(x), np.log),
        ("Sqrt", lambda op, x: op.Sqrt(x), np.sqrt),
        ("Reciprocal/native", lambda op, x: op.Reciprocal(x), np.reciprocal),
        ("Reciprocal/newton", newton_inverse, np.reciprocal),
        ("Reciprocal/pow", lambda op, x: op.Pow(x, -1.0), np.reciprocal),
        ("Rsqrt/native", lambda op, x: op.Reciprocal(op.Sqrt(x)), lambda x: x**-0.5),
        ("Rsqrt/pow", lambda op, x: op.Pow(x, -0.5), lambda x: x**-0.5),
    ]
    found += [Form(name, build, exact, positive, elementwise(A16_POSITIVE)) for name, build, exact in above]
    divide: Exact = lambda x, by: x / by
    divisions: list[tuple[str, Build]] = [
        ("Div/native", lambda op, x, by: op.Div(x, by)),
        ("Div/newton", newton),
        ("Div/pow", lambda op, x, by: op.Mul(x, op.Pow(by, -1.0))),
    ]
    found += [Form(n, b, divide, quotients(steps(POSITIVE)), quotients(A16_POSITIVE)) for n, b in divisions]
    turns: list[tuple[str, Build, Exact]] = [
        ("Sin/native", lambda op, x: op.Sin(x), np.sin),
        ("Sin/reduced", lambda op, x: op.Sin(within_turn(op, x)), np.sin),
        ("Cos/native", lambda op, x: op.Cos(x), np.cos),
        ("Cos/reduced", lambda op, x: op.Cos(within_turn(op, x)), np.cos),
    ]
    found += [Form(name, build, exact, elementwise(steps(ANGLES)), spans) for name, build, exact in turns]
    exps: list[tuple[str, Build]] = [
        ("Exp/native", lambda op, x: op.Exp(x)),
        ("Exp/clip", lambda op, x: op.Exp(op.Max(x, EXP_LOW))),
    ]
    return found + [Form(n, b, np.exp, wide, elementwise(A16_NEGATIVE)) for n, b in exps]
