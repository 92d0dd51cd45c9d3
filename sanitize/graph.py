"""Helpers that every pass uses: walk all graphs, read constants, make, replace and remove nodes.

Values that an If or Loop body reads from the graph around it are the same ir.Value objects, so what replaces a value
reaches every use, at any depth.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from sanitize.tensors import to_numpy

NAMES, ROOT = "ringstep.names", "ringstep.root"
MOST_COPIES = 1 << 26
CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")
SMALL = 1 << 20  # elements; larger constants are weights, which passes do not read


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection meanwhile: it would walk the millions of objects of a 100 k node graph again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def every_graph(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph, then every subgraph at any depth."""
    yield model.graph
    yield from model.graph.subgraphs()


def scopes(graph: ir.Graph, around: tuple[ir.Graph, ...] = ()) -> Iterator[tuple[ir.Graph, tuple[ir.Graph, ...]]]:
    """Every graph with the graphs whose values it may read, itself included."""
    path = (*around, graph)
    yield graph, path
    for node in graph:
        for body in bodies(node):
            yield from scopes(body, path)


def every_node(model: ir.Model) -> Iterator[ir.Node]:
    """Every node at any depth, in order; nodes may be added and removed meanwhile."""
    found: list[ir.Node] = []
    _collect(model.graph, found)
    yield from found


def _collect(graph: ir.Graph, found: list[ir.Node]) -> None:
    for node in graph:
        found.append(node)
        for body in bodies(node):
            _collect(body, found)


def opset(model: ir.Model) -> int:
    """The version of the default operator domain."""
    return model.graph.opset_imports.get("", 1)


def tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The constant behind a value: an initializer's that no caller can override, or a Constant node's."""
    if value is None:
        return None
    if value.is_initializer():
        return None if value.is_graph_input() else value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    held = node.attributes.get("value")
    if held is not None and held.type == ir.AttributeType.TENSOR:
        return held.value
    try:
        return ir.convenience.get_const_tensor(value)
    except ValueError:
        return None  # a sparse one, or no valid one


def array(value: ir.Value | None, limit: int = SMALL) -> np.ndarray | None:
    """The constant behind a value as an array; None if it is no constant or has more than `limit` elements."""
    found = tensor(value)
    if found is None or found.size > limit or found.dtype == ir.DataType.STRING:
        return None
    return to_numpy(found)


def scalar(value: ir.Value | None) -> float | None:
    """The constant behind a value if it is a single number."""
    found = array(value, 1)
    return None if found is None or found.size != 1 else float(found.reshape(-1)[0])


def uses(model: ir.Model, dtype: ir.DataType) -> bool:
    """Whether any value that a node makes has this type."""
    return any(value.dtype == dtype for node in every_node(model) for value in node.outputs)


def dims(value: ir.Value | None) -> tuple[int, ...] | None:
    """The static shape of a value, None if any of it is unknown."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(dim) for dim in value.shape)  # type: ignore[arg-type]


def constant(near: ir.Node | ir.Value | ir.Graph, name: str, values: np.ndarray) -> ir.Value:
    """Add an initializer to the graph that holds `near` (a node, or another constant); its name is made unique."""
    # ir.tensor takes ten times as long.
    return initializer(near, name, ir.Tensor(np.ascontiguousarray(values).reshape(values.shape)))


def initializer(near: ir.Node | ir.Value | ir.Graph, name: str, data: ir.TensorProtocol) -> ir.Value:
    """As constant, for a tensor that may lie in a file or be computed when it is written."""
    graph = near if isinstance(near, ir.Graph) else _graph(near)
    data.name = unique_name(graph, name)
    shape, kind = ir.Shape(data.shape.numpy()), ir.TensorType(data.dtype)
    value = ir.Value(name=data.name, shape=shape, type=kind, const_value=data)
    graph.register_initializer(value)
    return value


def insert(
    before: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    name: str,
    like: ir.Value | None = None,
    dtype: ir.DataType | None = None,
    shape: Sequence[Any] | ir.Shape | None = None,
    domain: str = "",
) -> ir.Value:
    """Add a node of one output before another one; type and shape are those of `like` unless given."""
    graph = _graph(before)
    node = ir.node(op, list(inputs), attributes or {}, domain=domain, name=unique_name(graph, name))
    output = node.outputs[0]
    output.name = unique_name(graph, f"{name}_output")
    kind = dtype or (like.dtype if like is not None else None)
    output.type = ir.TensorType(kind) if kind is not None else None
    known = shape if shape is not None else like.shape if like is not None else None
    output.shape = ir.Shape(known) if known is not None else None
    graph.insert_before(before, node)
    return output


def reshape(before: ir.Node, x: ir.Value, shape: Sequence[int], *, name: str) -> ir.Value:
    """Add a Reshape to a static shape before a node."""
    to = constant(before, f"{name}_shape", np.array(shape, np.int64))
    return insert(before, "Reshape", [x, to], name=name, dtype=x.dtype, shape=shape)


def split(before: ir.Node, x: ir.Value, sizes: Sequence[int], axis: int, *, name: str) -> tuple[ir.Value, ...]:
    """Add a Split of a value of known rank before a node; returns the parts."""
    graph = _graph(before)
    lengths = constant(before, f"{name}_sizes", np.array(sizes, np.int64))
    node = ir.node("Split", [x, lengths], {"axis": axis}, num_outputs=len(sizes), name=unique_name(graph, name))
    assert x.shape is not None, f"the rank of {x.name} is unknown"
    for i, (size, part) in enumerate(zip(sizes, node.outputs, strict=True)):
        shape = list(x.shape)
        shape[axis] = int(size)
        part.name = unique_name(graph, f"{name}_output_{i}")
        part.shape, part.type = ir.Shape(shape), x.type
    graph.insert_before(before, node)
    return tuple(node.outputs)


def replace(old: ir.Value, new: ir.Value) -> None:
    """Put `new` wherever `old` was read or returned; a graph output keeps its name."""
    if old is new:
        return
    if not old.is_graph_output():
        old.replace_all_uses_with(new)
        return
    node, other = old.producer(), new.producer()
    assert node is not None, f"{old.name} is an input"
    if new.is_graph_output() or other is None or other.graph is not node.graph:
        # Two outputs may not be one value, and an output may not be an input.
        new = insert(node, "Identity", [new], name=f"{node.name or node.op_type}/copy", like=old)
    name = old.name
    if new.type is None:
        new.type = old.type
    if new.shape is None:
        new.shape = old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = unique_name(_graph(node), f"{name}_replaced")
    new.name = name


def merge_shape(kept: ir.Value, other: ir.Value) -> None:
    """Let a value know what is known of the same tensor under another name; inputs and outputs stay as declared."""
    if kept.type is None:
        kept.type = other.type
    declared = kept.is_graph_input() or kept.is_graph_output()
    if not declared and other.shape is not None and (kept.shape is None or not kept.shape.is_static()):
        kept.shape = other.shape.copy() if kept.shape is None or other.shape.is_static() else kept.shape


def remove(node: ir.Node) -> None:
    """Take out a node whose outputs nothing uses."""
    remove_all([node])


def remove_all(nodes: Iterable[ir.Node]) -> None:
    """Take out nodes whose outputs only they themselves use; far quicker than one at a time."""
    by_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in nodes:
        by_graph.setdefault(_graph(node), []).append(node)
        detach(node)
    for graph, members in by_graph.items():
        graph.remove(members, safe=True)


def swap(node: ir.Node, new: ir.Value) -> None:
    """Put a new value in the place of a node's first output, and take out what then has no use."""
    old = node.outputs[0]
    replace(old, new)
    prune(old)


def prune(value: ir.Value | None) -> None:
    """Take out a value that nothing reads, with the node that makes it, then what only that node read."""
    pending = [value]
    while pending:
        value = pending.pop()
        if value is None or value.uses() or value.is_graph_input() or value.is_graph_output():
            continue
        node = value.producer()
        if node is None:
            if value.is_initializer() and isinstance(value.graph, ir.Graph) and value.name:
                del value.graph.initializers[value.name]
        elif node.graph is not None and not any(v.uses() or v.is_graph_output() for v in node.outputs):
            pending += dict.fromkeys(node.inputs)
            remove(node)


def detach(node: ir.Node) -> None:
    """Let go of all that a node reads; what its bodies read would otherwise stay in use for ever."""
    node.resize_inputs(0)
    for body in bodies(node):
        for inner in body.all_nodes():
            inner.resize_inputs(0)


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs in a node's attributes."""
    found: list[ir.Graph] = []
    if not node.attributes:
        return found
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


def users(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, each once."""
    return list(dict.fromkeys(use.node for use in value.uses()))


def sole_user(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value which is no graph output."""
    found = users(value)
    return found[0] if len(found) == 1 and not value.is_graph_output() else None


def made_by(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """The node that makes a value if it is one of these operators of the default domain."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in ops and node.domain in ("", "ai.onnx") else None


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """An attribute's plain value."""
    found = node.attributes.get(name)
    return default if found is None or found.is_ref() else found.value


def dequantised(value: ir.Value | None) -> ir.Value | None:
    """The quantised tensor behind a value that a DequantizeLinear makes."""
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and node.op_type == "DequantizeLinear" else None


def unique_name(graph: ir.Graph, wanted: str) -> str:
    """A name that no value and no node has, in any graph of the model."""
    root = _root(graph)
    counts: dict[str, int] | None = root.meta.get(NAMES)  # name: the number to try next
    if counts is None:
        owners = (root, *root.subgraphs())
        counts = {v.name: 1 for graph in owners for v in (*graph.inputs, *graph.initializers.values()) if v.name}
        for node in root.all_nodes():
            counts.update((value.name, 1) for value in node.outputs if value.name)
            if node.name:
                counts[node.name] = 1
        root.meta[NAMES] = counts
    name = wanted
    while name in counts:
        name = f"{wanted}_{counts[wanted]}"
        counts[wanted] += 1
    counts[name] = 1
    return name


def _graph(node: ir.Node | ir.Value) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph), f"{node.name} is in no graph"
    return node.graph


def _root(graph: ir.Graph) -> ir.Graph:
    root: ir.Graph = graph.meta.get(ROOT, graph)
    return root


def adopt(model: ir.Model) -> None:
    """Tell every subgraph which model it belongs to: names are unique over all of them."""
    for graph in every_graph(model):
        graph.meta[ROOT] = model.graph


def infer_types(model: ir.Model) -> None:
    """Fill in dtypes and shapes that are not known yet, by onnx's own inference; what it cannot infer stays open."""
    adopt(model)
    # A protobuf would compute and hold every weight that is computed when it is written.
    weights = (value for graph in every_graph(model) for value in graph.initializers.values())
    lazy = [(value, value.const_value) for value in weights if isinstance(value.const_value, ir.LazyTensor)]
    try:
        for value, data in lazy:
            value.const_value = ir.ExternalTensor("later", 0, 0, data.dtype, shape=data.shape, name=value.name or "")
        proto = ir.serde.serialize_model(model)
    finally:
        for value, data in lazy:
            value.const_value = data
    _merge(model.graph, inferred(proto).graph)


def inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the types that onnx infers; the same where it fails: passes ask for what they need."""
    nodes = proto.graph.node
    conversions = [node for node in nodes if node.domain == "com.microsoft" and node.op_type in CONVERSIONS]
    # onnx copies the types of all outer values for every body: thousands of Ifs in a row would take minutes.
    if len(nodes) * sum(attribute.HasField("g") for node in nodes for attribute in node.attribute) > MOST_COPIES:
        return proto
    try:
        # ONNX's own say the same of types and shapes.
        for node in conversions:
            node.domain = ""
        found = onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=False, data_prop=True)
    except Exception:
        found = proto
    finally:
        for node in conversions:
            node.domain = "com.microsoft"
    if found is not proto and conversions:
        for node, before in zip(found.graph.node, nodes, strict=True):
            node.domain = before.domain
    return found


def _merge(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    known = {info.name: info.type for info in (*proto.value_info, *proto.output, *proto.input)}
    for node, node_proto in zip(graph, proto.node, strict=True):
        for value in node.outputs:
            kind = known.get(value.name or "")
            if kind is None or not kind.HasField("tensor_type"):
                continue
            if value.dtype is None and kind.tensor_type.elem_type:
                value.dtype = ir.DataType(kind.tensor_type.elem_type)
            shape = ir.serde.deserialize_type_proto_for_shape(kind)
            if shape is not None and (value.shape is None or not value.shape.is_static()):
                value.shape = shape
        inner = [a.value for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
        inner_protos = [a.g for a in node_proto.attribute if a.HasField("g")]
        for subgraph, subproto in zip(inner, inner_protos, strict=False):
            _merge(subgraph, subproto)
