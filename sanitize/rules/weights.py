"""Weights: where they lie, stored twice, left in floats."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.rules.operators import dequantised
from sanitize.rules.subject import Hit, Subject, element

PROTOBUF_BYTES = 1 << 31
SMALLEST = 4096  # bytes; smaller constants are worth no finding
HEAD_ELEMENTS = 1 << 16
CHUNK = 1 << 22


def constants(subject: Subject) -> Iterator[ir.Value]:
    """Every initializer that a node reads, at any depth."""
    for graph in graphs.every_graph(subject.model):
        for value in graph.initializers.values():
            if value.const_value is not None and (value.uses() or value.is_graph_output()):
                yield value


def nbytes(tensor: ir.TensorProtocol) -> int:
    """Bytes as stored; types below a byte are packed."""
    return 0 if tensor.dtype == ir.DataType.STRING else -(-tensor.size * tensor.dtype.bitwidth // 8)


def inline(subject: Subject) -> Iterator[Hit]:
    """Weights inside the protobuf that make it larger than protobuf can read."""
    if subject.path is None:
        return
    size = subject.path.stat().st_size
    if size >= PROTOBUF_BYTES:
        yield Hit(subject.path.name, f"the file itself has {size} bytes; a protobuf ends at {PROTOBUF_BYTES}")


def duplicates(subject: Subject) -> Iterator[Hit]:
    """Tensors of equal type, shape and bytes, stored twice."""
    groups: dict[tuple[object, ...], list[ir.Value]] = defaultdict(list)
    for value in constants(subject):
        tensor = value.const_value
        if tensor is not None and nbytes(tensor) >= SMALLEST:
            groups[(tensor.dtype, tuple(tensor.shape.numpy()))].append(value)
    for group in groups.values():
        if len(group) < 2:
            continue
        first: dict[bytes, ir.Value] = {}
        places: set[tuple[str, int]] = set()
        for value in group:
            assert value.const_value is not None
            if isinstance(value.const_value, ir.ExternalTensor):
                place = (str(value.const_value.path), value.const_value.offset or 0)
                if place in places:
                    continue  # two names for bytes that are stored once
                places.add(place)
            same = first.setdefault(digest(value.const_value), value)
            if same is not value:
                size = nbytes(value.const_value)
                yield Hit(str(value.name), f"{value.name} holds the same {size} bytes as {same.name}")


def digest(tensor: ir.TensorProtocol) -> bytes:
    """Hash a tensor's bytes; those of a file are read a chunk at a time."""
    found = hashlib.blake2b(digest_size=16)
    if not isinstance(tensor, ir.ExternalTensor):
        found.update(tensor.tobytes())
        return found.digest()
    left = nbytes(tensor)
    with Path(tensor.path).open("rb") as stream:
        stream.seek(tensor.offset or 0)
        while left:
            chunk = stream.read(min(left, CHUNK))
            if not chunk:
                break
            found.update(chunk)
            left -= len(chunk)
    return found.digest()


def float_head(subject: Subject) -> Iterator[Hit]:
    """Large float weights in a model whose other weights are quantised."""
    floating: list[tuple[int, Hit]] = []
    total = 0
    for place in subject.ops("MatMul", "Gemm", "Conv"):
        weight = place.node.inputs[1]
        stored = dequantised(weight)
        tensor = graphs.tensor(stored if stored is not None else weight)
        if tensor is None:
            continue
        total += nbytes(tensor)
        if stored is None and tensor.size >= HEAD_ELEMENTS:
            what = f"the weight {list(tensor.shape.numpy())} is {element(weight)}"
            floating.append((nbytes(tensor), Hit(place.name, what, place.where)))
    if not subject.quantised and sum(size for size, _ in floating) == total:
        return
    for size, hit in floating:
        yield Hit(hit.node, f"{hit.what}: {100 * size / total:.0f} % of all weight bytes", hit.where)
