"""Weights: where they lie, stored twice, left in floats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.rules.operators import dequantised
from sanitize.rules.subject import Hit, Subject, element
from sanitize.tensors import digest, nbytes
from sanitize.tensors import place as place_of

PROTOBUF_BYTES = 1 << 31
SMALLEST = 4096  # bytes; smaller constants are worth no finding
HEAD_ELEMENTS = 1 << 16


def constants(subject: Subject) -> Iterator[ir.Value]:
    """Every initializer that a node reads, at any depth."""
    for graph in graphs.every_graph(subject.model):
        for value in graph.initializers.values():
            if value.const_value is not None and (value.uses() or value.is_graph_output()):
                yield value


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
        places: set[object] = set()
        for value in group:
            assert value.const_value is not None
            where = place_of(value.const_value) or id(value.const_value)
            if where in places:
                continue  # two names for bytes that are stored once
            places.add(where)
            same = first.setdefault(digest(value.const_value), value)
            if same is not value:
                size = nbytes(value.const_value)
                yield Hit(str(value.name), f"{value.name} holds the same {size} bytes as {same.name}")


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
