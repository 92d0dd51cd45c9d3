"""Softmax and LogSoftmax written out: HTP's fp16 kernels lose up to 25 dB.

x ─ ReduceMax ─ Sub ─ Max(-40) ─ Exp ┬──────────────────────── Mul
                                     └ ReduceSum ─ Pow(-1) ─ ┘

Masked entries come out as 0 in fp16 (e^-40), and fully masked rows stay as finite as their mask.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms
from sanitize.ranges import span
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Rewrite Log(Softmax(x)) first, then LogSoftmax and Softmax over any axis."""
    if not forms.concerned(model, target):
        return []
    changes = []
    nodes = [node for node in graphs.every_node(model) if node.domain in ("", "ai.onnx")]
    for node in nodes:
        softmax = graphs.made_by(node.inputs[0], "Softmax") if node.op_type == "Log" else None
        if softmax is not None:
            changes += _rewrite(model, target, node, softmax, "LogSoftmax/log", "LogSoftmax/explicit")
    for node in nodes:
        if node.graph is not None and node.op_type == "LogSoftmax":
            changes += _rewrite(model, target, node, node, "LogSoftmax/native", "LogSoftmax/explicit")
        elif node.graph is not None and node.op_type == "Softmax":
            changes += _rewrite(model, target, node, node, "Softmax/native", "Softmax/pow")
    return changes


def _rewrite(model: ir.Model, target: Target, node: ir.Node, softmax: ir.Node, native: str, form: str) -> list[Change]:
    x = softmax.inputs[0]
    if x is None or not forms.floating(x) or x.shape is None:
        return []
    axis = graphs.attribute(softmax, "axis", -1) % len(x.shape)
    length = x.shape[axis]
    gain = forms.gain(target, native, form, span(x, target), length if isinstance(length, int) else None)
    if not gain:
        return []
    write = forms.Writer(node, node.outputs[0], graphs.opset(model))
    graphs.swap(node, (forms.softmax if form == "Softmax/pow" else forms.log_softmax)(write, x, axis))
    return [Change(node.name or node.op_type, gain)]


PASS = Pass(
    "accurate-softmax", "Softmax and LogSoftmax written out so that HTP's fp16 gets them right", run, min_db=100.0
)
