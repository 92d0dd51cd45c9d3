"""Store every weight once: initializers of equal bytes become one, in every graph.

    wte.weight ──────── Gather           wte.weight ─┬─ Gather          equal bytes: one initializer;
    lm_head.weight ──── MatMul     →                 └─ MatMul          in two bodies of an If: one place in the file

Only tensors of one type and shape are compared: by where they lie, by a sample, then by a hash of all bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target
from sanitize.tensors import Reader, digest, nbytes, place
from sanitize.wire import INLINE_BYTES

SAMPLE = 4096  # bytes at the start, in the middle and at the end
Kind = tuple[Hashable, ...]


def run(model: ir.Model, target: Target) -> list[Change]:
    """Replace every initializer by an equal one of the same graph or a graph around it; share what siblings hold."""
    kinds: dict[Kind, list[ir.Value]] = {}
    depth: dict[ir.Graph, tuple[ir.Graph, ...]] = {}
    for graph, path in graphs.scopes(model.graph):
        depth[graph] = path
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype != ir.DataType.STRING and not value.is_graph_input():
                kinds.setdefault((tensor.dtype, *tensor.shape.numpy()), []).append(value)
    changes: list[Change] = []
    for values in kinds.values():
        for equal in _equal(values):
            changes += _merge(equal, depth)
    return changes


def _equal(values: list[ir.Value]) -> Iterator[list[ir.Value]]:
    """Groups of two and more whose bytes are equal."""
    if len(values) < 2:
        return
    places: dict[Hashable, list[ir.Value]] = {}
    for value in values:
        tensor = _tensor(value)
        places.setdefault(place(tensor) or id(tensor), []).append(value)
    samples: dict[bytes, list[list[ir.Value]]] = {}
    for group in places.values():
        samples.setdefault(_sample(_tensor(group[0])) if len(places) > 1 else b"", []).append(group)
    for alike in samples.values():
        contents: dict[bytes, list[ir.Value]] = {}
        for group in alike:
            contents.setdefault(digest(_tensor(group[0])) if len(alike) > 1 else b"", []).extend(group)
        yield from (group for group in contents.values() if len(group) > 1)


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value


def _sample(tensor: ir.TensorProtocol) -> bytes:
    size = nbytes(tensor)
    with Reader(tensor) as reader:
        if size <= 3 * SAMPLE:
            return reader.read(0, size)
        return b"".join(reader.read(start, SAMPLE) for start in (0, size // 2, size - SAMPLE))


def _merge(equal: list[ir.Value], depth: dict[ir.Graph, tuple[ir.Graph, ...]]) -> list[Change]:
    changes = []
    kept: dict[ir.Graph, ir.Value] = {}
    for value in equal:
        graph, tensor = value.graph, equal[0].const_value
        assert isinstance(graph, ir.Graph) and tensor is not None
        other = next((kept[around] for around in depth[graph] if around in kept), None)
        name = str(value.name)
        if other is not None and not value.is_graph_output():
            value.replace_all_uses_with(other)
            del graph.initializers[name]
            changes.append(Change(name, f"equal to {other.name}, which is used instead"))
            continue
        kept.setdefault(graph, value)
        held = value.const_value
        if nbytes(tensor) < INLINE_BYTES:
            continue
        if held is not tensor and held is not None and (place(held) is None or place(held) != place(tensor)):
            value.const_value = tensor
            changes.append(Change(name, f"equal to {equal[0].name}: stored once"))
    return changes


PASS = Pass("duplicates", "store weights of equal bytes once", run)
