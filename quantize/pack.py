"""Numbers of 2, 3, 4 and 8 bits packed into bytes, the first number in the lowest bits, and back.

    int4    -3 5 | 7          byte 0 = 0101 1101 (5, then -3 as two's complement), byte 1 = 0000 0111 (7, padded)

This is the order of ONNX's INT4, UINT4, INT2 and UINT2 (onnx.proto, TensorProto.raw_data), of MatMulNBits' weights,
and, read as little-endian words, of GPTQ's int32 tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ringstep.errors import RingstepError

BITS = (2, 3, 4, 8)
ONNX_TYPES = {
    (2, True): ir.DataType.INT2, (2, False): ir.DataType.UINT2, (4, True): ir.DataType.INT4,
    (4, False): ir.DataType.UINT4, (8, True): ir.DataType.INT8, (8, False): ir.DataType.UINT8,
    (16, True): ir.DataType.INT16, (16, False): ir.DataType.UINT16,
}  # fmt: skip


def span(bits: int, signed: bool) -> tuple[int, int]:
    """The smallest and the largest number of so many bits."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def pack(q: NDArray[Any], bits: int, *, signed: bool) -> NDArray[np.uint8]:
    """Pack integers [..., n] along the last axis: uint8 [..., ceil(n * bits / 8)], what is left over filled with zeros.

    Negative numbers are stored as two's complement. Raises RingstepError for other widths, numbers that are no
    integers, and the first one out of range: masked off, it would come back as another number.
    """
    if bits not in BITS:
        raise RingstepError(f"numbers of {bits} bits cannot be packed; only {', '.join(map(str, BITS))} bits can")
    if q.dtype.kind not in "iu":
        raise RingstepError(f"{q.dtype} numbers cannot be packed into {bits} bits; round them to integers first")
    low, high = span(bits, signed)
    if q.size and (int(q.min()) < low or int(q.max()) > high):
        bad = int(q[(q < low) | (q > high)].flat[0])
        raise RingstepError(f"{bad} is no {'signed' if signed else 'unsigned'} number of {bits} bits ({low} to {high})")
    # The cast keeps the low eight bits, which are two's complement already.
    small = np.ascontiguousarray(q.astype(np.uint8) & np.uint8((1 << bits) - 1))
    if bits == 8:
        return small
    if bits == 3:
        planes = (small[..., None] >> np.arange(3, dtype=np.uint8)) & np.uint8(1)
        return np.packbits(planes.reshape(*q.shape[:-1], 3 * q.shape[-1]), axis=-1, bitorder="little")
    each = 8 // bits
    if left := -q.shape[-1] % each:
        small = np.concatenate([small, np.zeros((*q.shape[:-1], left), np.uint8)], axis=-1)
    packed = small[..., 0::each].copy()
    for place in range(1, each):
        packed |= small[..., place::each] << np.uint8(bits * place)
    return packed


def unpack(packed: NDArray[np.uint8], bits: int, count: int, *, signed: bool) -> NDArray[Any]:
    """The `count` numbers along the last axis that pack wrote: int8 or uint8 [..., count].

    Raises RingstepError where the bytes are not those of `count` numbers.
    """
    if bits not in BITS or packed.dtype != np.uint8 or packed.shape[-1] != -(-count * bits // 8):
        raise RingstepError(f"{packed.dtype} {list(packed.shape)} does not hold {count} numbers of {bits} bits a row")
    if bits == 8:
        values = packed.copy()
    elif bits == 3:
        planes = np.unpackbits(packed, axis=-1, count=3 * count, bitorder="little")
        values = planes.reshape(*packed.shape[:-1], count, 3) @ np.array([1, 2, 4], np.uint8)
    else:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        values = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        values = values.reshape(*packed.shape[:-1], -1)[..., :count]
    if not signed:
        return values
    # Shifted up to the byte's own sign bit, and back with the sign.
    up = np.uint8(8 - bits)
    return (values << up).view(np.int8) >> np.int8(8 - bits)


def onnx_tensor(q: NDArray[Any], bits: int, *, signed: bool, name: str) -> ir.TensorProtocol:
    """The integers as an ONNX tensor of their own type (INT4 for 4 signed bits), same shape.

    Raises RingstepError for a width that ONNX has no type for, and as pack does.
    """
    dtype = ONNX_TYPES.get((bits, signed))
    if dtype is None:
        raise RingstepError(f"ONNX has no type of {bits} bits; use 2, 4, 8 or 16")
    if bits == 16:
        if q.size and not (span(16, signed)[0] <= int(q.min()) and int(q.max()) <= span(16, signed)[1]):
            raise RingstepError(f"tensor {name}: a number is none of 16 bits")
        return ir.tensor(np.ascontiguousarray(q, np.int16 if signed else np.uint16), name=name)
    packed = pack(q.reshape(-1), bits, signed=signed)
    if bits == 8:
        return ir.tensor(packed.view(np.int8 if signed else np.uint8).reshape(q.shape), name=name)
    return ir.PackedTensor(packed, dtype, shape=q.shape, name=name)
