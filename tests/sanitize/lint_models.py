"""For every rule of the lint a small model that breaks it and one that looks alike and does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sanitize.support.probes import build

Text = tuple[str, dict[str, Any]]
F32 = np.float32
SCALES: dict[str, Any] = {"s": F32(1 / 16384), "z": np.uint16(32768)}
EYE = np.eye(8, dtype=F32)
DQ, Q = "f = DequantizeLinear(x, s, z)", "y = QuantizeLinear(g, s, z)"

GELU = "(float[1,8] x) => (float[1,8] y) { a = Div(x, r) b = Erf(a) c = Add(b, o) d = Mul(x, c) y = Mul(d, h) }"


@dataclass(frozen=True)
class Pair:
    """A model that breaks a rule, one that does not, and the target they are linted for."""

    bad: Text
    good: Text
    target: str = "qnn-htp"
    chip: str | None = "sm8650"
    precision: str | None = None


def quantised(body: str, **constants: Any) -> Text:
    """x uint16 -> dequantised f -> body -> g -> quantised y, 8 columns."""
    return f"(uint16[4,8] x) => (uint16[4,8] y) {{ {DQ} {body} {Q} }}", {**SCALES, **constants}


def sigmoid(scale: float, zero: int) -> Text:
    text, constants = quantised("g = Sigmoid(f)")
    return text.replace(Q, "y = QuantizeLinear(g, t, u)"), {**constants, "t": F32(scale), "u": np.uint16(zero)}


def int4(zero: bool) -> Text:
    more = {"k": ("int4", np.zeros(8))} if zero else {}
    return quantised(
        f"w = DequantizeLinear<axis = 1>(q, c{', k' if zero else ''}) g = MatMul(f, w)",
        q=("int4", np.arange(64).reshape(8, 8) % 15 - 7), c=np.full(8, 0.1, F32), **more,
    )  # fmt: skip


def cached(past: str, out: str, body: str = "", kind: str = "float") -> Text:
    text = (
        f"(float[1,2,1,8] x, float[1,2,{past},8] past_key_values__0__key) =>"
        f" (float[1,2,1,8] y, {kind}[{out}] present__0__key) {{ y = Neg(x) {body} }}"
    )
    return text, {"one": np.array([1]), "end": np.array([1 << 30]), "two": np.array([2])}


def quantised_cache(scale: float) -> Text:
    text = (
        "(uint16[1,2,4,8] past_key_0) => (uint16[1,2,4,8] present_key_0)"
        " { f = DequantizeLinear(past_key_0, s, z) g = Neg(f) present_key_0 = QuantizeLinear(g, t, z) }"
    )
    return text, {**SCALES, "t": F32(scale)}


def head(quantise: bool) -> Text:
    second = "v = DequantizeLinear(p, t) logits = MatMul(d, v)" if quantise else "logits = MatMul(d, p)"
    matrix = np.ones((8, 8192), np.int8 if quantise else F32)
    return (
        f"(uint16[1,8] x) => (float[1,8192] logits) {{ {DQ} w = DequantizeLinear(q, t) g = MatMul(f, w) {Q}"
        f" d = DequantizeLinear(y, s, z) {second} }}",
        {**SCALES, "q": np.ones((8, 8), np.int8), "t": F32(0.01), "p": matrix},
    )


def unary(op: str, shape: str = "1,8", kind: str = "float", more: str = "", **constants: Any) -> Text:
    return f"({kind}[{shape}] x) => ({kind}[{shape}] y) {{ y = {op}(x{more}) }}", constants


_NORM = {"w": np.ones(64, F32)}
_RANDOM = np.random.default_rng(0).normal(size=(8, 512)).astype(F32)
_BRANCH = "(bool c, float[2,8] x) => (float[2,8] y) {{ y = If(c) <then_branch = a () => (float[2,8] t) {{ {} }}," \
          " else_branch = b () => (float[2,8] e) {{ e = Neg(x) }}> }}"  # fmt: skip
_BLOCKS = {"q": np.ones((32, 8), np.int8), "c": np.ones((2, 8), F32), "k": np.zeros((2, 8), np.int8)}
_TWICE = "(float[1,8] x) => (float[1,512] y, float[1,512] z) { y = MatMul(x, a) z = MatMul(x, b) }"

PAIRS: dict[str, Pair] = {
    "unsupported-operator": Pair(unary("Acosh"), unary("Tanh")),
    "wrong-operator": Pair(
        ("(int32[1,8,16] x, int64[1,1,2] i) => (int32[1,1,16] y) { y = GatherND(x, i) }", {}),
        ("(float[1,8,16] x, int64[1,1,2] i) => (float[1,1,16] y) { y = GatherND(x, i) }", {}),
    ),
    "missing-kernel": Pair(
        ("(float[1,8] x) => (float[1,8] y) { y = com.nowhere.Fancy(x) }", {}), unary("Acosh"), "ort-mobile", None,
    ),
    "beside-xnnpack": Pair(
        ("(float[2,4,8] x) => (float[2,4,8] y) { y = MatMul(x, w) }", {"w": EYE}),
        ("(float[4,8] x) => (float[4,8] y) { y = MatMul(x, w) }", {"w": EYE}), "xnnpack", None,
    ),
    "if-branches": Pair(
        (_BRANCH.format("t = MatMul(x, w)"), {"w": EYE}),
        (_BRANCH.format("k = Constant<value = float[1] {2.0}>() t = Mul(x, k)"), {}),
    ),
    "norm-rows": Pair(
        ("(float[1,9,2,64] x) => (float[1,9,2,64] y) { y = RMSNormalization(x, w) }", _NORM),
        ("(float[1,8,9,64] x) => (float[1,8,9,64] y) { y = RMSNormalization(x, w) }", _NORM),
    ),
    "output-encoding": Pair(sigmoid(0.75 / 65535, 0), sigmoid(1 / 65535, 0)),
    "nan-guard": Pair(
        ("(float[4,8] x) => (float[4,8] y) { s = Softmax(x) n = IsNaN(s) y = Where(n, o, s) }", {"o": F32([0])}),
        ("(float[4,8] x) => (float[4,8] y) { s = Softmax(x) n = Less(s, o) y = Where(n, o, s) }", {"o": F32([0])}),
    ),
    "rank": Pair(unary("Neg", "1,2,3,4,8"), unary("Abs", "1,2,3,4,8")),
    "dynamic-shape": Pair(unary("Abs", "N,8"), unary("Abs", "4,8")),
    "empty-tensor": Pair(unary("Abs", "0,8"), unary("Abs", "1,8")),
    "rank-0": Pair(
        ("(float[1,8] x) => (float[1,8] y) { s = ReduceSum<keepdims = 0>(x) y = Mul(x, s) }", {}),
        ("(float[1,8] x) => (float[1,8] y) { s = ReduceSum<keepdims = 1>(x) y = Mul(x, s) }", {}),
    ),
    "rank-0-axes": Pair(
        ("(float[1,8] x) => (float[8] y) { y = Squeeze(x, a) }", {"a": np.array(0)}),
        ("(float[1,8] x) => (float[8] y) { y = Squeeze(x, a) }", {"a": np.array([0])}),
    ),
    "allowzero": Pair(
        ("(float[4,8] x) => (float[8,4] y) { y = Reshape<allowzero = 1>(x, d) }", {"d": np.array([8, 4])}),
        ("(float[4,8] x) => (float[8,4] y) { y = Reshape<allowzero = 0>(x, d) }", {"d": np.array([8, 4])}),
    ),
    "wide-io": Pair(
        ("(int64[4] i) => (float[4,8] y) { y = Gather(t, i) }", {"t": EYE}),
        ("(int32[4] i) => (float[4,8] y) { y = Gather(t, i) }", {"t": EYE}),
    ),
    "float64": Pair(unary("Abs", kind="double"), unary("Abs")),
    "bfloat16": Pair(unary("Abs", kind="bfloat16"), unary("Abs")),
    "floats": Pair(
        ("(uint16[4,8] x) => (float[4,8] y) { f = DequantizeLinear(x, s, z) y = Neg(f) }", SCALES),
        quantised("g = Neg(f)"), chip="qcs6490",
    ),
    "16x16": Pair(
        quantised("w = DequantizeLinear(q, s, z) g = MatMul(f, w)", q=np.full((8, 8), 40000, np.uint16)),
        quantised("w = DequantizeLinear(q, t) g = MatMul(f, w)", q=np.ones((8, 8), np.int8), t=F32(0.1)), chip="sm8450",
    ),
    "infinity": Pair(
        ("(float[2,4] x) => (float[2,4] y) { s = Add(x, m) y = Softmax(s) }", {"m": F32([[0] * 4, [-np.inf] * 4])}),
        ("(float[2,4] x) => (float[2,4] y) { s = Add(x, m) y = Softmax(s) }", {"m": F32([0, 0, -1e4, 0])}),
    ),
    "blocked-weights": Pair(
        ("(float[1,32] x) => (float[1,8] y)"
         " { w = DequantizeLinear<axis = 0, block_size = 16>(q, c) y = MatMul(x, w) }", _BLOCKS),
        ("(float[1,32] x) => (float[1,8] y) { p = QuantizeLinear<axis = 0, block_size = 16>(f, c, k)"
         " w = DequantizeLinear<axis = 0, block_size = 16>(p, c, k) y = MatMul(x, w) }",
         {**_BLOCKS, "f": np.ones((32, 8), F32)}),
    ),
    "int4-zero-point": Pair(int4(zero=False), int4(zero=True)),
    "inline-weights": Pair(unary("MatMul", "8,8", more=", w", w=EYE), unary("Abs", "8,8")),
    "duplicate-weights": Pair(
        (_TWICE, {"a": _RANDOM, "b": _RANDOM.copy()}), (_TWICE, {"a": _RANDOM, "b": _RANDOM + 1}),
    ),
    "float-weights": Pair(head(quantise=False), head(quantise=True)),
    "cache-shape": Pair(
        cached("4", "1,2,8,4", "present__0__key = Transpose<perm = [0, 1, 3, 2]>(past_key_values__0__key)"),
        cached("4", "1,2,4,8", "b = Concat<axis = 2>(past_key_values__0__key, x)"
               " present__0__key = Slice(b, one, end, two)"),
    ),
    "cache-type": Pair(
        cached("4", "1,2,4,8", "present__0__key = Cast<to = 10>(past_key_values__0__key)", "float16"),
        cached("4", "1,2,4,8", "present__0__key = Neg(past_key_values__0__key)"),
    ),
    "cache-encoding": Pair(quantised_cache(1 / 8192), quantised_cache(1 / 16384)),
    "inaccurate-operator": Pair(
        ("(float[1,8] x) => (float[1,8] y) { c = Clip(x, l, h) y = Sigmoid(c) }", {"l": F32(-8), "h": F32(-4)}),
        ("(float[1,8] x) => (float[1,8] y) { c = Clip(x, l, h) y = Sigmoid(c) }", {"l": F32(2), "h": F32(8)}),
    ),
    "cache-unpaired": Pair(
        ("(float[2,8] past_key_0, float[2,8] past_value_0) => (float[2,8] present_key_0, float[2,8] y)"
         " { present_key_0 = Neg(past_key_0) y = Neg(past_value_0) }", {}),
        ("(float[2,8] past_key_0, float[2,8] past_value_0) => (float[2,8] present_key_0, float[2,8] present_value_0)"
         " { present_key_0 = Neg(past_key_0) present_value_0 = Neg(past_value_0) }", {}),
    ),
}  # fmt: skip
"""The rules on files too large to be written here (graph-memory) have tests of their own."""


def save(text: Text, folder: Path, name: str = "model") -> Path:
    """Write a model of the notation of sanitize.support.probes; "__" in a name stands for a dot."""
    model = build(*text).model
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("__", ".")
    for node in model.graph.node:
        node.input[:] = [text.replace("__", ".") for text in node.input]
        node.output[:] = [text.replace("__", ".") for text in node.output]
    path = folder / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    return path
