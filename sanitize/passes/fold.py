"""Compute once what does not depend on the inputs, and never grow the file by it.

    Shape(x) ─ Gather ─┐                                       every value below a constant, or below a static
    Shape(x) ─ Gather ─┴─ Concat ─ Reshape    →    Reshape     dim, is known; the last known value of a chain
                                                               becomes an initializer, the rest is gone

A known value that is larger than the constants which go with it, and the nodes, stays as it is computed.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.evaluate import FOLDABLE, LIMIT, evaluate
from sanitize.passes import Change, Pass
from sanitize.shape_arithmetic import Entry, settle, shape_entries
from sanitize.target import Target
from sanitize.tensors import nbytes

NODE_BYTES = 64  # what a node takes in the file, without its names
PURSE = 1024  # bytes by which all folding of a model together may grow it
HELD = 64 << 20  # bytes of known values in memory at a time
SPENT = "ringstep.fold"
Known = dict[ir.Value, np.ndarray]


def run(model: ir.Model, target: Target) -> list[Change]:
    """Lift Constant nodes, inline Ifs of a constant condition, fold values, settle the shapes of Reshapes."""
    changes = _lift(model)
    while inlined := _inline_ifs(model):
        changes += inlined
    known, entries = known_values(model)
    return changes + _reshapes(model, entries, known) + _store(model, known)


def _lift(model: ir.Model) -> list[Change]:
    changes, gone = [], []
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
        gone.append(node)
        value.name = None
        found.name = name
        graph.register_initializer(lifted)
        changes.append(Change(node.name or str(name), "Constant node became an initializer"))
    graphs.remove_all(gone)
    return changes


def _fixed(tensor: ir.TensorProtocol) -> ir.Shape:
    return ir.Shape(tensor.shape.numpy())


def _inline_ifs(model: ir.Model) -> list[Change]:
    changes = []
    for node in graphs.every_node(model):
        outer = node.graph
        # An If in a branch that has just been dropped reads nothing any more.
        if node.op_type != "If" or not node.inputs or not isinstance(outer, ir.Graph):
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


def known_values(model: ir.Model) -> tuple[Known, dict[ir.Value, list[Entry]]]:
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
        shape = shape_entries(node, entries, read)
        results: list[np.ndarray] | None = None
        if shape is not None:
            if all(isinstance(entry, int) for entry in shape[0]):
                dtype = np.bool_ if node.op_type == "Equal" else np.int64
                results = [np.array(shape[0], dtype).reshape(shape[1])]
            else:
                entries[node.outputs[0]] = shape[0]
        elif node.op_type in FOLDABLE and all(v is None or v in known or _small(v) for v in node.inputs):
            results = evaluate(node, [None if value is None else read(value) for value in node.inputs], version)
        size = sum(result.nbytes for result in results or [])
        if results is not None and (size <= PURSE or held + size <= HELD):
            held += size
            known.update(zip(node.outputs, results, strict=True))
    return known, entries


def _small(value: ir.Value) -> bool:
    found = graphs.tensor(value)
    return found is not None and found.size <= LIMIT and found.dtype != ir.DataType.STRING


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
            settled = settle(node, entries.get(shape))
        if settled is None or (node.op_type == "Reshape" and graphs.dims(node.outputs[0]) and 0 in settled):
            continue
        node.replace_input_with(1, graphs.constant(node, f"{node.name}/shape", np.array(settled, np.int64)))
        if node.op_type == "Reshape":
            node.attributes.pop("allowzero", None)
        changes.append(Change(node.name or node.op_type, f"shape {list(settled)} is constant"))
    return changes


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
