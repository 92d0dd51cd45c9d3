"""The GGUF container: metadata and tensor places, read by hand because gguf.GGUFReader takes seconds.

GGUFReader makes numpy views of every token and merge: 2 s for SmolLM2's 98 000 strings. This walk takes 0.07.
Dequantising is the gguf package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from ringstep.errors import RingstepError
from ringstep.files import ordinary_size
from ringstep.tensor_file import StoredTensor, read_bytes, read_plain

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
PLAIN = {"F64": "float64", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}  # never weights
CHUNK = 1 << 17  # values dequantised at a time: the temporaries stay in the processor's cache


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds: metadata as Python values, tensors by their GGUF names."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Cursor:
    """A bounds-checked walk over the mapped file."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self.data, self.file, self.at, self.size = data, file, 0, len(data)

    def take(self, count: int) -> int:
        start, self.at = self.at, self.at + count
        if self.at > self.size:
            raise RingstepError(f"{self.file} ends inside its header; the file is incomplete, fetch it again")
        return start

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        return str(self.data[start : start + length], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind != ARRAY:
            raise RingstepError(
                f"{self.file}: metadata type {kind} is unknown; the file is damaged or too new"
            )
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner == STRING:
            if count * 8 > self.size - self.at:
                self.take(count * 8)
            return [self.string() for _ in range(count)]
        if inner not in SCALARS:
            raise RingstepError(f"{self.file}: arrays of metadata type {inner} are not supported")
        start = self.take(count * struct.calcsize("<" + SCALARS[inner]))
        return list(struct.unpack_from(f"<{count}{SCALARS[inner]}", self.data, start))


def read_gguf_header(file: Path) -> GgufFile:
    """Read metadata and tensor places of a GGUF file (versions 2 and 3, little-endian).

    Raises RingstepError naming the file, and the tensor or key, for anything damaged or unsupported.
    """
    try:
        ordinary_size(file)
        with open(file, "rb") as handle:
            if handle.read(4) != b"GGUF":
                raise RingstepError(f"{file} is not a GGUF file (it does not start with GGUF)")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, file))
    except OSError as error:
        raise RingstepError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RingstepError(
            f"{file}: a name in its header is not UTF-8; the file is damaged, fetch it again"
        ) from None


def _parse(cursor: _Cursor) -> GgufFile:
    file = cursor.file
    cursor.take(4)
    version, tensor_count, key_count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in (2, 3):
        raise RingstepError(
            f"{file}: GGUF version {version} is not supported, only 2 and 3 in little-endian order"
        )
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            raise RingstepError(f"{file}: the key {key!r} appears twice; the file is damaged, fetch it again")
        metadata[key] = cursor.value(cursor.scalar("I"))
    if metadata.get("split.count", 0) not in (0, 1):
        raise RingstepError(
            f"{file} is one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensor_count):
        name, rank = cursor.string(), cursor.scalar("I")
        if rank > 4:
            raise RingstepError(f"tensor {name!r} in {file} claims {rank} dimensions; the file is damaged")
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]  # GGUF lists the innermost first
        found.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise RingstepError(f"{file}: general.alignment {alignment!r} is not a number of bytes")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in found:
        if name in tensors:
            raise RingstepError(
                f"tensor {name!r} appears twice in {file}; the file is damaged, fetch it again"
            )
        tensors[name] = _place(file, name, shape, kind, start + offset, cursor.size)
    return GgufFile(metadata, tensors)


def _place(file: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> StoredTensor:
    where = f"tensor {name!r} in {file}"
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise RingstepError(f"{where} has the unknown type {kind}; the file is damaged or too new") from None
    if not shape or 0 in shape or shape[-1] % block:
        raise RingstepError(
            f"{where} has shape {list(shape)}, not whole blocks of {block}; the file is damaged"
        )
    needed = math.prod(shape) // block * block_bytes
    if offset + needed > size:
        raise RingstepError(f"{where}: bytes {offset} to {offset + needed} lie outside the file's {size}; "
                            "the file is incomplete, fetch it again")  # fmt: skip
    plain = PLAIN.get(GGMLQuantizationType(kind).name)
    return StoredTensor(file, offset, shape, plain or "float32", None if plain else kind)


def read_gguf(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Return rows start..stop (first axis) as float32, in the row order and offset Hugging Face uses.

    llama.cpp's converter interleaves each head's rotary halves (rows 0, d/2, 1, d/2+1, ...); here row i of
    half j comes back to j*d/2 + i. Raises RingstepError for a type the gguf package cannot dequantise.
    """
    if tensor.ggml_type is None:
        return read_plain(tensor, start, stop)
    if tensor.rotary_heads:
        dim = tensor.shape[0] // tensor.rotary_heads
        first, last = start // dim, -(-stop // dim)  # whole heads, since a head's rows are shuffled
        stored = read_gguf(replace(tensor, rotary_heads=0), first * dim, last * dim)
        rest = stored.shape[1:]
        whole = stored.reshape(last - first, dim // 2, 2, *rest).swapaxes(1, 2).reshape(stored.shape)
        return whole[start - first * dim : stop - first * dim]
    if len(tensor.shape) == 1:
        # One row of blocks: elements cannot be addressed before they are dequantised.
        return _dequantise(replace(tensor, shape=(1, *tensor.shape)), 0, 1)[0, start:stop]
    return _dequantise(tensor, start, stop)


def _dequantise(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    assert tensor.ggml_type is not None
    kind = GGMLQuantizationType(tensor.ggml_type)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = math.prod(tensor.shape[1:]) // block  # a row
    raw = read_bytes(
        tensor.file, tensor.offset + start * blocks * block_bytes, (stop - start) * blocks * block_bytes
    )
    out = np.empty((raw.size // block_bytes, block), dtype=np.float32)
    if kind.name in ("F32", "F16"):
        out = raw.view(np.float32 if kind.name == "F32" else np.float16).astype(np.float32, copy=False)
    else:
        # The package works on 16 rows at a time; long rows keep its per-group cost small.
        step = max(1, CHUNK // block)
        flat = raw.reshape(-1, block_bytes)
        try:
            for at in range(0, len(flat), step):
                part = flat[at : at + step].reshape(1, -1)
                out[at : at + step] = quants.dequantize(part, kind).reshape(-1, block)
        except NotImplementedError:
            raise RingstepError(f"{tensor.file} holds {kind.name} tensors, which cannot be dequantised here; "
                                "use a Q8_0, F16 or BF16 file") from None  # fmt: skip
    if tensor.added:
        out -= np.float32(tensor.added)
    return out.reshape(stop - start, *tensor.shape[1:])
