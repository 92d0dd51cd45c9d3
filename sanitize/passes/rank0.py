"""Rank-0 axes, starts, ends, steps, shapes and counts, where ONNX wants a list: made lists of one.

Exporters write such scalars as initializers, Constant nodes, or as an attribute of one int in place of a list. ONNX
Runtime's CPU kernels refuse them at run time, and shape inference stops there. Who else reads a scalar keeps it.

Scalars elsewhere stay as they are, since HTP's compiler takes them wherever it takes the operator: as inputs and
outputs of the graph, as intermediates, as Gather's index, as operands of arithmetic, comparisons and Where, as scales
and zero points, as bounds of Clip (ONNX wants those scalar) and as CumSum's axis.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target

LISTS: dict[str, tuple[int, ...]] = {
    "Squeeze": (1,), "Unsqueeze": (1,), "Slice": (1, 2, 3, 4), "Pad": (1, 3), "TopK": (1,), "Expand": (1,),
    "Reshape": (1,), "Tile": (1,), "Split": (1,), "ConstantOfShape": (0,), "CenterCropPad": (1,), "Resize": (2, 3),
}  # fmt: skip
"""Inputs that are lists by ONNX; those of the reductions are added where they are read."""
ATTRIBUTES = ("axes", "starts", "ends", "split", "perm", "shape", "pads")
Promoted = dict[tuple[ir.Value, ir.Graph], ir.Value]


def run(model: ir.Model, target: Target) -> list[Change]:
    """Promote every scalar that stands where a list belongs, and infer the types behind it, which were unknown."""
    changes: list[Change] = []
    promoted: Promoted = {}
    for node in graphs.every_node(model):
        if node.domain not in ("", "ai.onnx"):
            continue
        for index, value in scalars(node).items():
            node.replace_input_with(index, _list_of(value, node, promoted))
            changes.append(Change(node.name or node.op_type, f"rank-0 {value.name} made rank 1"))
        if node.op_type.startswith("Reduce") or node.op_type in LISTS:
            for name in ATTRIBUTES:
                found = node.attributes.get(name)
                if found is not None and found.type == ir.AttributeType.INT and not found.is_ref():
                    node.attributes[name] = ir.AttrInt64s(name, [found.as_int()])
                    changes.append(Change(node.name or node.op_type, f"the attribute {name} made a list"))
    for value in {value for value, _ in promoted}:
        graphs.prune(value)
    if changes:
        graphs.infer_types(model)
    return changes


def scalars(node: ir.Node) -> dict[int, ir.Value]:
    """The inputs of a node that are scalars where a list belongs, by index."""
    if node.domain not in ("", "ai.onnx"):
        return {}
    lists = (1,) if node.op_type.startswith("Reduce") else LISTS.get(node.op_type, ())
    inputs = {index: node.inputs[index] for index in lists if index < len(node.inputs)}
    return {index: value for index, value in inputs.items() if value is not None and graphs.dims(value) == ()}


def _list_of(value: ir.Value, node: ir.Node, promoted: Promoted) -> ir.Value:
    """The value with one dim of size 1: a new constant, or a Reshape before the node."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    if (value, graph) in promoted:
        return promoted[value, graph]
    found = graphs.array(value)
    if found is None:
        one = graphs.constant(graph, f"{value.name}_shape", np.array([1], np.int64))
        # Not shared: the next reader may stand before this node.
        return graphs.insert(node, "Reshape", [value, one], name=f"{value.name}_list", dtype=value.dtype, shape=[1])
    promoted[value, graph] = graphs.constant(graph, f"{value.name}_list", found.reshape(1))
    return promoted[value, graph]


PASS = Pass("rank0", "make scalars lists where ONNX wants a list: axes, starts, ends, steps, shapes", run)
