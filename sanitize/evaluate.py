"""What a node computes from constants, by ONNX Runtime's own kernels: the very bits the runtime would give.

A session is made once for each kind of node (operator, attributes, input types) and then run in microseconds. The
size of a result is known before it is computed, so a hostile Expand allocates nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

LIMIT = 1 << 16  # elements of a tensor that folding reads or makes; larger ones are weights and stay weights


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POINTWISE = _names(
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike "
    "Ceil Clip Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual HardSigmoid Identity IsInf IsNaN LeakyRelu "
    "Less LessOrEqual Log Max Mean Min Mod Mul Neg Not Or Pow Reciprocal Relu Round Sigmoid Sign Sin Sinh Softplus "
    "Sqrt Sub Sum Tan Tanh Where Xor"
)
MOVES = _names(
    "ArgMax ArgMin Compress Concat CumSum Flatten GatherElements LogSoftmax NonZero ReduceL1 ReduceL2 ReduceLogSum "
    "ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Reshape ScatterElements "
    "ScatterND Slice Softmax Split Squeeze Transpose Trilu Unsqueeze"
)
"""Their results are no larger than what they read."""
SIZED = _names("ConstantOfShape Expand Gather GatherND MatMul OneHot Pad Range Tile")
"""Their results may be larger than what they read."""
FOLDABLE = POINTWISE | MOVES | SIZED
# Quantised weights keep their QuantizeLinear and DequantizeLinear, and what is random is no constant: neither is here.
DTYPES = _names("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64")


def evaluate(node: ir.Node, inputs: Sequence[np.ndarray | None], version: int) -> list[np.ndarray] | None:
    """The outputs of a node of the default domain for these inputs (None: an input left out).

    None where the node is not foldable, its result would have more than LIMIT elements, the inputs are not valid for
    it, or ONNX Runtime has no kernel. `version`: of the default operator domain.
    """
    given = [array for array in inputs if array is not None]
    if node.op_type not in FOLDABLE or any(array.dtype.name not in DTYPES for array in given):
        return None
    try:
        if not 0 <= _size(node, inputs) <= LIMIT or _traps(node, given):
            return None
    except (ValueError, IndexError, OverflowError):
        return None
    small = onnx.NodeProto(op_type=node.op_type)
    small.input.extend("" if array is None else f"i{index}" for index, array in enumerate(inputs))
    small.output.extend(f"o{index}" for index in range(len(node.outputs)))
    for name in sorted(node.attributes):
        small.attribute.append(ir.serde.serialize_attribute(node.attributes[name]))
    kinds = tuple(None if array is None else array.dtype.name for array in inputs)
    run = _session(small.SerializeToString(), kinds, version)
    if run is None:
        return None
    try:
        feeds = {f"i{index}": array for index, array in enumerate(inputs) if array is not None}
        return [np.asarray(result) for result in run.run(None, feeds)]
    except Exception:
        return None  # ONNX Runtime's errors share no base class; the node stays and fails where it is run


@functools.lru_cache(maxsize=512)
def _session(node: bytes, kinds: tuple[str | None, ...], version: int):  # type: ignore[no-untyped-def]
    import onnxruntime as ort

    def info(name: str, dtype: int) -> onnx.ValueInfoProto:
        tensor = onnx.TypeProto.Tensor(elem_type=dtype)
        return onnx.ValueInfoProto(name=name, type=onnx.TypeProto(tensor_type=tensor) if dtype else None)

    proto = onnx.NodeProto.FromString(node)
    inputs = [
        info(f"i{index}", onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind)))
        for index, kind in enumerate(kinds)
        if kind is not None
    ]
    graph = onnx.helper.make_graph([proto], "constant", inputs, [info(name, 0) for name in proto.output])
    imports = [onnx.helper.make_opsetid("", version)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return None


def _size(node: ir.Node, inputs: Sequence[np.ndarray | None]) -> int:
    """Elements of the node's outputs, or an upper bound of them."""
    op, given = node.op_type, [array for array in inputs if array is not None]
    if op in POINTWISE:
        return math.prod(_broadcast([array.shape for array in given]))
    if op in MOVES:
        return sum(array.size for array in given)
    first = given[0]
    values = [int(number) for number in given[1].reshape(-1)] if len(given) > 1 and given[1].dtype.kind in "iu" else []
    if op == "ConstantOfShape":
        return math.prod(int(number) for number in first.reshape(-1))
    if op == "Expand":
        return math.prod(_broadcast([first.shape, tuple(values)]))
    if op == "Tile":
        return first.size * math.prod(values)
    if op == "Gather":
        axis = node.attributes.get_int("axis", 0)
        return first.size // max(1, first.shape[axis]) * given[1].size
    if op == "GatherND":
        return first.size * given[1].size
    if op == "MatMul":
        return first.size * given[1].size // max(1, first.shape[-1]) ** 2
    if op == "OneHot":
        return first.size * int(given[1].reshape(-1)[0])
    if op == "Range":
        start, limit, delta = (float(array.reshape(-1)[0]) for array in given)
        return max(0, math.ceil((limit - start) / delta)) if delta else LIMIT + 1
    if op == "Pad" and len(inputs) > 1:
        # Padding spread over all dims is the most that any axes can give.
        return math.prod(dim + sum(max(0, value) for value in values) for dim in first.shape)
    return LIMIT + 1


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Dims no smaller than those of the broadcast result."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return [0 if 0 in dims else max(dims) for dims in zip(*padded, strict=True)]


def _traps(node: ir.Node, given: Sequence[np.ndarray]) -> bool:
    """Whether the processor would trap: integer division by zero, or of the smallest integer by -1."""
    if node.op_type not in ("Div", "Mod") or given[1].dtype.kind not in "iu":
        return False
    return bool((given[1] == 0).any() or (given[1].dtype.kind == "i" and (given[1] == -1).any()))
