"""Single questions to the compiler beyond "does it take this operator": ranks, types, constants, encodings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

from sanitize.support.cases import MICROSOFT, OPSET, Built, words

HALF = np.float32(1 / 16384)  # uint16 over [-2, 2) with zero point 32768
MIDDLE = np.uint16(32768)
INF = float("inf")

_UNARY = words("""Abs Atan Ceil Cos Elu Exp Floor Gelu HardSigmoid HardSwish Identity IsNaN LeakyRelu Log LogSoftmax Neg
Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Sqrt Tan Tanh LpNormalization""")
_BINARY = words("Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mul PRelu Pow Sub Sum Mean")
_REDUCE = words("ReduceL2 ReduceLogSumExp ReduceMax ReduceMin ReduceSum")

# Operators by rank: the body of a graph over x of that rank, dims 1, ..., 2, 3, 4, 8.
RANKED = {
    **{op: f"y = {op}(x)" for op in _UNARY}, **{op: f"y = {op}(x, x)" for op in _BINARY},
    **{op: f"y = {op}(x, last)" for op in _REDUCE}, "And": "y = And(b, b)", "Not": "y = Not(b)",
    "Clip": "y = Clip(x)", "ArgMax": "y = ArgMax<axis = -1>(x)", "CumSum": "y = CumSum(x, last0)",
    "Flatten": "y = Flatten(x)", "GatherElements": "y = GatherElements<axis = -1>(x, index)",
    "Pad": "y = Pad(x, pads)", "Squeeze": "y = Squeeze(x, zero)",
    "Unsqueeze": "s = Squeeze(x, zero) y = Unsqueeze(s, zero)",
    "GatherND": "y = GatherND(x, corner)", "ScatterND": "y = ScatterND(x, corner, x)", "Trilu": "y = Trilu(x)",
    "ScatterElements": "y = ScatterElements<axis = -1>(x, index, x)", "GlobalAveragePool": "y = GlobalAveragePool(x)",
    "TopK": "y, z = TopK(x, two)", "Einsum": 'y = Einsum<equation = "...i,ij->...j">(x, w)',
    "Add": "y = Add(x, x)", "Neg": "y = Neg(x)", "Softmax": "y = Softmax(x)", "MatMul": "y = MatMul(x, w)",
    "Concat": "y = Concat<axis = -1>(x, x)", "ReduceMean": "y = ReduceMean(x, last)",
    "Gather": "y = Gather<axis = -1>(x, one)",
    "Transpose": "y = Transpose(x)", "Slice": "y = Slice(x, zero, two, last)", "Tile": "y = Tile(x, ones)",
    "Split": "y, z = Split<axis = -1, num_outputs = 2>(x)", "Expand": "y = Expand(x, dims)",
    "Reshape": "y = Reshape(x, dims)", "LayerNormalization": "y = LayerNormalization(x, scale)",
    "RMSNormalization": "y = RMSNormalization(x, scale)", "Where": "y = Where(b, x, x)", "Cast": "y = Cast<to = 6>(x)",
}  # fmt: skip

_INT64 = {"zero": [0], "two": [2], "last": [-1], "one": [0, 1]}

# Name: graph signature and body, and constants beside those above. Inputs are filled with random data.
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "input rank 0": ("(float[1,8] x, float s) => (float[1,8] y) { y = Mul(x, s) }", {}),
    "output rank 0": ("(float[1,8] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }", {}),
    "intermediate rank 0": ("(float[1,8] x) => (float[1,8] y) { s = ReduceSum<keepdims = 0>(x) y = Mul(x, s) }", {}),
    "constant rank 0": ("(float[1,8] x) => (float[1,8] y) { y = Mul(x, s) }", {"s": np.float32(3)}),
    "Gather with an index of rank 0": (
        "(float[1,4,8] x) => (float[1,8] y) { y = Gather<axis = 1>(x, i) }", {"i": np.array(2, np.int64)},
    ),
    "Squeeze axes of rank 0": ("(float[1,4,8] x) => (float[4,8] y) { y = Squeeze(x, a) }", {"a": np.array(0)}),
    "Unsqueeze axes of rank 0": ("(float[4,8] x) => (float[1,4,8] y) { y = Unsqueeze(x, a) }", {"a": np.array(0)}),
    "ReduceMean axes of rank 0": ("(float[4,8] x) => (float[4,1] y) { y = ReduceMean(x, a) }", {"a": np.array(1)}),
    "input int64 (ids)": ("(int64[4] i) => (float[4,8] y) { y = Gather(t, i) }", {"t": np.ones((9, 8), np.float32)}),
    "input int32 (ids)": ("(int32[4] i) => (float[4,8] y) { y = Gather(t, i) }", {"t": np.ones((9, 8), np.float32)}),
    "input int64, Cast to float": ("(int64[1,8] i) => (float[1,8] y) { y = Cast<to = 1>(i) }", {}),
    "input float64": ("(double[1,8] x) => (double[1,8] y) { y = Add(x, x) }", {}),
    "intermediate float64": (
        "(float[1,8] x) => (float[1,8] y) { d = Cast<to = 11>(x) e = Neg(d) y = Cast<to = 1>(e) }", {},
    ),
    "intermediate bfloat16": (
        "(float[1,8] x) => (float[1,8] y) { d = Cast<to = 16>(x) e = Neg(d) y = Cast<to = 1>(e) }", {},
    ),
    "input bfloat16": ("(bfloat16[1,8] x) => (bfloat16[1,8] y) { y = Add(x, x) }", {}),
    "output int64": ("(float[1,8] x) => (int64[1,1] y) { y = ArgMax<axis = -1>(x) }", {}),
    "output int32": ("(float[1,8] x) => (int32[1,8] y) { y = Cast<to = 6>(x) }", {}),
    "intermediate int64": (
        "(int64[1,8] x) => (float[1,8] y) { s = Add(x, x) t = Mul(s, x) y = Cast<to = 1>(t) }", {},
    ),
    "input bool": ("(bool[1,8] b, float[1,8] x) => (float[1,8] y) { n = Neg(x) y = Where(b, x, n) }", {}),
    "output bool": ("(float[1,8] x, float[1,8] z) => (bool[1,8] y) { y = Less(x, z) }", {}),
    "intermediate bool": (
        "(float[1,8] x, float[1,8] z) => (float[1,8] y) { b = Less(x, z) y = Where(b, x, z) }", {},
    ),
    "And, Or, Not, Cast of bools": (
        "(float[1,8] x, float[1,8] z) => (float[1,8] y)"
        " { a = Less(x, z) n = Not(a) o = Or(a, n) c = And(a, o) y = Cast<to = 1>(c) }", {},
    ),
    "Less of int32 to a mask": (
        "(int32[1,8] p) => (float[1,8] y) { b = Less(p, l) y = Where(b, o, m) }",
        {"l": np.array([1], np.int32), "o": np.zeros(1, np.float32), "m": np.full(1, -1e4, np.float32)},
    ),
    "Less of int64 to a mask": (
        "(int64[1,8] p) => (float[1,8] y) { b = Less(p, l) y = Where(b, o, m) }",
        {"l": np.array([1]), "o": np.zeros(1, np.float32), "m": np.full(1, -1e4, np.float32)},
    ),
    "dynamic batch": ("(float[N,8] x) => (float[N,8] y) { y = Add(x, x) }", {}),
    "dynamic shape inside (NonZero)": ("(float[1,8] x) => (int64[2,N] y) { y = NonZero(x) }", {}),
    "IsNaN guard": (
        "(float[4,8] x) => (float[4,8] y) { s = Softmax(x) n = IsNaN(s) y = Where(n, z, s) }",
        {"z": np.zeros(1, np.float32)},
    ),
    "Reshape allowzero=1, no zero in the shape": (
        "(float[4,8] x) => (float[8,4] y) { y = Reshape<allowzero = 1>(x, d) }", {"d": np.array([8, 4])},
    ),
    "Reshape with 0 in the shape": (
        "(float[4,8] x) => (float[4,2,4] y) { y = Reshape(x, d) }", {"d": np.array([0, 2, 4])},
    ),
    "Reshape allowzero=1, an empty tensor": (
        "(float[0,8] x) => (float[0,4] y) { y = Reshape<allowzero = 1>(x, d) }", {"d": np.array([0, 4])},
    ),
    "-inf mask added, a finite row": (
        "(float[2,4] x) => (float[2,4] y) { s = Add(x, m) y = Softmax(s) }",
        {"m": np.array([[0, 0, -INF, -INF], [0, -INF, 0, 0]], np.float32)},
    ),
    "-inf mask chosen by Where": (
        "(bool[2,4] b, float[2,4] x) => (float[2,4] y) { s = Where(b, x, m) e = Exp(s) y = Add(e, e) }",
        {"m": np.full(1, -INF, np.float32)},
    ),
    "-inf mask, a masked row": (
        "(float[2,4] x) => (float[2,4] y) { s = Add(x, m) y = Softmax(s) }",
        {"m": np.array([[0, 0, -INF, -INF], [-INF] * 4], np.float32)},
    ),
    "-inf in Max": ("(float[2,4] x) => (float[2,4] y) { y = Max(x, m) }", {"m": np.full(1, -INF, np.float32)}),
    "-inf in Clip": ("(float[2,4] x) => (float[2,4] y) { y = Clip(x, m) }", {"m": np.float32(-INF)}),
    "inf as Pad value": (
        "(float[2,4] x) => (float[2,6] y) { p = Pad(x, w, m) y = Clip(p, l) }",
        {"w": np.array([0, 1, 0, 1]), "m": np.float32(-INF), "l": np.float32(-3)},
    ),
    "-3.4e38 mask": (
        "(float[2,4] x) => (float[2,4] y) { s = Add(x, m) y = Softmax(s) }",
        {"m": np.array([[0, 0, -3.4e38, -3.4e38], [0, -3.4e38, 0, 0]], np.float32)},
    ),
    "-3.4e38 mask, a masked row": (
        "(float[2,4] x) => (float[2,4] y) { s = Add(x, m) y = Softmax(s) }",
        {"m": np.array([[0, 0, -3.4e38, -3.4e38], [-3.4e38] * 4], np.float32)},
    ),
    "-10000 mask, a masked row": (
        "(float[2,4] x) => (float[2,4] y) { s = Add(x, m) y = Softmax(s) }",
        {"m": np.array([[0, 0, -1e4, -1e4], [-1e4] * 4], np.float32)},
    ),
    "an input returned as an output": (
        "(float[1,8] x) => (float[1,8] y, float[1,8] z) { y = Neg(x) z = Identity(x) }", {},
    ),
    "Trilu of a constant": (
        "(float[4,4] x) => (float[4,4] y) { t = Trilu(c) y = Add(x, t) }", {"c": np.ones((4, 4), np.float32)},
    ),
    "Shape, Gather, Concat, Reshape of a static tensor": (
        "(float[4,8] x) => (float[32] y) { s = Shape(x) p = ReduceProd<keepdims = 1>(s) y = Reshape(x, p) }", {},
    ),
    "Range of constants": (
        "(float[4] x) => (float[4] y) { r = Range(a, b, c) y = Add(x, r) }",
        {"a": np.float32(0), "b": np.float32(4), "c": np.float32(1)},
    ),
    "If, branches of several nodes": (
        "(bool c, float[2,8] x) => (float[2,8] y) { y = If(c) <then_branch = a () => (float[2,8] t)"
        " { p = Neg(x) t = Abs(p) }, else_branch = b () => (float[2,8] e) { q = Exp(x) e = Mul(q, q) }> }", {},
    ),
    "If, a weight of the outer graph in a branch": (
        "(bool c, float[2,8] x) => (float[2,8] y) { y = If(c) <then_branch = a () => (float[2,8] t)"
        " { t = MatMul(x, w) }, else_branch = b () => (float[2,8] e) { e = Neg(x) }> }",
        {"w": np.eye(8, dtype=np.float32)},
    ),
    "If, a constant in a branch": (
        "(bool c, float[2,8] x) => (float[2,8] y) { y = If(c) <then_branch = a () => (float[2,8] t)"
        " { k = Constant<value = float[1] {2.0}>() t = Mul(x, k) }, else_branch = b () => (float[2,8] e)"
        " { e = Neg(x) }> }", {},
    ),
    "If, an operator that the NPU lacks in a branch": (
        "(bool c, float[2,8] x) => (float[2,8] y) { y = If(c) <then_branch = a () => (float[2,8] t)"
        " { t = Acosh(x) }, else_branch = b () => (float[2,8] e) { e = Neg(x) }> }", {},
    ),
    "If on a constant": (
        "(float[2,8] x) => (float[2,8] y) { y = If(k) <then_branch = a () => (float[2,8] t)"
        " { t = Exp(x) }, else_branch = b () => (float[2,8] e) { e = Neg(x) }> }", {"k": np.array(True)},
    ),
    "RMSNormalization with Mul before Add": (
        "(float[1,4,8] x) => (float[1,4,8] y) { n = RMSNormalization(x, s) y = Add(n, x) }",
        {"s": np.ones(8, np.float32)},
    ),
}  # fmt: skip

for _type in ("float", "float16"):
    for _rows, _size in ((8, 64), (9, 64), (12, 64), (13, 64), (16, 64), (16, 32)):
        _shape = f"{_type}[1,{_rows},2,{_size}]"
        for _op in ("RMSNormalization", "LayerNormalization"):
            TEXTS[f"{_op}, {_type}, third dim from the end {_rows}, last {_size}"] = (
                f"({_shape} x) => ({_shape} y) {{ y = {_op}(x, s) }}",
                {"s": np.ones(_size, np.float16 if _type == "float16" else np.float32)},
            )

_DQ = "f = DequantizeLinear(x, sx, zx)"
_Q = "y = QuantizeLinear(g, sy, zy)"
_ENCODINGS = {"sx": HALF, "zx": MIDDLE, "sy": HALF, "zy": MIDDLE}


def _quantised(body: str, shape: str = "2,4,8", out: str = "", **constants: Any) -> tuple[str, dict[str, Any]]:
    """x uint16 -> dequantised f -> body -> g -> quantised y."""
    text = f"(uint16[{shape}] x) => (uint16[{out or shape}] y) {{ {_DQ} {body} {_Q} }}"
    return text, {**_ENCODINGS, **constants}


def _encoding(op: str, scale: float, zero: int) -> tuple[str, dict[str, Any]]:
    return _quantised(f"g = {op}(f)", sy=np.float32(scale), zy=np.uint16(zero), zx=np.uint16(0))


_I4 = np.random.default_rng(2).integers(-7, 8, (32, 16))
TEXTS |= {
    "16x16 MatMul of two activations": _quantised("t = Transpose<perm = [0, 2, 1]>(f) g = MatMul(f, t)", out="2,4,4"),
    "16x16 MatMul, weights uint16": _quantised(
        "w = DequantizeLinear(q, sx, zx) g = MatMul(f, w)", q=np.full((8, 8), 40000, np.uint16)),
    "16x8 MatMul, weights int8": _quantised(
        "w = DequantizeLinear(q, s) g = MatMul(f, w)", q=np.full((8, 8), 9, np.int8), s=np.float32(0.01)),
    "16x8 MatMul, weights int8 per channel": _quantised(
        "w = DequantizeLinear<axis = 1>(q, s) g = MatMul(f, w)", q=np.full((8, 8), 9, np.int8),
        s=np.full(8, 0.01, np.float32)),
    "16x4 MatMul, weights int4 per channel": _quantised(
        "w = DequantizeLinear<axis = 1>(q, s, z) g = MatMul(f, w)", "2,4,32", "2,4,16", q=("int4", _I4),
        s=np.full(16, 0.01, np.float32), z=("int4", np.zeros(16))),
    "16x4 MatMul, weights int4 per channel, no zero point": _quantised(
        "w = DequantizeLinear<axis = 1>(q, s) g = MatMul(f, w)", "2,4,32", "2,4,16", q=("int4", _I4),
        s=np.full(16, 0.01, np.float32)),
    "16x4 MatMul, weights int4 of one scale, no zero point": _quantised(
        "w = DequantizeLinear(q, s) g = MatMul(f, w)", "2,4,32", "2,4,16", q=("int4", _I4), s=np.float32(0.01)),
    "16x4 MatMul, weights uint4 per channel": _quantised(
        "w = DequantizeLinear<axis = 1>(q, s, z) g = MatMul(f, w)", "2,4,32", "2,4,16", q=("uint4", _I4 + 8),
        s=np.full(16, 0.01, np.float32), z=("uint4", np.full(16, 8))),
    "16x2 MatMul, weights int2 per channel": (
        f"(uint16[2,4,32] x) => (uint16[2,4,16] y) {{ {_DQ} w = DequantizeLinear<axis = 1>(q, s, z)"
        f" g = MatMul(f, w) {_Q} }}",
        {**_ENCODINGS, "q": ("int2", _I4 % 3 - 1), "s": np.full(16, 0.1, np.float32), "z": ("int2", np.zeros(16))}),
    "int4 Gather of quantised rows": (
        "(int32[4] i) => (float[4,16] y) { g = Gather(q, i) y = DequantizeLinear(g, s) }",
        {"q": _I4.astype(np.int8), "s": np.float32(0.01)}),
    "blocked DequantizeLinear, int4, activations uint16": _quantised(
        "w = DequantizeLinear<axis = 0, block_size = 16>(q, s) g = MatMul(f, w)", "2,4,32", "2,4,16",
        q=("int4", _I4), s=np.full((2, 16), 0.01, np.float32)),
    "blocked DequantizeLinear, int4, activations float": (
        "(float[2,32] x) => (float[2,16] y) { w = DequantizeLinear<axis = 0, block_size = 16>(q, s) y = MatMul(x, w) }",
        {"q": ("int4", _I4), "s": np.full((2, 16), 0.01, np.float32)}),
    "blocked DequantizeLinear, int8, activations uint16": _quantised(
        "w = DequantizeLinear<axis = 0, block_size = 16>(q, s) g = MatMul(f, w)", "2,4,32", "2,4,16",
        q=_I4.astype(np.int8), s=np.full((2, 16), 0.01, np.float32)),
    "DequantizeLinear per channel, int8, activations float": (
        "(float[2,32] x) => (float[2,16] y) { w = DequantizeLinear<axis = 1>(q, s) y = MatMul(x, w) }",
        {"q": _I4.astype(np.int8), "s": np.full(16, 0.01, np.float32)}),
    "a float MatMul between quantised ones": _quantised(
        "w = DequantizeLinear(q, s) a = MatMul(f, w) b = QuantizeLinear(a, sx, zx) c = DequantizeLinear(b, sx, zx)"
        " g = MatMul(c, v)", q=np.full((8, 8), 9, np.int8), s=np.float32(0.01), v=np.eye(8, dtype=np.float32)),
    "float input and output around quantised nodes": (
        "(float[4,8] x) => (float[4,8] y) { a = QuantizeLinear(x, sx, zx) f = DequantizeLinear(a, sx, zx)"
        " g = Mul(f, f) b = QuantizeLinear(g, sx, zx) y = DequantizeLinear(b, sx, zx) }",
        {"sx": HALF, "zx": MIDDLE}),
    "QuantizeLinear alone": (
        "(float[4,8] x) => (uint16[4,8] y) { y = QuantizeLinear(x, sx, zx) }", {"sx": HALF, "zx": MIDDLE}),
    "16x16 LayerNormalization": _quantised(
        "w = DequantizeLinear(q, sx, zx) g = LayerNormalization(f, w)", q=np.full(8, 40000, np.uint16)),
    "16x8 LayerNormalization": _quantised(
        "w = DequantizeLinear(q, s, z) g = LayerNormalization(f, w)", q=np.full(8, 200, np.uint8),
        s=np.float32(0.01), z=np.uint8(0)),
    "16x16 RMSNormalization": _quantised(
        "w = DequantizeLinear(q, sx, zx) g = RMSNormalization(f, w)", q=np.full(8, 40000, np.uint16)),
    "16x8 RMSNormalization": _quantised(
        "w = DequantizeLinear(q, s, z) g = RMSNormalization(f, w)", q=np.full(8, 200, np.uint8),
        s=np.float32(0.01), z=np.uint8(0)),
    "RMSNormalization of quantised data with float weights": _quantised(
        "g = RMSNormalization(f, w)", w=np.ones(8, np.float32)),
    "16x16 Mul": _quantised("g = Mul(f, f)"), "16 bit Add": _quantised("g = Add(f, f)"),
    "16 bit Concat of two encodings": _quantised(
        "n = Tanh(f) q = QuantizeLinear(n, s, zx) d = DequantizeLinear(q, s, zx) g = Concat<axis = 1>(f, d)",
        out="2,8,8", s=np.float32(1 / 32768)),
    "16 bit Reshape that changes its encoding": _quantised(
        "g = Reshape(f, d)", out="2,32", d=np.array([2, 32]), sy=np.float32(1 / 8192)),
    "16 bit Sigmoid, output scale 1/65536, zero 0": _encoding("Sigmoid", 1 / 65536, 0),
    "16 bit Sigmoid, output range 0 to 0.75": _encoding("Sigmoid", 0.75 / 65535, 0),
    "16 bit Sigmoid, output range -2 to 2": _encoding("Sigmoid", 1 / 16384, 32768),
    "16 bit HardSigmoid, output range 0 to 0.75": _encoding("HardSigmoid", 0.75 / 65535, 0),
    "16 bit Tanh, output scale 1/32768, zero 32768": _encoding("Tanh", 1 / 32768, 32768),
    "16 bit Tanh, output range -0.8 to 0.8": _encoding("Tanh", 1.6 / 65535, 32768),
    "16 bit Sigmoid in int16, output scale 1/32768": (
        "(int16[2,64] x) => (int16[2,64] y)"
        " { f = DequantizeLinear(x, sx, z) g = Sigmoid(f) y = QuantizeLinear(g, s, z) }",
        {"sx": HALF, "z": np.int16(0), "s": np.float32(1 / 32768)}),
    "16 bit Softmax, output range 0 to 0.6": _encoding("Softmax", 0.6 / 65535, 0),
    "16 bit Log, output scale 1/8192": _encoding("Log", 1 / 8192, 32768),
    "16 bit Log, output scale 1/16384": _encoding("Log", 1 / 16384, 32768),
}  # fmt: skip


def all_probes() -> Iterator[tuple[str, Built]]:
    """Name and model of every probe."""
    for name, (text, constants) in TEXTS.items():
        yield name, build(text, constants)
    yield (
        "Conv of rank 5 (three spatial dims)",
        build(
            "(float[1,4,6,6,6] x) => (float[1,4,4,4,4] y) { y = Conv(x, k) }",
            {"k": np.ones((4, 4, 3, 3, 3), np.float32)},
        ),
    )
    for opset in range(OPSET, onnx.defs.onnx_opset_version() + 1):
        yield f"opset {opset}", build("(float[1,8] x) => (float[1,8] y) { a = Abs(x) y = Add(a, x) }", {}, opset)


def ranked(body: str, rank: int) -> Built:
    """A body of RANKED over a tensor of that rank."""
    dims = [1] * (rank - 4) + [2, 3, 4, 8]
    shape = ",".join(map(str, dims))
    named = {
        "scale": np.ones(8, np.float32), "ones": np.ones(rank, np.int64),
        "dims": np.array(dims), "last0": np.array(-1, np.int64), "index": np.zeros(dims, np.int64),
        "corner": np.zeros((*dims[:1], 1), np.int64),
        "pads": np.array([0] * (2 * rank - 1) + [1]),
    }  # fmt: skip
    named = {name: value for name, value in named.items() if f" {name}" in body or f"({name}" in body}
    if " w)" in body:
        named["w"] = np.eye(8, dtype=np.float32)
    condition = f"bool[{shape}] b" if "b" in body.split("(")[1] else ""
    data = f"float[{shape}] x" if "x" in body.split("(", 1)[1] else ""
    inputs = ", ".join(filter(None, (condition, data)))
    return build(f"({inputs}) => (y) {{ {body} }}", named)


def build(text: str, constants: dict[str, Any], opset: int = 0) -> Built:
    """A probe's model and random inputs: floats in (-1, 1), integers 0 or 1, uint16 anywhere."""
    int2 = any(isinstance(value, tuple) and value[0] == "int2" for value in constants.values())
    opset = opset or (25 if int2 else 23 if "RMSNormalization" in text else OPSET)
    head = f'<ir_version: 10, opset_import: ["": {opset}, "{MICROSOFT}": 1]> probe '
    model = onnx.parser.parse_model(head + text)
    used = {name for node in model.graph.node for name in node.input} | set(constants)
    for name, value in {**{k: np.array(v) for k, v in _INT64.items()}, **constants}.items():
        if name not in used:
            continue
        if isinstance(value, tuple):
            array = value[1].astype(np.int8)
            kind = onnx.TensorProto.DataType.Value(value[0].upper())
            model.graph.initializer.append(helper.make_tensor(name, kind, array.shape, array.flatten().tolist()))
        else:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    random, feeds = np.random.default_rng(3), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        dims = [dim.dim_value or (0 if dim.HasField("dim_value") else 2) for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "f":
            feeds[value.name] = np.asarray(random.uniform(-1, 1, dims), dtype)
        else:
            high = 50000 if dtype == np.uint16 else 2
            feeds[value.name] = np.asarray(random.integers(10000 if high > 2 else 0, high, dims), dtype)
    return Built(model, feeds)


def rank_models() -> Iterator[tuple[str, int, Built]]:
    """Operator, rank and fp32 model of the operators that take a tensor of any rank."""
    for op, body in RANKED.items():
        for rank in (5, 6):
            yield op, rank, ranked(body, rank)


def verdict(result: dict[str, Any]) -> str:
    """What became of a probe: "refused", "crash", "fails when run", "wrong (SNR in dB)" or "taken"."""
    if "refused" in result:
        return "crash" if result["refused"].startswith("crash") else "refused"
    if "run" in result:
        return "fails when run"
    return f"wrong ({result['db']} dB)" if result["db"] is not None and result["db"] < 20 else "taken"
