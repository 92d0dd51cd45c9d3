"""Softplus, Mish and Elu where HTP's fp16 kernels are wrong (27 dB over -4..-1), and x * HardSigmoid(x).

In a float16 graph the plugin makes that product of named nodes, in this order, an operator whose results are garbage;
HardSigmoid(x) * x is right.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms
from sanitize.ranges import span
from sanitize.target import Target

FORMS = {"Softplus": "Softplus/fit", "Mish": "Softplus/fit", "Elu": "Elu/exp"}


def run(model: ir.Model, target: Target) -> list[Change]:
    """Rewrite the three, and turn the products around."""
    if not forms.concerned(model, target):
        return []
    changes = []
    for node in graphs.every_node(model):
        if node.domain not in ("", "ai.onnx") or not node.inputs or not forms.floating(node.inputs[0]):
            continue
        x, name = node.inputs[0], node.name or node.op_type
        assert x is not None
        if node.op_type in FORMS:
            form = FORMS[node.op_type]
            native = f"{form.split('/')[0]}/native"
            gain = forms.gain(target, native, form, span(x, target))
            if gain:
                graphs.swap(node, _form(node, x))
                changes.append(Change(name, gain))
        elif (
            node.op_type == "Mul"
            and (hard := graphs.made_by(node.inputs[1], "HardSigmoid")) is not None
            and hard.inputs[0] is x
        ):
            node.replace_input_with(0, hard.outputs[0])
            node.replace_input_with(1, x)
            changes.append(Change(name, "x * HardSigmoid(x) turned around: garbage -> 64 dB (simulated)"))
    return changes


def _form(node: ir.Node, x: ir.Value) -> ir.Value:
    write = forms.Writer(node, node.outputs[0])
    if node.op_type == "Elu":
        return forms.elu(write, x, float(graphs.attribute(node, "alpha", 1.0)))
    soft = forms.softplus(write, x)
    return soft if node.op_type == "Softplus" else write("Mul", x, write("Tanh", soft))


PASS = Pass("accurate-softplus", "Softplus, Mish and Elu in forms that HTP's fp16 gets right", run, min_db=85.0)
