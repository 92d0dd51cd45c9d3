"""One minimal model an operator, for the survey of what a target takes: every input is data, so nothing folds.

An input is written KIND[dims]: `x` data of the surveyed type in (-1, 1), `p` the same in (1, 2), `w` a constant
weight of that type, `r` one in (1, 2) and `c` a bias; `i32`, `i64`, `u8`, `u16`, `u32`, `f32`, `b` and `str` data of
one type whatever is surveyed, with `!` behind it a constant; `=1,2` a constant list of int64, `u8=3` a constant scalar,
`~0.5` a constant scalar of the surveyed type, `-` an input left out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
from onnx import TensorProto, defs, helper, numpy_helper

MICROSOFT = "com.microsoft"
OPSET = 21
TYPES = {
    "fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "a16": TensorProto.FLOAT,
    "a16 u8": TensorProto.FLOAT, "16x16": TensorProto.FLOAT, "int32": TensorProto.INT32,
    "int64": TensorProto.INT64, "bool": TensorProto.BOOL,
}  # fmt: skip
Q_SCALE, Q_ZERO = 1 / 16384, 32768  # uint16 over [-2, 2)
# What these return in 16 bits is right in one encoding only, or for Log in a coarse one.
OUTPUT_ENCODINGS = {
    "Sigmoid": (1 / 65536, 0), "HardSigmoid": (1 / 65536, 0), "Tanh": (1 / 32768, 32768), "Log": (1 / 8192, 32768),
}  # fmt: skip
WEIGHTS = {"a16": "int8", "a16 u8": "uint8", "16x16": "uint16"}

X = "x[1,8,16]"
IMAGE = "x[1,8,6,6]"


def words(text: str) -> list[str]:
    """Names that white space separates."""
    return text.split()


@dataclass(frozen=True)
class Case:
    """The node to try: inputs in the notation above, attributes, the number of outputs."""

    op: str
    inputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    domain: str = ""
    opset: int = 0


def _case(op: str, *inputs: str, outputs: int = 1, domain: str = "", opset: int = 0, **attributes: Any) -> Case:
    return Case(op, inputs, attributes, outputs, domain, opset)


def _ms(op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Case:
    return _case(op, *inputs, outputs=outputs, domain=MICROSOFT, **attributes)


UNARY = words("""Abs Acos Asin Asinh Atan Atanh Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Hardmax
Identity IsInf IsNaN LeakyRelu LogSoftmax Mish Neg Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus
Softsign Swish Tan Tanh ThresholdedRelu LpNormalization Flatten NonZero Shape RandomNormalLike
RandomUniformLike EyeLike Not BitwiseNot Bernoulli Unique Det Transpose""")
POSITIVE = words("Acosh Log Reciprocal Sqrt")
BINARY = words("""Add Div Max Min Mean Mul Sub Sum Pow And Or Xor Equal Greater GreaterOrEqual Less LessOrEqual PRelu
BitwiseAnd BitwiseOr BitwiseXor""")
REDUCE = words("""ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
ReduceSumSquare""")
WINDOWS = words("BlackmanWindow HammingWindow HannWindow")

_SQUARE = {"EyeLike": "x[8,8]", "Det": "x[1,8,8]"}
_WEIGHT, _BIAS = "w[16,32]", "c[32]"
_HEADS = "x[1,2,8,16]"

CASES = (
    *(_case(op, _SQUARE.get(op, X)) for op in UNARY),
    *(_case(op, "p[1,8,16]") for op in POSITIVE),
    *(_case(op, "p[1,8,16]", "p[1,8,16]") for op in BINARY),
    *(_case(op, "p[1,8,16]", "=-1") for op in REDUCE),
    *(_case(op, "i32[]") for op in WINDOWS),
    _case("ArgMax", X), _case("ArgMin", X),
    _case("AveragePool", IMAGE, kernel_shape=[2, 2]),
    _case("AffineGrid", "x[1,2,3]", "=1,2,4,4"),
    _case("Attention", _HEADS, _HEADS, _HEADS),
    _case("BatchNormalization", IMAGE, "r[8]", "c[8]", "w[8]", "r[8]"),
    _case("BitCast", X, to=TensorProto.INT32),
    _case("BitShift", "u32[1,8]", "u32[1,8]", direction="LEFT"),
    _case("Cast", X, to=TensorProto.INT32),
    _case("CastLike", X, "i32[1]"),
    _case("CausalConvWithState", "x[1,8,16]", "w[8,1,4]", "w[8]", "x[1,8,3]", outputs=2),
    _case("CenterCropPad", X, "=4,8", axes=[1, 2]),
    _case("Clip", X, "~-0.5", "~3"),
    _case("Col2Im", "x[1,8,9]", "=4,4", "=2,2"),
    _case("Compress", X, "b[8]", axis=1),
    _case("Concat", X, X, axis=1),
    _case("Constant", value_float=1.0),
    _case("Conv", IMAGE, "w[4,8,3,3]", "c[4]"),
    _case("ConvInteger", "u8[1,4,6,6]", "u8[4,4,3,3]"),
    _case("ConvTranspose", IMAGE, "w[8,4,3,3]", "c[4]"),
    _case("CumProd", X, "=1"), _case("CumSum", X, "=1"),
    _case("DFT", "x[1,8,1]"),
    _case("DeformConv", IMAGE, "w[4,8,3,3]", "x[1,18,4,4]"),
    _case("DepthToSpace", IMAGE, blocksize=2), _case("SpaceToDepth", IMAGE, blocksize=2),
    _case("DynamicQuantizeLinear", X, outputs=3),
    _case("Einsum", X, "x[1,16,8]", equation="bij,bjk->bik"),
    _case("Expand", "x[1,1,16]", "=1,8,16"),
    _case("GRU", "x[4,1,16]", "w[1,24,16]", "w[1,24,8]", hidden_size=8, outputs=2),
    _case("LSTM", "x[4,1,16]", "w[1,32,16]", "w[1,32,8]", hidden_size=8, outputs=2),
    _case("RNN", "x[4,1,16]", "w[1,8,16]", "w[1,8,8]", hidden_size=8, outputs=2),
    _case("Gather", X, "i32[1,4]", axis=1),
    _case("GatherElements", X, "i32[1,4,16]", axis=1), _case("GatherND", X, "i64[1,1,2]"),
    _case("Gemm", "x[8,16]", _WEIGHT, _BIAS),
    _case("GlobalAveragePool", IMAGE), _case("GlobalLpPool", IMAGE), _case("GlobalMaxPool", IMAGE),
    _case("GridSample", IMAGE, "x[1,4,4,2]"),
    _case("GroupNormalization", IMAGE, "w[8]", "w[8]", num_groups=2),
    _case("ImageDecoder", "u8[16]"),
    _case("InstanceNormalization", IMAGE, "w[8]", "c[8]"),
    _case("LRN", IMAGE, size=3), _case("LpPool", IMAGE, kernel_shape=[2, 2]),
    _case("LayerNormalization", X, "w[16]", "c[16]"), _case("RMSNormalization", X, "w[16]"),
    _case("LinearAttention", "x[1,8,32]", "x[1,8,32]", "x[1,8,32]", q_num_heads=2, kv_num_heads=2,
          update_rule="linear", outputs=2),
    _case("MatMul", X, _WEIGHT), _case("MatMulInteger", "u8[8,16]", "u8[16,8]"),
    _case("MaxPool", IMAGE, kernel_shape=[2, 2]), _case("MaxRoiPool", IMAGE, "p[1,5]", pooled_shape=[2, 2]),
    _case("MaxUnpool", "x[1,8,3,3]", "i64[1,8,3,3]", kernel_shape=[2, 2], strides=[2, 2]),
    _case("MeanVarianceNormalization", IMAGE),
    _case("MelWeightMatrix", "i32[]", "i32[]", "i32[]", "~1", "~2"),
    _case("Mod", "p[1,8,16]", "p[1,8,16]", fmod=1),
    _case("Multinomial", "x[1,16]"),
    _case("NegativeLogLikelihoodLoss", "x[4,8]", "i64[4]"),
    _case("SoftmaxCrossEntropyLoss", "x[4,8]", "i64[4]"),
    _case("NonMaxSuppression", "x[1,6,4]", "x[1,1,6]", "=3"),
    _case("OneHot", "i64[1,8]", "=4", "w[2]"),
    _case("Pad", X, "=0,1,0,0,1,0"),
    _case("QLinearConv", "u8[1,4,6,6]", "~0.1", "u8=3", "u8[4,4,3,3]", "~0.1", "u8=3", "~0.1", "u8=3"),
    _case("QLinearMatMul", "u8[8,16]", "~0.1", "u8=3", "u8[16,8]", "~0.1", "u8=3", "~0.1", "u8=3"),
    _case("RandomNormal", shape=[1, 8]), _case("RandomUniform", shape=[1, 8]),
    _case("Range", "x[]", "x[]", "x[]"),
    _case("RegexFullMatch", "str[4]", pattern="a"),
    _case("Reshape", X, "=1,128"), _case("Resize", IMAGE, "-", "-", "=1,8,12,12"),
    _case("ReverseSequence", "x[8,4,16]", "i64[4]"),
    _case("RoiAlign", "x[2,8,6,6]", "p[2,4]", "i64[2]"),
    _case("RotaryEmbedding", _HEADS, "x[8,8]", "x[8,8]", "i64[1,8]"),
    _case("STFT", "x[1,16,1]", "i64=4", "w[8]", "i64=8"),
    _case("Scatter", X, "i64[1,2,16]", "x[1,2,16]", axis=1, opset=10),
    _case("ScatterElements", X, "i32[1,2,16]", "x[1,2,16]", axis=1),
    _case("ScatterND", X, "i64[1,1,2]", "x[1,1,16]"),
    _case("Slice", X, "=1", "=5", "=1"), _case("Split", X, "=4,4", axis=1, outputs=2),
    _case("Squeeze", X, "=0"), _case("Unsqueeze", X, "=0"),
    _case("StringConcat", "str[4]", "str[4]"), _case("StringNormalizer", "str[4]"),
    _case("StringSplit", "str[4]", outputs=2),
    _case("SwiGLU", X, X, opset=28),
    _case("TensorScatter", "x[1,2,8,16]", "x[1,2,1,16]", "i64[1]"),
    _case("TfIdfVectorizer", "i32[4]", max_gram_length=1, max_skip_count=0, min_gram_length=1, mode="TF",
          ngram_counts=[0], ngram_indexes=[0, 1], pool_int64s=[1, 2]),
    _case("Tile", X, "=1,2,1"), _case("TopK", X, "=4", outputs=2), _case("Trilu", X),
    _case("Upsample", IMAGE, "f32=1,1,2,2", opset=9), _case("Where", "b[1,8,16]", X, X),
    _ms("MatMulNBits", "x[1,8,32]", "u8[16,2,8]!", "w[16,2]", K=32, N=16, bits=4, block_size=16),
    _ms("GroupQueryAttention", "x[1,1,64]", "x[1,1,32]", "x[1,1,32]", "x[1,2,8,16]", "x[1,2,8,16]", "i32[1,1]",
        "i32=8", num_heads=4, kv_num_heads=2, outputs=3),
    _ms("RotaryEmbedding", _HEADS, "i64[1,8]", "w[8,8]", "w[8,8]"),
    _case("SimplifiedLayerNormalization", X, "w[16]", axis=-1),
    _ms("SkipSimplifiedLayerNormalization", X, X, "w[16]"), _ms("SkipLayerNormalization", X, X, "w[16]"),
    _ms("FusedMatMul", X, _WEIGHT, alpha=0.5), _ms("QuickGelu", X), _ms("BiasGelu", X, "w[16]"), _ms("Gelu", X),
    _ms("FastGelu", X, "w[16]"), _ms("MultiHeadAttention", "x[1,8,32]", "x[1,8,32]", "x[1,8,32]", num_heads=2),
)  # fmt: skip

_ENCODING = "s = Constant<value = float {0.0001}>()  z = Constant<value = uint16 {32768}>()"
# Operators over sequences and subgraphs, as the body of a graph (float[1,8,16] x, bool c) => (y).
TEXTS = {
    "If": """y = If(c) <then_branch = a () => (float[1,8,16] t) { t = Neg(x) },
                       else_branch = b () => (float[1,8,16] e) { e = Abs(x) }>""",
    "Loop": """n = Constant<value = int64 {3}>()
               y = Loop(n, , x) <body = l (int64 i, bool k, float[1,8,16] v) => (bool o, float[1,8,16] w)
                                        { o = Identity(k)  w = Neg(v) }>""",
    "Scan": """i = Squeeze(x)
               z, y = Scan(i, i) <num_scan_inputs = 1, body = l (float[8,16] v, float[16] r)
                                  => (float[8,16] w, float[16] o) { w = Add(v, r)  o = Neg(r) }>""",
    "QuantizeLinear": f"{_ENCODING} q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  e = Mul(d, d)"
                      "  r = QuantizeLinear(e, s, z)  y = DequantizeLinear(r, s, z)",
    "com.microsoft.QuantizeLinear": f"{_ENCODING} q = com.microsoft.QuantizeLinear(x, s, z)"
                                    "  d = com.microsoft.DequantizeLinear(q, s, z)  e = Mul(d, d)"
                                    "  r = com.microsoft.QuantizeLinear(e, s, z)"
                                    "  y = com.microsoft.DequantizeLinear(r, s, z)",
    # Beside other nodes: ONNX Runtime removes these, and a graph of no nodes is refused.
    "Dropout": "a = Abs(x)  d = Dropout(a)  y = Neg(d)",
    "Size": "s = Size(x)  f = Cast<to = 1>(s)  y = Mul(x, f)",
    "ConstantOfShape": "s = Shape(x)  f = ConstantOfShape(s)  y = Add(x, f)",
    "SequenceConstruct": "s = SequenceConstruct(x, x)  n = SequenceLength(s)  y = Add(x, x)",
    "SequenceEmpty": "s = SequenceEmpty()  t = SequenceInsert(s, x)  y = ConcatFromSequence<axis = 0>(t)",
    "SequenceAt": "z = Constant<value = int64 {0}>()  s = SequenceConstruct(x, x)  y = SequenceAt(s, z)",
    "SequenceErase": "s = SequenceConstruct(x, x)  t = SequenceErase(s)  y = ConcatFromSequence<axis = 0>(t)",
    "SplitToSequence": "s = SplitToSequence<axis = 1>(x)  y = ConcatFromSequence<axis = 1>(s)",
}  # fmt: skip
TEXTS["Optional"] = "o = Optional(x)  y = OptionalGetElement(o)"
TEXTS["SequenceMap"] = """s = SequenceConstruct(x, x)
    t = SequenceMap(s) <body = m (float[1,8,16] v) => (float[1,8,16] w) { w = Neg(v) }>
    y = ConcatFromSequence<axis = 0>(t)"""
for _same, _as in (
    ("SequenceInsert", "SequenceEmpty"), ("ConcatFromSequence", "SequenceEmpty"), ("OptionalGetElement", "Optional"),
    ("SequenceLength", "SequenceConstruct"), ("OptionalHasElement", "Optional"),
    ("DequantizeLinear", "QuantizeLinear"), ("com.microsoft.DequantizeLinear", "com.microsoft.QuantizeLinear"),
):  # fmt: skip
    TEXTS[_same] = TEXTS[_as]

_INPUT = re.compile(r"(?P<kind>[a-z]+\d*)\[(?P<dims>[\d,]*)\](?P<constant>!?)")
_FIXED = {
    "i32": np.int32, "i64": np.int64, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "f32": np.float32,
    "b": np.bool_, "str": np.str_,
}  # fmt: skip
_ONNX_NAMES = {
    "fp32": "float", "fp16": "float16", "a16": "float", "int32": "int32", "int64": "int64", "bool": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A model and arrays to feed it with."""

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]


def types_of(case: Case) -> list[str]:
    """The types to survey a case in: those that its first `x` or `p` input may have, else ["any"]."""
    surveyed = [i for i, text in enumerate(case.inputs) if re.match(r"[xp]\[", text)]
    if not surveyed:
        return ["any"]
    if case.domain or case.op == "SimplifiedLayerNormalization":
        names = ["fp32", "fp16", "a16"]
        return names + _more(case, names)
    schema = defs.get_schema(case.op, _opset(case), case.domain)
    allowed = schema.inputs[min(surveyed[0], len(schema.inputs) - 1)].types
    names = [name for name, text in _ONNX_NAMES.items() if f"tensor({text})" in allowed]
    if case.op == "BitCast":
        return ["fp32", "int32"]
    names = [name for name in names if name != "a16" or not case.opset]
    return names + _more(case, names)


def _more(case: Case, names: list[str]) -> list[str]:
    """Weights in other types than int8, where the operator has weights."""
    return ["a16 u8", "16x16"] if "a16" in names and any(text[0] in "wr" for text in case.inputs) else []


def build(case: Case, dtype: str) -> Built:
    """The case's model in one type; in a16 all float data passes through uint16 QuantizeLinear/DequantizeLinear."""
    random = np.random.default_rng(1)
    surveyed = helper.tensor_dtype_to_np_dtype(TYPES.get(dtype, TensorProto.FLOAT))
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}
    feeds: dict[str, np.ndarray] = {}
    names: list[str] = []
    for index, text in enumerate(case.inputs):
        name = f"in{index}"
        match = _INPUT.fullmatch(text)
        if text == "-":
            name = ""
        elif text[0] == "~":
            weights[name] = np.asarray(float(text[1:]), np.float32 if dtype not in TYPES else surveyed)
        elif match is None:
            kind, _, values = text.partition("=")
            numbers = [float(v) for v in values.split(",") if v]
            weights[name] = np.array(numbers if not kind or kind == "f32" else numbers[0], _FIXED[kind or "i64"])
        else:
            dims = [int(d) for d in match["dims"].split(",") if d]
            array = _data(match["kind"], dims, surveyed, random)
            floating = match["kind"] in "xpwrc" and dtype in WEIGHTS
            constant = match["kind"] in "wrc" or bool(match["constant"])
            (weights if constant else feeds)[name] = array
            if floating:
                scale, stored = _quantised(match["kind"], array, WEIGHTS[dtype])
                (weights if constant else feeds)[name] = stored
                zero = np.array({"uint16": Q_ZERO, "uint8": 128}.get(stored.dtype.name, 0), stored.dtype)
                weights |= {f"{name}_scale": np.float32(scale) * np.ones((), np.float32), f"{name}_zero": zero}
                encoded = [name, f"{name}_scale", f"{name}_zero"]
                nodes.append(helper.make_node("DequantizeLinear", encoded, [f"{name}_dq"]))
                name = f"{name}_dq"
        names.append(name)
    outputs = [f"out{i}" for i in range(case.outputs)]
    nodes.append(helper.make_node(case.op, names, outputs, "case", domain=case.domain, **case.attributes))
    kinds = _output_types(nodes, weights, feeds, outputs, case)
    results = []
    for output in outputs:
        if dtype in WEIGHTS and kinds.get(output, TensorProto.FLOAT) == TensorProto.FLOAT:
            scale, middle = OUTPUT_ENCODINGS.get(case.op, (Q_SCALE, Q_ZERO))
            weights |= {"out_scale": np.array(scale, np.float32), "out_zero": np.array(middle, np.uint16)}
            nodes.append(helper.make_node("QuantizeLinear", [output, "out_scale", "out_zero"], [f"{output}_q"]))
            kind = helper.make_tensor_type_proto(TensorProto.UINT16, None)
            results.append(helper.make_value_info(f"{output}_q", kind))
        else:
            results.append(onnx.ValueInfoProto(name=output))
    return Built(_model(nodes, weights, feeds, results, _opset(case)), feeds)


def build_text(op: str) -> Built:
    """The model of an operator over subgraphs or sequences, fp32."""
    text = f"""<ir_version: 10, opset_import: ["": {OPSET}, "{MICROSOFT}": 1]>
               g (float[1,8,16] x, bool c) => (float y) {{ {TEXTS[op]} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    used = {name for node in model.graph.node for name in node.input}
    feeds = {"x": np.random.default_rng(1).uniform(-1, 1, (1, 8, 16)).astype(np.float32), "c": np.array(True)}
    if "c" not in used:
        del model.graph.input[1], feeds["c"]
    return Built(model, feeds)


def _opset(case: Case) -> int:
    """An operator younger than OPSET is taken at its newest version."""
    if case.opset or case.domain or case.op == "SimplifiedLayerNormalization":
        return case.opset or OPSET
    try:
        defs.get_schema(case.op, OPSET, "")
    except defs.SchemaError:
        return defs.get_schema(case.op).since_version
    return OPSET


def _data(kind: str, dims: list[int], surveyed: np.dtype[Any], random: np.random.Generator) -> np.ndarray:
    if kind == "str":
        return np.full(dims, "a", object)
    fixed = _FIXED.get(kind)
    dtype = np.dtype(fixed) if fixed else surveyed
    if dtype.kind == "f":
        low, span = (1.0, 1.0) if kind in "pr" else (-1.0, 2.0)
        return np.asarray(random.uniform(low, low + span, dims), dtype)
    if fixed is None and dtype.kind == "i":
        if kind == "p":
            return random.integers(1, 9, dims, dtype)
        return random.permutation(math.prod(dims)).astype(dtype).reshape(dims)
    return np.asarray(random.integers(0, 2, dims), dtype)


def _quantised(kind: str, array: np.ndarray, weight: str) -> tuple[float, np.ndarray]:
    if kind in "xp" or (kind in "wr" and weight == "uint16"):
        return Q_SCALE, np.asarray(np.clip(np.rint(array / Q_SCALE) + Q_ZERO, 0, 65535), np.uint16)
    if kind == "c":
        scale = Q_SCALE * (Q_SCALE if weight == "uint16" else 1 / 64)
        return scale, np.rint(array / scale).astype(np.int32)
    if weight == "uint8":
        return 1 / 64, np.clip(np.rint(array * 64) + 128, 0, 255).astype(np.uint8)
    return 1 / 64, np.clip(np.rint(array * 64), -128, 127).astype(np.int8)


def _output_types(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], feeds: dict[str, np.ndarray], outputs: list[str],
    case: Case,
) -> dict[str, int]:  # fmt: skip
    """Element types by name, as far as ONNX's own inference knows the operator."""
    if case.domain or case.op == "SimplifiedLayerNormalization":
        return {}
    values = [onnx.ValueInfoProto(name=name) for name in outputs]
    try:
        inferred = onnx.shape_inference.infer_shapes(_model(nodes, weights, feeds, values, _opset(case)))
    except Exception:
        return {}
    found = [*inferred.graph.value_info, *inferred.graph.output]
    return {value.name: value.type.tensor_type.elem_type for value in found if value.type.HasField("tensor_type")}


def _model(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], feeds: dict[str, np.ndarray],
    outputs: list[onnx.ValueInfoProto], opset: int,
) -> onnx.ModelProto:  # fmt: skip
    def kind(array: np.ndarray) -> int:
        return TensorProto.STRING if array.dtype == object else helper.np_dtype_to_tensor_dtype(array.dtype)

    inputs = [helper.make_tensor_value_info(name, kind(a), a.shape) for name, a in feeds.items()]
    constants = [numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items()]
    graph = helper.make_graph(nodes, "case", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
