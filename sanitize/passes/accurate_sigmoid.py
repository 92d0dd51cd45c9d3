"""SiLU, QuickGelu and Sigmoid where HTP's fp16 Sigmoid is wrong: on the negative side, where gates live.

x ┬ (Mul c) ─ Sigmoid ─ Mul   becomes   x ┬ Mul 0.5 ┬─────────── Mul ┬──────────── Add
  └─────────────────────┘                 │         └ Abs ─ Tanh ────│────── Mul ──┘
                                          └ Clip(-40, 0) ─ Exp ──┘   └───────┘
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms
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
        low, high = sorted(bound * scale for bound in forms.span(x, target))
        gain = forms.gain("SiLU", target, (low, high))
        if gain:
            write = forms.Writer(node, node.outputs[0])
            gate = next((v.producer() for v in node.inputs if v and graphs.made_by(v, "Sigmoid")), None)
            graphs.replace(node.outputs[0], forms.silu(write, x, scale))
            graphs.remove(node)
            _prune(gate)
            changes.append(Change(node.name or node.op_type, gain))
    for node in graphs.every_node(model):
        if node.op_type != "Sigmoid" or not forms.floating(node.inputs[0]) or node.graph is None:
            continue
        x = node.inputs[0]
        assert x is not None
        gain = forms.gain("Sigmoid", target, forms.span(x, target))
        if gain:
            graphs.replace(node.outputs[0], forms.sigmoid(forms.Writer(node, node.outputs[0]), x))
            graphs.remove(node)
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


def _prune(node: ir.Node | None) -> None:
    """Take out a gate that nothing reads any more, and the product below it."""
    while node is not None and node.graph is not None and node.op_type in ("Sigmoid", "Mul"):
        if any(output.uses() or output.is_graph_output() for output in node.outputs):
            return
        below = next((v.producer() for v in node.inputs if v is not None and v.producer() is not None), None)
        graphs.remove(node)
        node = below


PASS = Pass("accurate-sigmoid", "SiLU, QuickGelu and Sigmoid in forms that HTP's fp16 gets right", run, min_db=100.0)
