"""Softmax as some exporters spell it becomes Softmax.

    x ─ (Sub ReduceMax) ─ Exp ┬ ReduceSum ┐
                              └────────── Div | Mul(Reciprocal)

Not for HTP in fp16: there Softmax has 53 to 60 dB where the explicit form has more, and accurate-softmax takes Softmax
apart; the two would undo each other. Softmax over another axis than the last is left alone: HTP takes any (rank 4).
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.passes import Change, Pass
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module."""
    if target.htp and target.precision == "fp16":
        return []
    changes = []
    for node in graphs.every_node(model):
        if node.op_type != "ReduceSum" or (found := _match(node, graphs.opset(model))) is None:
            continue
        x, axis, last = found
        old, name = last.outputs[0], last.name or last.op_type
        graphs.swap(last, graphs.insert(last, "Softmax", [x], {"axis": axis}, name=f"{name}/Softmax", like=old))
        changes.append(Change(name, "explicit softmax fused into Softmax"))
    return changes


def _match(total: ir.Node, opset: int) -> tuple[ir.Value, int, ir.Node] | None:
    exp = graphs.made_by(total.inputs[0], "Exp")
    rank = match.rank(total.inputs[0])
    axis = _axis(total, rank)
    # Before opset 13 Softmax took all dims from its axis on as one.
    if exp is None or rank is None or axis is None or (opset < 13 and axis != rank - 1):
        return None
    power, nodes = exp.outputs[0], [exp, total]
    last = match.next_node(total.outputs[0], "Div", "Reciprocal")
    if last is None:
        return None
    if last.op_type == "Reciprocal":
        nodes.append(last)
        last = match.next_node(last.outputs[0], "Mul")
        if last is None or match.other_input(last, nodes[-1].outputs[0]) is not power:
            return None
    elif last.inputs[0] is not power:
        return None
    x = exp.inputs[0]
    below = graphs.made_by(x, "Sub")
    peak = graphs.made_by(below.inputs[1], "ReduceMax") if below is not None else None
    if below is not None and peak is not None and peak.inputs[0] is below.inputs[0] and _axis(peak, rank) == axis:
        nodes += [below, peak]
        x = below.inputs[0]
    return (x, axis, last) if x is not None and match.closed(nodes, last) else None


def _axis(node: ir.Node, rank: int | None) -> int | None:
    axis = match.reduced(node)
    return None if axis is None or not rank else axis % rank


PASS = Pass("fuse-softmax", "max, sub, exp, sum, div to Softmax, but for HTP in fp16", run, min_db=110.0)
