"""Exp whose argument can lie far below zero, where HTP's fp16 kernel returns values up to 131008 instead of 0."""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms
from sanitize.ranges import span
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Keep the argument at -40 and above."""
    if not forms.concerned(model, target):
        return []
    changes = []
    for node in graphs.every_node(model):
        if node.op_type != "Exp" or node.domain not in ("", "ai.onnx") or not forms.floating(node.inputs[0]):
            continue
        x, (low, high) = node.inputs[0], span(node.inputs[0], target)
        gain = forms.gain(target, "Exp/native", "Exp/clip", (low, high)) if low < forms.EXP_LOW else None
        if gain and x is not None:
            node.replace_input_with(0, forms.Writer(node, node.outputs[0])("Max", x, forms.EXP_LOW))
            changes.append(Change(node.name or node.op_type, gain))
    return changes


PASS = Pass("accurate-exp", "the argument of Exp kept where HTP's fp16 kernel is right", run, min_db=100.0)
