"""Where a tensor lies in a weight file, and safetensors headers read without trusting them."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ringstep.errors import RingstepError
from ringstep.files import ordinary_size, read_small

HEADER_LIMIT = 100_000_000  # bytes; the safetensors library's own limit
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's place in a file and what has to be done to read it."""

    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: str  # numpy name of what a read returns
    ggml_type: int | None = None  # GGUF only: dequantised from this type to float32
    rotary_heads: int = 0  # GGUF only: heads whose rows llama.cpp interleaved, 0 for none
    added: float = 0.0  # GGUF only: constant the converter added to the values


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for a name such as "float32" or "bfloat16"."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `raw`; RingstepError naming `what` when it is anything else."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in result if keys.count(key) > 1)
            raise RingstepError(f"{what}: the key {twice!r} appears twice; fetch it again")
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except UnicodeDecodeError:
        raise RingstepError(f"{what} is not UTF-8 text; fetch it again") from None
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise RingstepError(f"{what} is not valid JSON ({detail}); fetch it again") from None
    if not isinstance(value, dict):
        raise RingstepError(f"{what} holds a JSON {type(value).__name__} where an object belongs")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most 64 MB; RingstepError for anything else."""
    return parse_json(read_small(path), str(path))


def read_bytes(file: Path, offset: int, count: int) -> np.ndarray:
    """Read `count` bytes at `offset` into a fresh uint8 array; RingstepError when the file is shorter."""
    try:
        # A plain read, not a map: the result is writable, aligned, and outlives the file.
        data = np.fromfile(file, dtype=np.uint8, count=count, offset=offset)
    except OSError as error:
        raise RingstepError(f"{file} cannot be read: {error.strerror or error}") from None
    if data.size != count:
        raise RingstepError(f"{file} ends inside a tensor: it changed since it was opened; fetch it again")
    return data


def read_plain(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Read rows start..stop (first axis) of a tensor stored as plain numbers, in its own dtype."""
    dtype = numpy_dtype(tensor.dtype)
    row = math.prod(tensor.shape[1:]) * dtype.itemsize
    shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    raw = read_bytes(tensor.file, tensor.offset + start * row, (stop - start) * row)
    return raw.view(dtype).reshape(shape)


def safetensors_header(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a safetensors file, its header checked against the file's real size.

    Raises RingstepError naming the file and tensor for a truncated file, a garbage header, an unknown dtype,
    a range outside the file, tensors that overlap, or a shape that disagrees with the bytes it has.
    """
    damaged = "the file is damaged or incomplete, fetch it again"
    try:
        size = ordinary_size(file)
        with open(file, "rb") as handle:
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, HEADER_LIMIT):
                raise RingstepError(f"{file} of {size} bytes claims a header of {length}; {damaged}")
            header = parse_json(handle.read(length), f"the safetensors header of {file}")
    except OSError as error:
        raise RingstepError(f"{file} cannot be read: {error.strerror or error}") from None
    header.pop("__metadata__", None)
    data_size = size - 8 - length
    tensors: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        where = f"tensor {name!r} in {file}"
        if not isinstance(entry, dict):
            raise RingstepError(f"{where}: its header entry is not an object; {damaged}")
        kind, shape, span = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
        if not isinstance(kind, str) or kind not in SAFETENSORS_DTYPES:
            raise RingstepError(f"{where}: dtype {str(kind)[:40]!r} is not supported; use a float checkpoint")
        if shape is None or span is None or len(span) != 2 or not _numpy_can_hold(shape):
            raise RingstepError(f"{where}: shape or data_offsets are not lists of sizes; {damaged}")
        begin, end = span
        if not begin <= end <= data_size:
            raise RingstepError(f"{where}: bytes {begin} to {end} of only {data_size}; {damaged}")
        dtype = SAFETENSORS_DTYPES[kind]
        needed = math.prod(shape) * numpy_dtype(dtype).itemsize
        if needed != end - begin:
            raise RingstepError(f"{where}: {kind} {shape} needs {needed} bytes, not {end - begin}; {damaged}")
        tensors[name] = StoredTensor(file, 8 + length + begin, tuple(shape), dtype)
        if end > begin:
            ranges.append((begin, end, name))
    ranges.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(ranges):
        if begin < end:
            raise RingstepError(f"{file}: tensors {first!r} and {second!r} overlap; {damaged}")
    return tensors


def _sizes(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return value


def _numpy_can_hold(shape: list[int]) -> bool:
    # numpy leaves zeros out when it counts bytes in 64 bits: [0, 2**62] overflows.
    return len(shape) <= 8 and math.prod(max(size, 1) for size in shape) < 1 << 56
