"""Quotients by Pow: HTP rounds Pow(x, -1) and Pow(x, -0.5) right in fp16, and Div and Reciprocal 2.8e-4 too small.

Above 1000 they lose half their digits besides, and 1 / x is 0 from 16384 on. A quotient that a Newton step corrects
stays as it is. Division by a constant is right.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms
from sanitize.ranges import span
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Rewrite 1 / sqrt(x), 1 / x, a / sqrt(x) and a / x."""
    if not forms.concerned(model, target):
        return []
    changes = []
    for node in graphs.every_node(model):
        if node.graph is None or node.op_type not in ("Reciprocal", "Div") or node.domain not in ("", "ai.onnx"):
            continue
        by = node.inputs[-1]
        if by is None or not forms.floating(by) or graphs.tensor(by) is not None or _corrected(node):
            continue
        over = node.inputs[0] if node.op_type == "Div" and graphs.scalar(node.inputs[0]) != 1.0 else None
        root = graphs.made_by(by, "Sqrt")
        base, power = (root.inputs[0], -0.5) if root else (by, -1.0)
        kind = "Div" if over is not None else "Rsqrt" if root else "Reciprocal"
        gain = forms.gain(target, f"{kind}/native", f"{kind}/pow", span(base if kind == "Rsqrt" else by, target))
        if not gain or base is None:
            continue
        write = forms.Writer(node, node.outputs[0])
        inverse = write("Pow", base, power, like=by)
        graphs.swap(node, inverse if over is None else write("Mul", over, inverse))
        changes.append(Change(node.name or node.op_type, gain))
    return changes


def _corrected(node: ir.Node) -> bool:
    """Whether a quotient takes part in a Newton step: q + (x - q d) / d, or r + r (1 - d r)."""
    by = node.inputs[-1]
    quotient = node.outputs[0]
    if any(user.op_type == "Mul" and quotient in user.inputs and by in user.inputs for user in graphs.users(quotient)):
        return True
    rest = graphs.made_by(node.inputs[0], "Sub") if node.op_type == "Div" else None
    product = graphs.made_by(rest.inputs[1], "Mul") if rest is not None else None
    return product is not None and by in product.inputs


PASS = Pass("accurate-divide", "Reciprocal and Div as powers, which HTP's fp16 gets right", run, min_db=100.0)
