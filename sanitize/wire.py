"""ONNX protobufs read without their weights: large tensors become references into the very file they lie in.

    model.onnx  [ graph [ nodes ... | tensor [ dims name raw_data ------ 400 MB ------ ] | ... ] ]
                                                        └ skipped; the skeleton says: this file, offset, length

So a file of any size, over protobuf's own limit of 2 GB too, is opened in the time its nodes take. Field numbers are
those of onnx.proto.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import onnx

from ringstep.errors import RingstepError
from ringstep.files import ordinary_size

INLINE_BYTES = 1024  # smaller tensors stay in the graph, as onnx's own writer has it
DEPTH = 64  # graphs within graphs; protobuf refuses more than 100 messages within each other
MODEL, GRAPH, NODE, ATTRIBUTE, TENSOR, FUNCTION = range(6)
NESTED = {
    MODEL: {7: GRAPH, 25: FUNCTION},
    GRAPH: {1: NODE, 5: TENSOR},
    NODE: {5: ATTRIBUTE},
    ATTRIBUTE: {5: TENSOR, 6: GRAPH, 10: TENSOR, 11: GRAPH},
    FUNCTION: {7: NODE},
}
RAW_DATA, DATA_LOCATION, DATA_TYPE = 9, 14, 2
# A packed list of these is on the wire what raw_data holds: little-endian numbers.
PACKED = {4: onnx.TensorProto.FLOAT, 10: onnx.TensorProto.DOUBLE}
Field = tuple[int, int, int, int, int]
"""Field number, wire type, start of its tag, start of its value, end."""


def read_skeleton(path: Path) -> onnx.ModelProto:
    """Read an ONNX file; tensors of INLINE_BYTES and more refer to their place in this same file.

    Raises RingstepError for a file that is missing, no ordinary file, cut off or no ONNX model.
    """
    try:
        size = ordinary_size(path)
        with open(path, "rb") as handle:
            if size == 0:
                raise RingstepError(f"{path} is empty; fetch or export it again")
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    skeleton = b"".join(_shrink(data, 0, size, MODEL, path.name, 0))
                except (ValueError, IndexError):
                    raise RingstepError(
                        f"{path} is no ONNX model, or it is cut off: its protobuf does not end where it says"
                    ) from None
    except OSError as error:
        raise RingstepError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return onnx.ModelProto.FromString(skeleton)
    except Exception as error:  # protobuf's DecodeError has no base class of its own
        raise RingstepError(f"{path} cannot be read as an ONNX model: {' '.join(str(error).split())[:200]}") from None


def _shrink(data: mmap.mmap, start: int, end: int, kind: int, location: str, depth: int) -> Iterator[bytes]:
    """A message's bytes, its large tensors replaced by references."""
    if depth > DEPTH * 3:
        raise ValueError("too deep")
    if kind == TENSOR:
        yield _shrink_tensor(data, start, end, location)
        return
    nested, kept = NESTED[kind], start
    for number, wire, tag, value, stop in _fields(data, start, end):
        if wire == 2 and number in nested and stop - value > INLINE_BYTES:
            yield data[kept:tag]
            inner = b"".join(_shrink(data, value, stop, nested[number], location, depth + 1))
            yield _varint(number << 3 | 2) + _varint(len(inner)) + inner
            kept = stop
    yield data[kept:end]


def _shrink_tensor(data: mmap.mmap, start: int, end: int, location: str) -> bytes:
    fields = list(_fields(data, start, end))
    dtype = next((data[value] for number, wire, _, value, _ in fields if number == DATA_TYPE and wire == 0), 0)
    large = [f for f in fields if f[4] - f[3] > INLINE_BYTES and f[1] == 2]
    payload = [f for f in large if f[0] == RAW_DATA or PACKED.get(f[0]) == dtype]
    holders = [f for f in fields if f[0] in (RAW_DATA, *PACKED)]
    if len(payload) != 1 or len(holders) != 1:
        return data[start:end]
    _, _, tag, value, stop = payload[0]
    reference = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, text in (("location", location), ("offset", str(value)), ("length", str(stop - value))):
        reference.external_data.add(key=key, value=text)
    # A later data_location overrides an earlier one, so the reference comes last.
    return data[start:tag] + data[stop:end] + reference.SerializeToString()


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[Field]:
    at = start
    while at < end:
        tag = at
        key, at = _read_varint(data, at)
        wire, value = key & 7, at
        if wire == 0:
            _, at = _read_varint(data, at)
        elif wire == 1:
            at += 8
        elif wire == 2:
            length, value = _read_varint(data, at)
            at = value + length
        elif wire == 5:
            at += 4
        else:
            raise ValueError("unknown wire type")
        if at > end:
            raise ValueError("cut off")
        yield key >> 3, wire, tag, value, at


def _read_varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
