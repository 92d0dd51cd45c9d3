"""com.microsoft's FusedMatMul becomes Transpose, MatMul and Mul."""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.passes import Change, Pass
from sanitize.target import Target

KIND = ("com.microsoft", "FusedMatMul")


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has a kernel. Raises RingstepError for a transposed batch."""
    return match.lower(model, [KIND], _lower, "lowered to MatMul") if target.htp else []


def _lower(node: ir.Node) -> list[ir.Value | None]:
    sides = []
    for name, value in zip("AB", node.inputs, strict=True):
        rank = match.rank(value)
        if value is None or rank is None or graphs.attribute(node, f"transBatch{name}", 0):
            raise match.refuse(node, f"its operand {name} has an unknown rank or a transposed batch")
        if graphs.attribute(node, f"trans{name}", 0) and rank > 1:
            value = match.emit(node, "Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])
        sides.append(value)
    alpha = graphs.attribute(node, "alpha", 1.0)
    # Before the product, which might leave fp16 (alpha is 1 over a root in attention).
    if alpha != 1:
        sides[0] = match.emit(node, "Mul", sides[0], match.floats(sides[0], alpha))
    return [match.emit(node, "MatMul", *sides)]


PASS = Pass("lower-fused-matmul", "com.microsoft FusedMatMul to MatMul", run, min_db=110.0)
