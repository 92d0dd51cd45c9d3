"""Compute once what does not depend on the inputs, and never grow the file by it.

    Shape(x) ─ Gather ─┐                                       every value below a constant, or below a static
    Shape(x) ─ Gather ─┴─ Concat ─ Reshape    →    Reshape     dim, is known; the last known value of a chain
                                                               becomes an initializer, the rest is gone

A known value that is larger than the constants which go with it, and the nodes, stays as it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.evaluate import FOLDABLE, LIMIT, evaluate
from sanitize.passes import Change, Pass
from sanitize.target import Target
from sanitize.tensors import nbytes

NODE_BYTES = 64  # what a node takes in the file, without its names
PURSE = 1024  # bytes by which all folding of a model together may grow it
HELD = 64 << 20  # bytes of known values in memory at a time
SPENT = "ringstep.fold"
Known = dict[ir.Value, np.ndarray]
Entry = int | str
"""An entry of a shape: a number, or the name of a dim that is not static."""


def run(model: ir.Model, target: Target) -> list[Change]:
    """Lift Constant nodes, inline Ifs of a constant condition, fold values, settle the shapes of Reshapes."""
    changes = _lift(model)
    while inlined := _inline_ifs(model):
        changes += inlined
    known, entries = _known(model)
    return changes + _reshapes(model, entries, known) + _store(model, known)


def _lift(model: ir.Model) -> list[Change]:
    changes = []
    for node in graphs.every_node(model):
        if graphs.made_by(node.outputs[0] if node.outputs else None, "Constant") is None:
            continue
        value, graph = node.outputs[0], node.graph
        found = graphs.tensor(value)
        if found is None or value.is_graph_output() or not isinstance(graph, ir.Graph):
            continue
        name = value.name
        lifted = ir.Value(name=name, type=ir.TensorType(found.dtype), shape=_fixed(found), const_value=found)
        value.replace_all_uses_with(lifted)
        graphs.remove(node)
        value.name = None
        found.name = name
        graph.register_initializer(lifted)
        changes.append(Change(node.name or str(name), "Constant node became an initializer"))
    return changes


def _fixed(tensor: ir.TensorProtocol) -> ir.Shape:
    return ir.Shape(tensor.shape.numpy())


def _inline_ifs(model: ir.Model) -> list[Change]:
    changes = []
    for node in graphs.every_node(model):
        outer = node.graph
        if node.op_type != "If" or node.domain not in ("", "ai.onnx") or not isinstance(outer, ir.Graph):
            continue
        condition = graphs.array(node.inputs[0], 1)
        if condition is None or condition.size != 1:
            continue
        taken = "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"
        body = graphs.attribute(node, taken)
        for value in list(body.initializers.values()):
            del body.initializers[value.name]
            value.name = graphs.unique_name(outer, value.name)
            outer.register_initializer(value)
        results = list(body.outputs)
        body.outputs.clear()
        inner = list(body)
        body.remove(inner)
        for moved in inner:
            moved.name = graphs.unique_name(outer, moved.name or moved.op_type)
            for value in moved.outputs:
                if value.name:
                    value.name = graphs.unique_name(outer, value.name)
        outer.insert_before(node, inner)
        for old, new in zip(node.outputs, results, strict=True):
            graphs.replace(old, new)
        graphs.remove(node)
        changes.append(Change(node.name or "If", f"condition is constant: {taken} inlined"))
    return changes


def _known(model: ir.Model) -> tuple[Known, dict[ir.Value, list[Entry]]]:
    """Values that follow from constants and static dims; shapes of which some entries do."""
    known: Known = {}
    entries: dict[ir.Value, list[Entry]] = {}
    version, held = graphs.opset(model), 0

    def read(value: ir.Value) -> np.ndarray | None:
        found = known.get(value)
        return found if found is not None else graphs.array(value, LIMIT)

    for node in graphs.every_node(model):
        if node.domain not in ("", "ai.onnx") or not (node.op_type in FOLDABLE or node.op_type in ("Shape", "Size")):
            continue
        shape = _entries(node, entries, read)
        results: list[np.ndarray] | None = None
        if shape is not None:
            if all(isinstance(entry, int) for entry in shape[0]):
                results = [np.array(shape[0], np.int64).reshape(shape[1])]
            else:
                entries[node.outputs[0]] = shape[0]
        elif node.op_type in FOLDABLE:
            inputs = [None if value is None else read(value) for value in _until_unknown(node, read)]
            if len(inputs) == len(node.inputs):
                results = evaluate(node, inputs, version)
        size = sum(result.nbytes for result in results or [])
        if results is not None and (size <= PURSE or held + size <= HELD):
            held += size
            known.update(zip(node.outputs, results, strict=True))
    return known, entries


def _until_unknown(node: ir.Node, read) -> Iterator[ir.Value | None]:  # type: ignore[no-untyped-def]
    for value in node.inputs:
        if value is not None and read(value) is None:
            return
        yield value


def _entries(node: ir.Node, entries: dict[ir.Value, list[Entry]], read):  # type: ignore[no-untyped-def]
    """What shape arithmetic gives: its entries, and the shape they are in (a scalar or a vector); None: unknown."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if node.op_type in ("Shape", "Size"):
        if source.shape is None:
            return None
        dims: list[Entry] = [_entry(source, axis) for axis in range(len(source.shape))]
        if node.op_type == "Shape":
            picked = dims[slice(graphs.attribute(node, "start", 0), graphs.attribute(node, "end"))]
            return picked, (len(picked),)
        if not all(isinstance(dim, int) for dim in dims):
            return None
        return [int(np.prod([int(dim) for dim in dims], dtype=np.int64))], ()
    if not any(value in entries for value in node.inputs if value is not None):
        return None

    def part(value: ir.Value | None) -> list[Entry] | None:
        if value is None:
            return None
        if value in entries:
            return entries[value]
        found = read(value)
        integers = found is not None and found.dtype == np.int64 and found.ndim <= 1
        return [int(number) for number in found.reshape(-1)] if integers else None

    if node.op_type == "Concat":
        parts = [part(value) for value in node.inputs]
        if any(one is None for one in parts):
            return None
        joined = [entry for one in parts for entry in one or []]
        return joined, (len(joined),)
    if source not in entries:
        return None
    held, others = entries[source], [None if value is None else read(value) for value in node.inputs[1:]]
    if node.op_type == "Identity":
        return held, (len(held),)
    if any(value is not None and other is None for value, other in zip(node.inputs[1:], others, strict=True)):
        return None
    if node.op_type == "Gather" and others[0] is not None and others[0].ndim <= 1:
        chosen = [int(index) for index in others[0].reshape(-1)]
        if all(-len(held) <= index < len(held) for index in chosen):
            return [held[index] for index in chosen], others[0].shape
    elif node.op_type == "Slice" and len(others) >= 2 and all(o is None or o.size == 1 for o in others):
        start, stop = (int(other.reshape(-1)[0]) for other in others[:2])  # type: ignore[union-attr]
        step = int(others[3].reshape(-1)[0]) if len(others) > 3 and others[3] is not None else 1
        if step == 1:
            return (cut := held[slice(start, stop)]), (len(cut),)
    elif node.op_type == "Squeeze" and len(held) == 1:
        return held, ()
    elif node.op_type == "Unsqueeze" and len(held) == 1:
        return held, (1,)
    elif node.op_type == "Reshape" and len(held) == 1 and others[0] is not None and others[0].size <= 1:
        return held, others[0].shape and (1,)
    return None


def _entry(value: ir.Value, axis: int) -> Entry:
    assert value.shape is not None
    dim = value.shape[axis]
    if isinstance(dim, int):
        return dim
    return str(dim.value) if dim.value is not None else f"{id(value)}.{axis}"


def _reshapes(model: ir.Model, entries: dict[ir.Value, list[Entry]], known: Known) -> list[Change]:
    """Give a Reshape or Expand a constant shape where its result, or all but one dim of it, is static."""
    changes = []
    for node in graphs.every_node(model):
        made = graphs.made_by(node.outputs[0] if node.outputs else None, "Reshape", "Expand")
        shape = node.inputs[1] if made is not None and len(node.inputs) > 1 else None
        if made is None or shape is None or shape in known or graphs.tensor(shape) is not None:
            continue
        if shape.producer() is None:
            continue
        settled = graphs.dims(node.outputs[0])
        if settled is None and node.op_type == "Reshape":
            settled = _settle(node, entries.get(shape))
        if settled is None or (node.op_type == "Reshape" and graphs.dims(node.outputs[0]) and 0 in settled):
            continue
        node.replace_input_with(1, graphs.constant(node, f"{node.name}/shape", np.array(settled, np.int64)))
        if node.op_type == "Reshape":
            node.attributes.pop("allowzero", None)
        changes.append(Change(node.name or node.op_type, f"shape {list(settled)} is constant"))
    return changes


def _settle(node: ir.Node, shape: list[Entry] | None) -> tuple[int, ...] | None:
    """A constant that means the same as this shape: 0 copies a dim that stays in its place, one other may be -1."""
    data = node.inputs[0]
    if shape is None or data is None or data.shape is None:
        return None
    if 0 in shape:
        return None
    copied = [axis < len(data.shape) and isinstance(e, str) and _entry(data, axis) == e for axis, e in enumerate(shape)]
    open_ = [axis for axis, entry in enumerate(shape) if isinstance(entry, str) and not copied[axis]]
    if len(open_) + shape.count(-1) > 1:
        return None
    return tuple(0 if copied[axis] else -1 if isinstance(entry, str) else entry for axis, entry in enumerate(shape))


def _store(model: ir.Model, known: Known) -> list[Change]:
    """Make initializers of the known values that others read, where the file does not grow by it."""
    nodes = list(dict.fromkeys(node for value in known if (node := value.producer()) is not None))
    credit = _credit(nodes)
    purse = PURSE - model.graph.meta.get(SPENT, 0)
    gone: set[ir.Node] = set()
    stored: list[ir.Value] = []
    for node in reversed(nodes):
        needed = [v for v in node.outputs if v.is_graph_output() or any(use.node not in gone for use in v.uses())]
        if node.op_type == "Identity" and node.outputs[0].is_graph_output():
            continue
        cost = max(0, sum(known[value].nbytes for value in needed) - credit[node])
        if cost <= purse:
            purse -= cost
            gone.add(node)
            stored += needed
    model.graph.meta[SPENT] = PURSE - purse
    changes = []
    for value in reversed(stored):
        node = value.producer()
        assert node is not None
        graphs.replace(value, graphs.constant(node, value.name or node.op_type, known[value]))
    for node in nodes:
        if node in gone:
            changes.append(Change(node.name or node.op_type, f"{node.op_type} of constants folded"))
    graphs.remove_all(gone)
    return changes


def _credit(nodes: list[ir.Node]) -> dict[ir.Node, int]:
    """Bytes of the file that go with each node: its own, and those of the constants that nothing else reads."""
    credit: dict[ir.Node, int] = {}
    counts: dict[ir.Value, int] = {}
    for node in nodes:
        credit[node] = NODE_BYTES
        for value in dict.fromkeys(node.inputs):
            if value is None:
                continue
            if value not in counts:
                counts[value] = len(value.uses()) + value.is_graph_output()
            if counts[value] != sum(other is value for other in node.inputs):
                continue
            maker, found = value.producer(), graphs.tensor(value)
            if found is not None:
                credit[node] += nbytes(found)
            elif maker is not None and len(maker.outputs) == 1:
                credit[node] += credit.get(maker, 0)
    return credit


# Each value is exact, but ONNX Runtime multiplies by a constant weight in another order than by a computed one.
PASS = Pass("fold", "compute what is constant, shapes above all, and never grow the file by it", run, min_db=100)
