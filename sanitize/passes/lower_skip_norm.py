"""com.microsoft's SkipLayerNormalization and SkipSimplifiedLayerNormalization become Add and the norm.

input + skip (+ bias) ┬ LayerNormalization, or RMSNormalization ─ output
                      └ input_skip_bias_sum
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.opset import raise_opset
from sanitize.passes import Change, Pass
from sanitize.passes.fuse_rms_norm import OPSET, rms_norm
from sanitize.target import Target

MICROSOFT, SIMPLE, LAYER = "com.microsoft", "SkipSimplifiedLayerNormalization", "SkipLayerNormalization"


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has kernels. Raises RingstepError where mean or deviation are read, or opsets clash."""
    if not target.htp:
        return []
    simple = [n for n in graphs.every_node(model) if n.op_type == SIMPLE and n.domain == MICROSOFT]
    reason = raise_opset(model, OPSET) if simple else ""
    if reason:
        raise match.refuse(simple[0], f"it becomes RMSNormalization of opset {OPSET}, out of reach because of {reason}")
    kinds = [(MICROSOFT, SIMPLE), (MICROSOFT, LAYER)]
    return match.lower(model, kinds, lambda node: _lower(node, target), "split into Add and the norm")


def _lower(node: ir.Node, target: Target) -> list[ir.Value | None]:
    if match.used(node, 1) or match.used(node, 2):
        raise match.refuse(node, "its outputs mean and inv_std_var are read, and have no lowering")
    simple = node.op_type == SIMPLE
    x, skip, weight = node.inputs[:3]
    beta, bias = (None, match.given(node, 3)) if simple else (match.given(node, 3), match.given(node, 4))
    total = match.emit(node, "Add", x, skip)
    if bias is not None:
        total = match.emit(node, "Add", total, bias)
    eps = graphs.attribute(node, "epsilon", 1e-5)
    if simple:
        if match.inner(total) is None:
            raise match.refuse(node, "its hidden size is not static")
        return [rms_norm(node, total, weight, eps, target, like=total), None, None, total]
    inputs = [total, weight, *([beta] if beta is not None else [])]
    normed = graphs.insert(
        node, "LayerNormalization", inputs, {"axis": -1, "epsilon": eps}, name=f"{node.name or LAYER}/norm", like=total
    )
    return [normed, None, None, total]


PASS = Pass(
    "lower-skip-norm", "com.microsoft Skip(Simplified)LayerNormalization to Add and the norm", run, min_db=100.0
)
