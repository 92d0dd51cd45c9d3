"""com.microsoft's MatMulNBits becomes MatMul of a float weight, dequantised when the file is written.

HTP keeps blocks of 4 bits only in a two-level form that comes with quantised activations (a plain blocked
DequantizeLinear falls back to the CPU), so what a float graph can hold is the float weight: the file grows to 32 bits
a weight (16 for scales in float16). Quantise it again to get 4 bits on the chip. No more than one weight is in memory.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.passes import Change, Pass
from sanitize.target import Target

KIND = ("com.microsoft", "MatMulNBits")
BITS = (2, 4, 8)
ROWS = 512


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has a kernel. Raises RingstepError naming node and feature."""
    if not target.htp:
        return []
    known: dict[tuple[int, ...], ir.Value] = {}
    return match.lower(model, [KIND], lambda node: _lower(node, known), "lowered to MatMul of float weights")


def _lower(node: ir.Node, known: dict[tuple[int, ...], ir.Value]) -> list[ir.Value | None]:
    x, packed, scales, zeros, order, bias = (match.given(node, at) for at in range(6))
    bits, block = graphs.attribute(node, "bits", 4), graphs.attribute(node, "block_size", 0)
    if order is not None:
        raise match.refuse(node, "g_idx (columns in another order) has no lowering; quantise without it")
    if bits not in BITS or graphs.attribute(node, "weight_prepacked", 0):
        raise match.refuse(node, f"{bits} bits or a prepacked weight have no lowering")
    tensors = [graphs.tensor(value) for value in (packed, scales, zeros)]
    if x is None or tensors[0] is None or tensors[1] is None or (zeros is not None and tensors[2] is None):
        raise match.refuse(node, "its weight, scales and zero points must be constants")
    rows, columns = graphs.attribute(node, "K"), graphs.attribute(node, "N")
    blocks = -(-rows // max(block, 1))
    if (tensors[0].size * 8, tensors[1].size) != (columns * blocks * block * bits, columns * blocks):
        raise match.refuse(node, f"its weight and scales are not those of {rows} x {columns} in blocks of {block}")
    key = (*(id(tensor) for tensor in tensors), rows, columns, id(node.graph))
    if key not in known:
        known[key] = _lazy(node, tensors[0], tensors[1], tensors[2], rows, columns, bits, block)
    result = match.emit(node, "MatMul", x, known[key])
    return [match.emit(node, "Add", result, bias) if bias is not None else result]


def _lazy(
    node: ir.Node, packed: ir.TensorProtocol, scales: ir.TensorProtocol, zeros: ir.TensorProtocol | None,
    rows: int, columns: int, bits: int, block: int,
) -> ir.Value:  # fmt: skip
    """An initializer [rows, columns] that is computed when it is read."""

    def make() -> ir.TensorProtocol:
        zero = None if zeros is None else zeros.numpy()
        return ir.tensor(dequantize(packed.numpy(), scales.numpy(), zero, rows, columns, bits, block))

    data = ir.LazyTensor(make, scales.dtype, ir.Shape((rows, columns)))
    return graphs.initializer(node, f"{node.name or node.op_type}/weight", data)


def dequantize(
    packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, rows: int, columns: int, bits: int, block: int
) -> np.ndarray:
    """The weight [rows, columns] behind MatMulNBits' inputs, in the scales' type.

    `packed` uint8 [columns, blocks, block * bits / 8]; `scales` [columns, blocks]; `zeros` packed like the weights
    along the blocks, or one float a block, None: the middle of the range. All may come flat.
    """
    blocks = -(-rows // block)
    packed, scales = packed.reshape(columns, -1), scales.reshape(columns, blocks)
    if zeros is None:
        zero = np.full((columns, blocks), 1 << (bits - 1), scales.dtype)
    elif zeros.dtype == np.uint8:
        zero = unpack(zeros.reshape(columns, -1), bits)[:, :blocks].astype(scales.dtype)
    else:
        zero = zeros.reshape(columns, blocks)
    weight = np.empty((rows, columns), scales.dtype)
    for start in range(0, columns, ROWS):
        part = slice(start, start + ROWS)
        values = unpack(packed[part], bits).reshape(-1, blocks, block).astype(scales.dtype)
        values = (values - zero[part, :, None]) * scales[part, :, None]
        weight[:, part] = values.reshape(len(values), -1)[:, :rows].T
    return weight


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [n, bytes] as uint8 [n, bytes * 8 / bits], the lowest bits of a byte first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


PASS = Pass("lower-matmul-nbits", "com.microsoft MatMulNBits to MatMul of float weights", run, min_db=90.0)
