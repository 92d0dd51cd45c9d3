"""int64 to int32, float64 to float32, chains of casts to one: what the NPU computes with, and half the bytes.

For qnn-htp a set of int64 values that ONNX ties to one type becomes int32 where every operator takes that. Where one
insists on int64 (Reshape's shape, ScatterND's indices, what ArgMax and TopK return), inputs and outputs of the graph
become int32 all the same, with a Cast at that operator; within the graph nothing is gained there, and nothing changes.
Constants are checked to fit; sums and products of them are taken to fit, as the NPU does. Slices and pads keep int64:
the compiler reads them as parameters.

HTP takes bool nearly everywhere: inputs, outputs, logic, Where's condition, and Reshape, Concat, Gather and their kind.
Where it refuses bools, they go through int32 or float, and uint8 becomes float through int32 (sanitize/casts.py).

float64 becomes float32, and chains of casts collapse where the first one is exact, on every target.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir as ir
from onnx import defs

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.casts import collapse, free_bools, widen_small
from sanitize.passes import Change, Pass
from sanitize.stream import chunks, mapped
from sanitize.target import Target

D = ir.DataType
PARAMETERS = {"Slice": 1, "Pad": 1, "OneHot": 0, "Unique": 0, "GatherND": 0}
"""From this input on, int64 stays: compile-time parameters, kernels that ONNX Runtime lacks for int32, and GatherND,
which HTP refuses in int64, and in int32 takes and does not compute."""
CONSTANTS = ("Constant", "ConstantOfShape")
INT32 = np.iinfo(np.int32)
Slot = tuple[ir.Node, int]


def run(model: ir.Model, target: Target) -> list[Change]:
    """Narrow what the target gains from. Raises RingstepError naming a constant that does not fit, and its value."""
    changes = _float64(model)
    if target.htp:
        changes += _int64(model)
        changes += free_bools(model)
        changes += widen_small(model)
    return changes + collapse(model, target.htp)


# float64


def _float64(model: ir.Model) -> list[Change]:
    changes = []
    for graph in graphs.every_graph(model):
        for value in (*graph.inputs, *graph.initializers.values()):
            if value.dtype != D.DOUBLE:
                continue
            kind = "input" if value.is_graph_input() else "constant"
            changes.append(Change(value.name or "", f"{kind} float64 -> float32"))
            value.dtype = D.FLOAT
            if value.const_value is not None:
                value.const_value = _to_float32(value.const_value, value.name)
    for node in graphs.every_node(model):
        touched = False
        for output in node.outputs:
            if output.dtype == D.DOUBLE:
                output.dtype, touched = D.FLOAT, True
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref():
                continue
            if name in ("to", "dtype") and attribute.type == ir.AttributeType.INT and attribute.value == D.DOUBLE:
                node.attributes[name] = ir.AttrInt64(name, D.FLOAT)
            elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == D.DOUBLE:
                node.attributes[name] = ir.AttrTensor(name, _to_float32(attribute.as_tensor(), node.name))
            else:
                continue
            touched = True
        if touched:
            changes.append(Change(node.name or node.op_type, "float64 -> float32"))
    return changes


def _to_float32(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    most, lowest = np.finfo(np.float32).max, np.finfo(np.float64).max
    for chunk in chunks(tensor):
        # The lowest float64 is a mask and becomes the lowest float32.
        wrong = np.isfinite(chunk) & (np.abs(chunk) > most) & (np.abs(chunk) < lowest)
        if wrong.any():
            raise RingstepError(f"tensor {name!r}: {chunk[wrong][0]:g} does not fit in float32; scale the model")
    return mapped(tensor, D.FLOAT, _clip_float)


def _clip_float(chunk: np.ndarray) -> np.ndarray:
    most = np.finfo(np.float32).max
    return np.where(np.isinf(chunk), chunk, np.clip(chunk, -most, most)).astype(np.float32)


# int64


class Ties:
    """Sets of int64 values that must have one type, and where ONNX insists on int64."""

    def __init__(self) -> None:
        self.parent: dict[ir.Value, ir.Value] = {}
        self.insists: set[Slot] = set()
        """Inputs of nodes that must be int64."""
        self.made: set[ir.Value] = set()
        """What nodes return as int64 only."""
        self.blocked: set[ir.Value] = set()

    def find(self, value: ir.Value) -> ir.Value:
        root = value
        while (above := self.parent.setdefault(root, root)) is not root:
            root = above
        while self.parent[value] is not root:
            self.parent[value], value = root, self.parent[value]
        return root

    def tie(self, values: list[ir.Value | None]) -> None:
        present = [value for value in values if value is not None]
        integers = [value for value in present if value.dtype == D.INT64]
        for value in integers:
            self.parent[self.find(value)] = self.find(integers[0])
        if integers and len(integers) < len(present):
            # One of them has an unknown type.
            self.blocked.add(integers[0])


def _int64(model: ir.Model) -> list[Change]:
    ties = Ties()
    for graph in graphs.every_graph(model):
        for value in (*graph.inputs, *graph.initializers.values()):
            if value.dtype == D.INT64:
                ties.find(value)
    versions = model.graph.opset_imports
    for node in graphs.every_node(model):
        _tie(node, ties, versions.get(node.domain, 1))
    blocked = {ties.find(value) for value in ties.blocked}
    sets: dict[ir.Value, list[ir.Value]] = defaultdict(list)
    for value in ties.parent:
        sets[ties.find(value)].append(value)
    outer = {*model.graph.inputs, *model.graph.outputs}
    changes: list[Change] = []
    for root, members in sets.items():
        if root in blocked:
            continue
        constants = [value for value in members if _is_constant(value)]
        edges = any(value in ties.made for value in members) or any(
            (use.node, use.idx) in ties.insists
            for value in members if value not in constants for use in value.uses()
        )  # fmt: skip
        if outer.isdisjoint(members) and (edges or not _free_uses(members, ties)):
            continue
        beyond = [value for value in constants if not _fits(value)]
        # Sentinels of exporters, such as the logarithm of 0 as an integer, that are chosen away while folding.
        if beyond and (computed := _computed(model)) and all(_only_reads(value, computed) for value in beyond):
            continue
        for value in members:
            changes += _narrow(value, ties, value in outer)
    return changes


def _is_constant(value: ir.Value) -> bool:
    node = value.producer()
    return (node is not None and node.op_type == "Constant") or (value.is_initializer() and not value.is_graph_input())


def _fits(value: ir.Value) -> bool:
    tensor = graphs.tensor(value)
    return tensor is None or not any(_beyond(chunk).any() for chunk in chunks(tensor))


def _beyond(chunk: np.ndarray) -> np.ndarray:
    return (chunk < INT32.min) | (chunk > INT32.max)


def _computed(model: ir.Model) -> set[ir.Node]:
    """The nodes that compute constants of constants: runtimes fold them before a compiler sees them."""
    found: set[ir.Node] = set()
    for node in graphs.every_node(model):
        bodies = any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())
        fixed = (v is None or _is_constant(v) or v.producer() in found for v in node.inputs)
        if not bodies and node.inputs and all(fixed):
            found.add(node)
    return found


def _only_reads(value: ir.Value, nodes: set[ir.Node]) -> bool:
    return not value.is_graph_output() and all(node in nodes for node in graphs.users(value))


def _free_uses(members: list[ir.Value], ties: Ties) -> bool:
    """Whether anything at all reads these values without insisting on int64."""
    return any(
        value.is_graph_output() or any((use.node, use.idx) not in ties.insists for use in value.uses())
        for value in members
    )


def _tie(node: ir.Node, ties: Ties, version: int) -> None:
    """Tie a node's int64 inputs and outputs as its schema says."""
    for output in node.outputs:
        if output.dtype == D.INT64:
            ties.find(output)
    if node.op_type in ("If", "Loop", "Scan") and node.domain in ("", "ai.onnx"):
        _tie_bodies(node, ties)
        return
    if node.op_type in CONSTANTS and node.domain in ("", "ai.onnx"):
        ties.insists.update((node, i) for i, _ in enumerate(node.inputs))
        return
    if node.op_type == "Cast":
        return
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not any(v is not None and v.dtype == D.INT64 for v in (*node.inputs, *node.outputs)):
        return
    try:
        schema = defs.get_schema(node.op_type, version, domain)
    except defs.SchemaError:
        schema = None
    groups: dict[str, list[ir.Value | None]] = defaultdict(list)
    fed: set[str] = set()
    first_parameter = PARAMETERS.get(node.op_type, len(node.inputs)) if not domain else len(node.inputs)
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        slot = schema.inputs[min(index, len(schema.inputs) - 1)] if schema and schema.inputs else None
        if slot is None or not slot.is_homogeneous or "tensor(int32)" not in slot.types or index >= first_parameter:
            if value.dtype == D.INT64:
                ties.insists.add((node, index))
            continue
        groups[slot.type_str].append(value)
        fed.add(slot.type_str)
    for index, value in enumerate(node.outputs):
        slot = schema.outputs[min(index, len(schema.outputs) - 1)] if schema and schema.outputs else None
        if slot is not None and slot.is_homogeneous and slot.type_str in fed and "tensor(int32)" in slot.types:
            groups[slot.type_str].append(value)
        elif value.dtype == D.INT64:
            ties.made.add(value)
    for values in groups.values():
        ties.tie(values)


def _tie_bodies(node: ir.Node, ties: Ties) -> None:
    bodies = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    if node.op_type == "If":
        for index, output in enumerate(node.outputs):
            ties.tie([output, *(body.outputs[index] for body in bodies)])
        return
    (body,) = bodies
    if node.op_type == "Loop":
        if node.inputs and node.inputs[0] is not None and node.inputs[0].dtype == D.INT64:
            ties.insists.add((node, 0))
        if body.inputs:
            ties.blocked.update({body.inputs[0]} if body.inputs[0].dtype == D.INT64 else ())
        carried = list(node.inputs[2:])
        for index, value in enumerate(carried):
            ties.tie([value, body.inputs[2 + index]])
        for index, output in enumerate(node.outputs):
            ties.tie([output, body.outputs[1 + index], *carried[index : index + 1]])
        return
    first = len(node.inputs) - len(body.inputs)  # a Scan of opset 8 begins with lengths
    ties.insists.update((node, index) for index in range(first))
    given = node.inputs[first:]
    states = len(given) - int(graphs.attribute(node, "num_scan_inputs", 0))
    for value, inner in zip(given, body.inputs, strict=True):
        ties.tie([value, inner])
    for index, output in enumerate(node.outputs):
        ties.tie([output, body.outputs[index], *(given[index : index + 1] if index < states else [])])


def _narrow(value: ir.Value, ties: Ties, outer: bool) -> list[Change]:
    """Make one value int32: its constant, its node, or a Cast behind that; and casts where int64 is wanted."""
    node, name = value.producer(), value.name or ""
    kept = [slot for slot in ((use.node, use.idx) for use in value.uses()) if slot in ties.insists]
    if _is_constant(value) and kept and not value.is_graph_output():
        if not _free_uses([value], ties):
            return []
        tensor = graphs.tensor(value)
        assert tensor is not None
        copy = graphs.initializer(value, f"{name}_int32", _to_int32(tensor, name))
        graphs.replace(value, copy)
        for reader, index in kept:
            reader.replace_input_with(index, value)
        return [Change(name, "constant int64 -> int32")]
    what = "constant" if _is_constant(value) else "tensor"
    if outer:
        what = "input" if value.is_graph_input() else "output"
    if value in ties.made:
        assert node is not None
        cast = _cast_behind(value, kept)
        return [Change(cast.name or name, f"{what} int64 -> int32")] if outer else []
    if value.const_value is not None and value.is_initializer():
        value.const_value = _to_int32(value.const_value, name)
    elif node is not None and node.op_type in CONSTANTS:
        tensor = ir.convenience.get_const_tensor(value) if node.op_type == "Constant" else None
        tensor = tensor or graphs.attribute(node, "value")
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", _to_int32(tensor, name))
    elif node is not None and node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", D.INT32)
    value.dtype = D.INT32
    for reader, index in kept:
        wide = graphs.insert(reader, "Cast", [value], {"to": D.INT64}, name=f"{name}_int64", like=value, dtype=D.INT64)
        reader.replace_input_with(index, wide)
    return [Change(name, f"{what} int64 -> int32")]


def _cast_behind(value: ir.Value, kept: list[Slot]) -> ir.Value:
    """A Cast to int32 after the node that makes `value`; everyone reads that but those that insist on int64."""
    node = value.producer()
    assert node is not None and isinstance(node.graph, ir.Graph)
    wide = ir.node("Cast", [value], {"to": D.INT32}, name=graphs.unique_name(node.graph, f"{value.name}_int32"))
    cast = wide.outputs[0]
    cast.name = graphs.unique_name(node.graph, f"{value.name}_int32_output")
    cast.dtype, cast.shape = D.INT32, value.shape
    node.graph.insert_after(node, wide)
    graphs.replace(value, cast)
    for reader, index in [(wide, 0), *kept]:
        reader.replace_input_with(index, value)
    return cast


def _to_int32(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    for chunk in chunks(tensor):
        wrong = _beyond(chunk)
        if wrong.any():
            raise RingstepError(f"tensor {name!r}: {chunk[wrong][0]} does not fit in int32, the NPU's integers")
    return mapped(tensor, D.INT32, lambda chunk: chunk.astype(np.int32))


PASS = Pass("narrow-types", "int64 to int32, float64 to float32, chains of casts to one cast", run, min_db=90.0)
