"""Move a model to a newer version of the default operators, node by node, where no operator changes its meaning.

onnx.version_converter does this on a protobuf, which would hold all weights; here only the nodes are touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from sanitize import graph as graphs

DEFAULT = ("", "ai.onnx")
CHANGED = {
    "Softmax": 13, "LogSoftmax": 13, "Hardmax": 13, "GroupNormalization": 21, "GridSample": 20, "Upsample": 10,
    "Scan": 9, "BatchNormalization": 14, "Dropout": 12, "Resize": 11, "RoiAlign": 16, "DFT": 20,
}  # fmt: skip
"""Operators that compute something else from this version on, with the same attributes and inputs."""
MOVED = {
    "Squeeze": "axes", "Unsqueeze": "axes", "Split": "split", "ReduceSum": "axes", "ReduceMean": "axes",
    "ReduceMax": "axes", "ReduceMin": "axes", "ReduceProd": "axes", "ReduceL1": "axes", "ReduceL2": "axes",
    "ReduceLogSum": "axes", "ReduceLogSumExp": "axes", "ReduceSumSquare": "axes",
}  # fmt: skip
"""An attribute that became the second input."""


def raise_opset(model: ir.Model, version: int) -> str:
    """Bring the default domain to `version`; "" when done (or newer already), else why not, the model unchanged."""
    current = graphs.opset(model)
    if current >= version:
        return ""
    edits: list[Callable[[], None]] = []
    for node in graphs.every_node(model):
        if node.domain not in DEFAULT:
            continue
        reason = _plan(node, current, version, edits)
        if reason:
            return f"{node.name or node.op_type}: {reason}"
    for edit in edits:
        edit()
    key = "" if "" in model.graph.opset_imports or "ai.onnx" not in model.graph.opset_imports else "ai.onnx"
    for graph in graphs.every_graph(model):
        if graph is model.graph or key in graph.opset_imports:
            graph.opset_imports[key] = version
    return ""


@dataclass(frozen=True)
class Schema:
    """What an operator takes at some version."""

    since: int
    deprecated: bool
    defaults: Mapping[str, Any]
    """Attribute to its default."""
    inputs: range


@functools.cache
def _schema(op: str, version: int) -> Schema | None:
    try:
        found = onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return None  # ONNX Runtime's own operators in the default domain, the same at every version
    defaults = {name: attribute.default_value for name, attribute in found.attributes.items()}
    return Schema(found.since_version, found.deprecated, defaults, range(found.min_input, found.max_input + 1))


def _plan(node: ir.Node, current: int, version: int, edits: list[Callable[[], None]]) -> str:
    """Why this node cannot move, or "" with what must be done to it added to `edits`."""
    op = node.op_type
    old, new = _schema(op, current), _schema(op, version)
    if old is None or new is None or old.since == new.since:
        return ""
    if new.deprecated:
        return f"{op} is gone in opset {version}"
    if current < CHANGED.get(op, 0) <= version and not _same_meaning(node):
        return f"{op} means something else from opset {CHANGED[op]} on"
    moved = MOVED.get(op, "")
    given = moved in node.attributes
    if given and moved not in new.defaults:
        edits.append(lambda: _to_input(node, moved))
    if op == "Split" and not given and current < 18 <= version and (len(node.inputs) < 2 or node.inputs[1] is None):
        edits.append(lambda: node.attributes.add(ir.AttrInt64("num_outputs", len(node.outputs))))
    if op in ("Softmax", "LogSoftmax", "Hardmax") and "axis" not in node.attributes and current < 13:
        edits.append(lambda: node.attributes.add(ir.AttrInt64("axis", -1)))
    for name in node.attributes:
        if name not in new.defaults and not (given and name == moved):
            return f"{op} lost its attribute {name} by opset {version}"
    for name, default in new.defaults.items():
        if name in old.defaults and name not in node.attributes and old.defaults[name] != default and op not in CHANGED:
            return f"{op} has another default of {name} by opset {version}"
    if not given and len(node.inputs) not in new.inputs:
        return f"{op} takes other inputs by opset {version}"
    return ""


def _same_meaning(node: ir.Node) -> bool:
    """Whether a node whose operator changed its meaning is one that did not."""
    if node.op_type in ("Softmax", "LogSoftmax", "Hardmax"):
        # Before 13 all dims from `axis` on were one; on the last dim that is the same.
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        axis = graphs.attribute(node, "axis", 1)
        return axis == -1 or (shape is not None and axis == len(shape) - 1)
    if node.op_type == "GridSample":
        return graphs.attribute(node, "mode", "bilinear") not in ("bilinear", "bicubic")
    if node.op_type == "BatchNormalization":
        return len(node.outputs) == 1 and not {"is_test", "spatial"} & set(node.attributes)
    return False


def _to_input(node: ir.Node, name: str) -> None:
    values = np.array(node.attributes[name].value, dtype=np.int64)
    del node.attributes[name]
    value = graphs.constant(node, f"{node.name or node.op_type}/{name}", values)
    node.resize_inputs(max(2, len(node.inputs)))
    node.replace_input_with(1, value)
