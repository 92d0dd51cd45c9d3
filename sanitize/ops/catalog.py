"""Every form that `ringstep ops` measures: the elementwise ones, and here reductions, norms and products."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from sanitize.ops.elementwise import elementwise_forms, newton_inverse, written
from sanitize.ops.forms import (
    LAST,
    SPREADS,
    Array,
    Build,
    Case,
    Exact,
    Form,
    Ops,
    log_softmax,
    products,
    rows,
    softmax,
    weights,
)
from sanitize.passes import forms
from sanitize.passes.forms import EXP_LOW

NORM_SPREADS = (1.0, 8.0, 40.0, 200.0, 1000.0, 10000.0)
NORM_A16_SPREADS = (1.0, 8.0, 40.0)
WIDTHS = (64, 129, 512, 2048)  # at 129 a kernel has one value left over


def exp_shifted(op: Ops, x: str) -> str:
    """exp(x - max)."""
    return op.Exp(op.Max(op.Sub(x, op.ReduceMax(x, LAST)), EXP_LOW))


def softmax_by(last: Callable[[Ops, str, str], str]) -> Build:
    """last(op, weights, their sum)."""

    def build(op: Ops, x: str) -> str:
        e = exp_shifted(op, x)
        return last(op, e, op.ReduceSum(e, LAST))

    return build


def softmax_again(op: Ops, x: str) -> str:
    """Softmax, then divided by its own sum."""
    p = op.Softmax(x)
    return op.Div(p, op.ReduceSum(p, LAST))


def mean_square(op: Ops, x: str, eps: float) -> str:
    """mean(x^2) + eps."""
    return op.Add(op.ReduceMean(op.Mul(x, x), LAST), eps)


def rms_scaled(op: Ops, x: str) -> str:
    """The decomposed norm of x / 256, so that 16000 squared fits; eps / 65536 would be 0 in fp16."""
    small = op.Mul(x, 1.0 / 256.0)
    return op.Mul(small, op.Pow(mean_square(op, small, 2.0**-24), -0.5))


def layer_norm_parts(op: Ops, x: str, last: Callable[[str, str], str]) -> str:
    """last(x - mean, its mean square)."""
    centred = op.Sub(x, op.ReduceMean(x, LAST))
    return last(centred, mean_square(op, centred, 1e-5))


def reduction_forms() -> list[Form]:
    """Forms over the last dim."""
    scores, a16_scores = rows(WIDTHS, SPREADS, masked=True), rows(WIDTHS, SPREADS)
    plain, a16_plain = rows((64, 2048), (1.0, 8.0, 40.0, 1000.0)), rows((64, 2048), NORM_A16_SPREADS)
    norms, a16_norms = rows((128, 2048), NORM_SPREADS), rows((128, 2048), NORM_A16_SPREADS)
    eps = 1e-5
    rms: Exact = lambda x: x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    layer: Exact = lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    ones: Callable[[Ops], Array] = lambda op: np.ones(op.size)
    groups: list[tuple[Iterable[Case], Iterable[Case], list[tuple[str, Build, Exact]]]] = [
        (scores, a16_scores, [
            ("Softmax/native", lambda op, x: op.Softmax(x), softmax),
            ("Softmax/renormalised", softmax_again, softmax),
            ("Softmax/explicit", softmax_by(lambda op, e, total: op.Div(e, total)), softmax),
            ("Softmax/newton", softmax_by(lambda op, e, total: op.Mul(e, newton_inverse(op, total))), softmax),
            ("Softmax/pow", written(lambda write, x: forms.softmax(write, x, -1)), softmax),
            ("LogSoftmax/native", lambda op, x: op.LogSoftmax(x), log_softmax),
            ("LogSoftmax/explicit", written(lambda write, x: forms.log_softmax(write, x, -1)), log_softmax),
            ("LogSoftmax/log", lambda op, x: op.Log(op.Softmax(x)), log_softmax),
        ]),
        (plain, a16_plain, [
            ("ReduceMean", lambda op, x: op.ReduceMean(x, LAST), lambda x: x.mean(-1, keepdims=True)),
            ("ReduceSum", lambda op, x: op.ReduceSum(x, LAST), lambda x: x.sum(-1, keepdims=True)),
            ("ReduceMax", lambda op, x: op.ReduceMax(x, LAST), lambda x: x.max(-1, keepdims=True)),
        ]),
        (norms, a16_norms, [
            ("RMSNorm/native", lambda op, x: op.RMSNormalization(x, ones(op), epsilon=eps), rms),
            ("RMSNorm/sqrt", lambda op, x: op.Div(x, op.Sqrt(mean_square(op, x, eps))), rms),
            ("RMSNorm/reciprocal", lambda op, x: op.Mul(x, op.Reciprocal(op.Sqrt(mean_square(op, x, eps)))), rms),
            ("RMSNorm/pow", lambda op, x: op.Mul(x, op.Pow(mean_square(op, x, eps), -0.5)), rms),
            ("RMSNorm/scaled", rms_scaled, rms),
            ("RMSNorm/LpNormalization", lambda op, x: op.Mul(op.LpNormalization(x, axis=-1, p=2), op.size**0.5), rms),
            ("LayerNorm/native",
             lambda op, x: op.LayerNormalization(x, ones(op), 0.0 * ones(op), epsilon=eps), layer),
            ("LayerNorm/sqrt", lambda op, x: layer_norm_parts(
                op, x, lambda c, square: op.Div(c, op.Sqrt(square))), layer),
            ("LayerNorm/pow", lambda op, x: layer_norm_parts(
                op, x, lambda c, square: op.Mul(c, op.Pow(square, -0.5))), layer),
        ]),
    ]  # fmt: skip
    return [Form(n, b, e, tuple(own), tuple(a16)) for own, a16, forms in groups for n, b, e in forms]


def linear_forms() -> list[Form]:
    """Products. Weights are multiples of 1/128, the same in fp16 and in 8 bits."""
    lengths = (64, 256, 1024, 4096)
    inner, a16_inner = rows(lengths, (4.0, 40.0)), rows(lengths, (4.0, 40.0))
    pairs = products(lengths, (4.0, 40.0))
    matrix: Exact = lambda x: x @ weights(x.shape[-1], 64)
    image, deep = products((64, 1024), (4.0, 40.0), image=True), products((64,), (4.0, 40.0), image=True)
    pixel: Exact = lambda x: np.einsum("nchw,co->nohw", x, weights(x.shape[1], 64))

    def depthwise(x: Array) -> Array:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        return np.asarray(np.einsum("nchwij,cij->nchw", windows, weights(64, 9).reshape(64, 3, 3)))

    return [
        Form("MatMul", lambda op, x: op.MatMul(x, weights(op.size, 64)), matrix, inner, a16_inner),
        Form("Gemm", lambda op, x: op.Gemm(x, weights(op.size, 64).T, transB=1), matrix, inner, a16_inner),
        Form("MatMul/dynamic", lambda op, x, y: op.MatMul(x, y), np.matmul, pairs, pairs),
        Form("MatMul/dynamic-int16", lambda op, x, y: op.MatMul(x, y), np.matmul, (), pairs, signed=(1,)),
        Form("Conv/1x1", lambda op, x: op.Conv(x, weights(op.size, 64).T[:, :, None, None]), pixel, image, image),
        Form("Conv/depthwise", lambda op, x: op.Conv(x, weights(64, 9).reshape(64, 1, 3, 3), group=64, pads=[1] * 4),
             depthwise, deep, deep),
    ]  # fmt: skip


def all_forms() -> tuple[Form, ...]:
    """Every form, elementwise ones first."""
    return (*elementwise_forms(), *reduction_forms(), *linear_forms())
