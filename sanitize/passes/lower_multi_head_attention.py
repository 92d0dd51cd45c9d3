"""com.microsoft's MultiHeadAttention becomes MatMul, Softmax, MatMul (drawn in lower_attention.py)."""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.attend import attend, behind, by_head, causal, masked, side_by_side
from sanitize.passes import Change, Pass
from sanitize.target import Target

KIND = ("com.microsoft", "MultiHeadAttention")


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has a kernel. Raises RingstepError naming node and feature."""
    if not target.htp:
        return []
    return match.lower(model, [KIND], lambda node: _lower(node, masked(target)), "lowered to MatMul and Softmax")


def _lower(node: ir.Node, low: float) -> list[ir.Value | None]:
    if match.used(node, 3):
        raise match.refuse(node, "its output qk is read, and has no lowering; export without it")
    if match.given(node, 8) is not None or match.given(node, 9) is not None:
        raise match.refuse(node, "a shared past buffer (past_sequence_length) has no lowering; use past and present")
    q, k, v, projection, padding, bias, past_key, past_value = (match.given(node, at) for at in range(8))
    if q is None or k is None or v is None or match.rank(q) != 3 or match.rank(k) not in (3, 4):
        raise match.refuse(node, "packed query, key and value have no lowering; export with three inputs")
    heads = graphs.attribute(node, "num_heads", 0)
    if projection is not None:
        q, k, v = _with_projection(node, q, k, v, projection)
    q, k, v = by_head(node, q, heads), by_head(node, k, heads), by_head(node, v, heads)
    new = match.static(node, k, "its keys")[2]
    k, v = behind(node, past_key, k), behind(node, past_value, v)
    _, _, n, size = match.static(node, q, "its query")
    total = match.static(node, k, "its keys and past_key")[2]
    seen = hide(node, padding, q, total, low) if padding is not None else None
    triangle = causal(q, n, total, total - new, low) if graphs.attribute(node, "unidirectional", 0) else None
    result = attend(node, q, k, v, scale=graphs.attribute(node, "scale") or size**-0.5, biases=(bias, seen, triangle))
    return [side_by_side(node, result), k, v]


def _with_projection(
    node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value, bias: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Add the bias of the projections, which lie one behind the other in one vector."""
    if match.rank(k) != 3:
        raise match.refuse(node, "a bias with keys of rank 4 has no lowering")
    sizes = [match.static(node, value, "an input")[2] for value in (q, k, v)]
    parts = match.emit_all(node, "Split", 3, bias, match.ints(*sizes), axis=0)
    q, k, v = (match.emit(node, "Add", value, part) for value, part in zip((q, k, v), parts, strict=True))
    return q, k, v


def hide(node: ir.Node, padding: ir.Value, like: ir.Value, total: int, low: float) -> ir.Value:
    """The bias for a key padding mask [batch, total] or [batch, n, total] of 1 (seen) and 0."""
    shape = match.static(node, padding, "key_padding_mask")
    if len(shape) not in (2, 3) or shape[-1] != total:
        raise match.refuse(node, f"a key_padding_mask {list(shape)} has no lowering; give [batch, {total}]")
    hidden = max(low, graphs.attribute(node, "mask_filter_value", low))
    axes = match.ints(1, 2) if len(shape) == 2 else match.ints(1)
    seen = match.emit(node, "Unsqueeze", match.emit(node, "Cast", padding, to=ir.DataType.BOOL), axes)
    return match.emit(node, "Where", seen, match.floats(like, 0.0), match.floats(like, hidden))


PASS = Pass("lower-multi-head-attention", "com.microsoft MultiHeadAttention to MatMul and Softmax", run, min_db=100.0)
