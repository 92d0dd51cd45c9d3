"""Infinities and the lowest floats that masks are made of, as finite numbers of the precision at hand.

    Where(keep, 0, -inf) ── Add(scores, .) ── Softmax          -inf, -3.4e38, -65504  ──▶  -10000

A constant is a mask where it is added to something, or reaches a Softmax, through Where, Concat, Trilu, Mul, Pad,
casts and what moves elements about. Then its infinities and lowest floats, and before a Softmax all that is too large
for the precision, become

    fp16   10000: two masks added stay far from 65504, and exp(-10000) is 0
    a16    100, or three times the largest score that calibration saw: 16 bits over 10000 are steps of 0.15
    fp32   1e9: as good as infinity, with room for sums

so softmax rows with one key or more keep every bit (a16: e^-100 in place of 0). A fully masked row, which no token
attends to, was NaN, or uniform with the lowest float; now it is a finite row: uniform as far as the mask's rounding
swallows the scores, as fp16 does. This pass belongs together with nan-guards, which removes the test for such rows.

Bounds of Clip, Max and Min that bound nothing go. Infinities that something is compared with stay, and so do those
that a graph output returns, since they mean infinity there, and those that only ReduceMax, TopK or MaxPool see: HTP
saturates them to -131008, still the least value (simulated). Large constants are read and written in chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.stream import chunks, mapped
from sanitize.target import Target
from sanitize.tensors import ALL_FLOATS

D = ir.DataType
SOFT, ADDED, OBSERVED = 1, 2, 4
"""What becomes of a value: it reaches a Softmax; it is added to something; it is compared or returned."""
SOFTENERS = ("Softmax", "LogSoftmax", "Exp", "Attention", "MultiHeadAttention", "GroupQueryAttention")
COMPARISONS = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "IsInf", "IsNaN")
FIRST = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Expand", "Gather", "GatherElements",
         "GatherND", "Split", "Identity", "Cast", "Trilu", "Tile", "Neg", "Abs", "Clip", "ScatterND")  # fmt: skip
ANY = ("Concat", "Max", "Min")
MARGIN = 20.0  # e^-20 is below what 16 bits hold
LOWEST = {D.FLOAT16: 65503.0, D.BFLOAT16: 3.3e38, D.FLOAT: 3.4028e38, D.DOUBLE: 1.79e308}


def run(model: ir.Model, target: Target) -> list[Change]:
    """Make masks finite and drop bounds that bound nothing, in every graph."""
    changes = _drop_bounds(model)
    for value, uses, finite, size in masks(model, target):
        _put(value, finite, uses)
        changes.append(Change(value.name or "", f"mask of infinities made finite, at most {size:g} in size"))
    return changes


def masks(
    model: ir.Model, target: Target
) -> Iterator[tuple[ir.Value, list[tuple[ir.Node, int]], ir.TensorProtocol, float]]:
    """Every constant that is a mask out of range: its uses as a mask, what it becomes, and the size put in."""
    flows = _flows(model)
    large = _mask_size(model, target)
    constants: list[ir.Value] = [v for graph in graphs.every_graph(model) for v in graph.initializers.values()]
    for node in graphs.every_node(model):
        if node.op_type in ("Constant", "ConstantOfShape") and node.domain in ("", "ai.onnx"):
            constants.append(node.outputs[0])
    for value in constants:
        tensor = _constant(value)
        if tensor is None or tensor.dtype not in ALL_FLOATS:
            continue
        found = [((use.node, use.idx), _flow(use.node, use.idx, flows)) for use in value.uses()]
        uses = [slot for slot, flow in found if _is_mask(flow)]
        size, limit = large, LOWEST[D.FLOAT16]
        if tensor.dtype == D.FLOAT16:
            size = min(large, 10000.0)
        elif target.precision == "fp32" or not any(flow & SOFT for _, flow in found):
            # A factor or an offset of a million is no mask.
            limit = 1e30
        if not uses or not any(_is_large(chunk, limit).any() for chunk in chunks(tensor)):
            continue
        yield value, uses, mapped(tensor, tensor.dtype, partial(_finite, size=size, limit=limit)), size


def _mask_size(model: ir.Model, target: Target) -> float:
    """The magnitude that stands for infinity."""
    if target.precision != "a16":
        return 10000.0 if target.precision == "fp16" else 1e9
    softened = [node.inputs[0] for node in graphs.every_node(model) if node.op_type == "Softmax"]
    scores = [target.ranges.get(value.name or "", (0.0, 0.0))[1] for value in softened if value is not None]
    return max(100.0, 0.0, *(3 * score + MARGIN for score in scores if score < 1000))


def _is_large(chunk: np.ndarray, limit: float) -> np.ndarray:
    return np.abs(chunk.astype(np.float32, copy=False)) >= limit


def _finite(chunk: np.ndarray, size: float, limit: float) -> np.ndarray:
    large = _is_large(chunk, limit)
    return np.where(large, np.where(chunk < 0, -size, size).astype(chunk.dtype), chunk)


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    node = value.producer()
    if node is not None and node.op_type == "ConstantOfShape":
        found = node.attributes.get("value")
        return None if found is None or found.is_ref() else found.as_tensor()
    return graphs.tensor(value)


def _put(value: ir.Value, tensor: ir.TensorProtocol, uses: list[tuple[ir.Node, int]]) -> None:
    """Change the constant, for these uses alone if there are others."""
    node = value.producer()
    if value.is_graph_output() or len(uses) < len(value.uses()):
        if node is not None and node.op_type == "ConstantOfShape":
            other = graphs.insert(node, "ConstantOfShape", node.inputs, {"value": tensor}, name=f"{value.name}_finite",
                                  like=value)  # fmt: skip
        else:
            other = graphs.initializer(value, f"{value.name}_finite", tensor)
        for reader, index in uses:
            reader.replace_input_with(index, other)
    elif node is not None:
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)
    else:
        value.const_value = tensor


# where values go


def _is_mask(flow: int) -> bool:
    return bool(flow & (SOFT | ADDED)) and not flow & OBSERVED


def _flows(model: ir.Model) -> dict[ir.Value, int]:
    """What becomes of every value, from the last node to the first: each is seen after all its readers."""
    flows: dict[ir.Value, int] = defaultdict(int)
    for value in model.graph.outputs:
        flows[value] = OBSERVED
    _add_flows(model.graph, flows)
    return flows


def _add_flows(graph: ir.Graph, flows: dict[ir.Value, int]) -> None:
    for node in reversed(graph):
        for body in (a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH):
            for index, value in enumerate(body.outputs):
                flows[value] |= flows[node.outputs[index]] if node.op_type == "If" else OBSERVED
            _add_flows(body, flows)
        for index, source in enumerate(node.inputs):
            if source is not None:
                flows[source] |= _flow(node, index, flows)


def _flow(node: ir.Node, index: int, flows: dict[ir.Value, int]) -> int:
    """What becomes of a node's input."""
    kind = node.op_type
    if kind in SOFTENERS:
        return SOFT
    if kind in COMPARISONS:
        return OBSERVED
    after = 0
    for output in node.outputs:
        after |= flows.get(output, 0)
    if kind in ("Add", "Sub", "Sum"):
        return ADDED | after
    if kind == "Mul":
        return after & (SOFT | OBSERVED)
    passes = (
        (kind in FIRST and index == 0) or kind in ANY or (kind == "Where" and index > 0)
        or (kind == "Pad" and index in (0, 2)) or (kind == "ScatterND" and index == 2)
        or (kind == "ScatterElements" and index in (0, 2))
    )  # fmt: skip
    return after if passes else 0


# bounds


def _drop_bounds(model: ir.Model) -> list[Change]:
    """Take out bounds of Clip, Max and Min that no finite number passes."""
    changes = []
    for node in graphs.every_node(model):
        if node.op_type not in ("Clip", "Max", "Min") or node.domain not in ("", "ai.onnx"):
            continue
        idle = [index for index in range(len(node.inputs)) if bounds_nothing(node, index)]
        if not idle:
            continue
        changes.append(Change(node.name or node.op_type, "a bound that bounds nothing dropped"))
        kept = node.inputs[0]
        if node.op_type == "Clip":
            for index in idle:
                node.replace_input_with(index, None)
        else:
            kept = node.inputs[1 - idle[0]]
        if kept is not None and (node.op_type != "Clip" or all(value is None for value in node.inputs[1:])):
            graphs.replace(node.outputs[0], kept)
            graphs.remove(node)
    return changes


def bounds_nothing(node: ir.Node, index: int) -> bool:
    """Whether an input of Clip, Max or Min is a bound that no finite number passes."""
    value = node.inputs[index]
    if node.op_type == "Clip":
        sign = (0, -1, 1)[index]
    elif node.op_type in ("Max", "Min") and len(node.inputs) == 2:
        kept = node.inputs[1 - index]
        covered = kept is not None and value is not None and _covers(kept, value)
        sign = (-1 if node.op_type == "Max" else 1) if covered else 0
    else:
        return False
    number = graphs.scalar(value)
    if not sign or number is None or value is None or value.dtype not in LOWEST:
        return False
    return number * sign >= LOWEST[value.dtype]


def _covers(kept: ir.Value, bound: ir.Value) -> bool:
    """Whether the bound's shape stretches nothing."""
    if bound.shape is None:
        return False
    return len(bound.shape) == 0 or (kept.shape is not None and len(kept.shape) >= len(bound.shape))


PASS = Pass("infinities", "infinities and lowest floats in masks become finite; bounds that bound nothing go", run,
            min_db=100.0)  # fmt: skip
