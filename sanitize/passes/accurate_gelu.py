"""GELU where HTP's fp16 kernel is wrong: its negative tail, down to flipped signs.

Gelu, FastGelu and BiasGelu nodes, and the erf and tanh expansions that fuse-gelu left.
The exact form becomes relu(x) - a exp(fit(a)), a = min(|x|, 6), good to 97 dB and more; the tanh form
is an identity.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms, fuse_gelu
from sanitize.ranges import span
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Rewrite every GELU, as one node or written out."""
    if not forms.concerned(model, target):
        return []
    changes = []
    for node in graphs.every_node(model):
        if node.graph is None:
            continue
        found = _one_node(node) or _expansion(node)
        if found is None or not forms.floating(found[1]):
            continue
        root, x, by_tanh = found
        native = ("GeluTanh/native" if root is node else "GeluTanh/tanh") if by_tanh else "Gelu/native"
        gain = forms.gain(target, native, "GeluTanh/abs" if by_tanh else "Gelu/relu5", span(x, target))
        if not gain:
            continue
        write = forms.Writer(root, root.outputs[0])
        if root is node and len(node.inputs) > 1 and node.inputs[1] is not None:
            x = write("Add", x, node.inputs[1])
        graphs.swap(root, (forms.gelu_tanh if by_tanh else forms.gelu)(write, x))
        changes.append(Change(root.name or root.op_type, gain))
    return changes


def _one_node(node: ir.Node) -> tuple[ir.Node, ir.Value, bool] | None:
    """(node, x, whether it is the tanh form) of a GELU operator; a bias is its second input."""
    x = node.inputs[0] if node.inputs else None
    if x is None:
        return None
    if node.op_type == "Gelu" and node.domain in ("", "ai.onnx", "com.microsoft"):
        return node, x, graphs.attribute(node, "approximate", "none") == "tanh"
    if node.op_type in ("FastGelu", "BiasGelu") and node.domain == "com.microsoft":
        return node, x, node.op_type == "FastGelu"
    return None


def _expansion(node: ir.Node) -> tuple[ir.Node, ir.Value, bool] | None:
    """The same of a GELU that was not fused, as its opset has no Gelu."""
    found = fuse_gelu.find_gelu(node) if node.op_type in fuse_gelu.FORMS else None
    return None if found is None else (found.last, found.x, found.form == "tanh")


PASS = Pass("accurate-gelu", "GELU in forms that HTP's fp16 gets right", run, min_db=95.0)
