"""Swish (opset 24) becomes x * Sigmoid(alpha x), the form that later passes know."""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.passes import Change, Pass
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module. HTP has Swish, as inaccurate in fp16 as Sigmoid; a CPU keeps it."""
    return match.lower(model, [("", "Swish")], _lower, "lowered to x * Sigmoid(x)") if target.htp else []


def _lower(node: ir.Node) -> list[ir.Value | None]:
    x, alpha = node.inputs[0], graphs.attribute(node, "alpha", 1.0)
    assert x is not None
    steep = x if alpha == 1 else match.emit(node, "Mul", x, match.floats(x, alpha))
    return [match.emit(node, "Mul", x, match.emit(node, "Sigmoid", steep))]


PASS = Pass("lower-swish", "Swish to x * Sigmoid(x)", run, min_db=110.0)
