"""SiLU, QuickGelu and Sigmoid where HTP's fp16 Sigmoid is wrong: on the negative side, where gates live.

x ┬ (Mul c) ─ Sigmoid ─ Mul   becomes   x ┬ Mul 0.5 ┬──────────────────────── Mul
  └─────────────────────┘                 │         └ Abs ─ Tanh ─ Add 1 ─ Mul ┘
                                          └ Clip(-40, 0) ─ Exp ────────────┘
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms
from sanitize.ranges import span
from sanitize.target import Target

QUICK = 1.702


def run(model: ir.Model, target: Target) -> list[Change]:
    """Rewrite products with their own Sigmoid first, then every Sigmoid that is left."""
    if not forms.concerned(model, target):
        return []
    changes = []
    for node in graphs.every_node(model):
        found = _silu(node)
        if found is None or not forms.floating(found[0]):
            continue
        x, scale = found
        low, high = sorted(bound * scale for bound in span(x, target))
        gain = forms.gain(target, "SiLU/native", "SiLU/tanh-abs", (low, high))
        if gain:
            graphs.swap(node, forms.silu(forms.Writer(node, node.outputs[0]), x, scale))
            changes.append(Change(node.name or node.op_type, gain))
    for node in graphs.every_node(model):
        if node.op_type == "Sigmoid" and node.domain in ("", "ai.onnx") and forms.floating(node.inputs[0]):
            gate_x = node.inputs[0]
            assert gate_x is not None
            gain = forms.gain(target, "Sigmoid/native", "Sigmoid/tanh-abs", span(gate_x, target))
            if gain:
                graphs.swap(node, forms.sigmoid(forms.Writer(node, node.outputs[0]), gate_x))
                changes.append(Change(node.name or node.op_type, gain))
    return changes


def _silu(node: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, c) of a node that computes x * sigmoid(c x)."""
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Swish" and node.domain in ("", "ai.onnx") and first is not None:
        return first, float(graphs.attribute(node, "alpha", 1.0))
    if node.op_type == "QuickGelu" and node.domain == "com.microsoft" and first is not None:
        return first, float(graphs.attribute(node, "alpha", QUICK))
    if node.op_type != "Mul" or len(node.inputs) != 2:
        return None
    for x, gate in (node.inputs, node.inputs[::-1]):
        sigmoid = graphs.made_by(gate, "Sigmoid")
        if sigmoid is None or x is None:
            continue
        if sigmoid.inputs[0] is x:
            return x, 1.0
        product = graphs.made_by(sigmoid.inputs[0], "Mul")
        for a, c in (product.inputs, product.inputs[::-1]) if product else ():
            scale = graphs.scalar(c)
            # A constant of higher rank would raise x's.
            if a is x and scale is not None and c is not None and c.shape is not None and c.shape.rank() == 0:
                return x, scale
    return None


PASS = Pass("accurate-sigmoid", "SiLU, QuickGelu and Sigmoid in forms that HTP's fp16 gets right", run, min_db=100.0)
