"""Bytes of tensors, read from their files where they lie there: no mapping stays open, no file is held whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from ringstep.errors import RingstepError

CHUNK = 4 << 20


def nbytes(tensor: ir.TensorProtocol) -> int:
    """Bytes of a tensor as stored; sub-byte types are packed. 0 of strings, which always stay in the graph."""
    if tensor.dtype == ir.DataType.STRING:
        return 0
    return -(-tensor.size * tensor.dtype.bitwidth // 8)


def to_numpy(tensor: ir.TensorProtocol) -> np.ndarray:
    """The tensor as an array; one in a file is read without mapping it. Raises RingstepError if the file is cut off."""
    if not isinstance(tensor, ir.ExternalTensor):
        result: np.ndarray = tensor.numpy()
        return result
    with Reader(tensor) as reader:
        raw = reader.read(0, nbytes(tensor))
    shape = tensor.shape.numpy()
    if tensor.dtype.bitwidth >= 8:
        return np.frombuffer(raw, np.dtype(tensor.dtype.numpy()).newbyteorder("<")).reshape(shape)
    proto = onnx.TensorProto(data_type=int(tensor.dtype), dims=shape, raw_data=raw)
    packed: np.ndarray = ir.serde.TensorProtoTensor(proto).numpy()
    return packed


def chunks(tensor: ir.TensorProtocol) -> Iterator[bytes]:
    """The tensor's bytes, CHUNK at a time."""
    with Reader(tensor) as reader:
        for start in range(0, size := nbytes(tensor), CHUNK):
            yield reader.read(start, min(CHUNK, size - start))


def place(tensor: ir.TensorProtocol) -> tuple[str, int, int] | None:
    """The file, offset and length a tensor lies at; None if it lies in memory."""
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    return str(Path(tensor.path).resolve()), tensor.offset or 0, nbytes(tensor)


class Reader:
    """Any part of one tensor's bytes, by pread."""

    def __init__(self, tensor: ir.TensorProtocol) -> None:
        self._tensor = tensor
        self._held: bytes | None = None
        self._file = -1
        if isinstance(tensor, ir.ExternalTensor):
            self._start = tensor.offset or 0

    def __enter__(self) -> Reader:
        if isinstance(self._tensor, ir.ExternalTensor):
            self._file = os.open(self._tensor.path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self._held = self._tensor.tobytes()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def read(self, start: int, size: int) -> bytes:
        """Bytes `start` to `start + size` of the tensor."""
        if self._held is not None:
            return self._held[start : start + size]
        found = os.pread(self._file, size, self._start + start)
        if len(found) != size:
            name = self._tensor.name
            raise RingstepError(f"{self._tensor.path} ends inside tensor {name!r}: it changed meanwhile")  # type: ignore[attr-defined]
        return found
