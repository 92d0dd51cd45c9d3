"""com.microsoft's Gelu, BiasGelu, FastGelu and QuickGelu become ONNX's Gelu, or x * Sigmoid(alpha x)."""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.opset import raise_opset
from sanitize.passes import Change, Pass
from sanitize.target import Target

OPSET = 20
FORMS = {"Gelu": "none", "BiasGelu": "none", "FastGelu": "tanh"}


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has kernels. Gelu needs opset 20: a model that cannot reach it keeps all but QuickGelu."""
    if not target.htp:
        return []
    kinds = {node.op_type for node in graphs.every_node(model) if node.domain == "com.microsoft"} & {
        *FORMS,
        "QuickGelu",
    }
    if kinds & set(FORMS) and raise_opset(model, OPSET):
        kinds &= {"QuickGelu"}
    return match.lower(model, [("com.microsoft", kind) for kind in kinds], _lower, "written with ONNX's operators")


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, bias = node.inputs[0], match.given(node, 1)
    assert x is not None
    if node.op_type == "QuickGelu":
        steep = match.emit(node, "Mul", x, match.floats(x, graphs.attribute(node, "alpha", 1.702)))
        return [match.emit(node, "Mul", x, match.emit(node, "Sigmoid", steep))]
    if bias is not None:
        x = match.emit(node, "Add", x, bias)
    return [match.emit(node, "Gelu", x, approximate=FORMS[node.op_type])]


PASS = Pass("lower-gelu", "com.microsoft Gelu, BiasGelu, FastGelu, QuickGelu to ONNX's operators", run, min_db=90.0)
