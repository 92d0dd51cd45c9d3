"""com.microsoft's Attention, projection included, becomes MatMul, Split and what lower_attention.py draws."""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.attend import attend, by_head, causal, masked, side_by_side
from sanitize.passes import Change, Pass
from sanitize.passes.lower_multi_head_attention import hide
from sanitize.target import Target

KIND = ("com.microsoft", "Attention")
UNSUPPORTED = {4: "past", 6: "past_sequence_length"}


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has a kernel. Raises RingstepError naming node and feature."""
    if not target.htp:
        return []
    return match.lower(model, [KIND], lambda node: _lower(node, masked(target)), "lowered to MatMul and Softmax")


def _lower(node: ir.Node, low: float) -> list[ir.Value | None]:
    match.refuse_inputs(node, UNSUPPORTED)
    if match.used(node, 1) or graphs.attribute(node, "do_rotary", 0):
        raise match.refuse(node, "present and do_rotary have no lowering; export without them")
    x, weight, bias, padding, _, scores = (match.given(node, at) for at in range(6))
    heads = graphs.attribute(node, "num_heads", 0)
    joined = match.emit(node, "MatMul", x, weight)
    if bias is not None:
        joined = match.emit(node, "Add", joined, bias)
    width = match.static(node, joined, "its projection")[2]
    sizes = graphs.attribute(node, "qkv_hidden_sizes") or [width // 3] * 3
    q, k, v = (by_head(node, p, heads) for p in match.emit_all(node, "Split", 3, joined, match.ints(*sizes), axis=2))
    _, _, n, size = match.static(node, q, "its query")
    seen = hide(node, padding, q, n, low) if padding is not None else None
    triangle = causal(q, n, n, 0, low) if graphs.attribute(node, "unidirectional", 0) else None
    scale = graphs.attribute(node, "scale", 0.0) or size**-0.5
    return [side_by_side(node, attend(node, q, k, v, scale=scale, biases=(scores, seen, triangle)))]


PASS = Pass("lower-packed-attention", "com.microsoft Attention to MatMul and Softmax", run, min_db=100.0)
