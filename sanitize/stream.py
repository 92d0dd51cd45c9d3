"""Constants changed element by element: large ones a chunk at a time, when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from sanitize import tensors

CHUNK = 1 << 18  # elements
Elementwise = Callable[[np.ndarray], np.ndarray]


class Mapped(ir.LazyTensor):
    """function(source), computed where it is asked for and never held."""

    def __init__(self, source: ir.TensorProtocol, dtype: ir.DataType, function: Elementwise) -> None:
        whole = lambda: ir.tensor(function(source.numpy()), dtype=dtype)
        super().__init__(whole, dtype, ir.Shape(source.shape.numpy()), name=source.name)
        self.source, self.function = source, function

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes chunk by chunk."""
        for chunk in chunks(self.source):
            file.write(self.function(chunk).tobytes())


def chunks(tensor: ir.TensorProtocol) -> Iterator[np.ndarray]:
    """The elements of a tensor of 8 bits or more, flat, in pieces; one in a file is never read whole."""
    if isinstance(tensor, Mapped):
        yield from (tensor.function(chunk) for chunk in chunks(tensor.source))
    elif isinstance(tensor, ir.ExternalTensor):
        # Not its numpy(): that keeps a mapping and a file descriptor for every tensor that was looked at.
        dtype = np.dtype(tensor.dtype.numpy()).newbyteorder("<")
        for raw in tensors.chunks(tensor, CHUNK * dtype.itemsize):
            yield np.frombuffer(raw, dtype)
    else:
        flat = tensor.numpy().reshape(-1)
        yield from (flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK))


def mapped(source: ir.TensorProtocol, dtype: ir.DataType, function: Elementwise) -> ir.TensorProtocol:
    """function(source) with its name and shape: computed now if it is small, else when it is written."""
    if source.size > CHUNK:
        return Mapped(source, dtype, function)
    values = np.ascontiguousarray(function(source.numpy()))
    return ir.tensor(values.reshape(tuple(source.shape.numpy())), dtype=dtype, name=source.name)
