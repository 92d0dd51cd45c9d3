"""Attention (ONNX, opset 23 and later) becomes MatMul, Softmax, MatMul.

    past ┐                       mask, causal ┐
    k ── Concat ─ Transpose ─ MatMul ─ (Tanh) ─ Add ─ Softmax ─ MatMul ─ y
    q ── Mul scale ───────────┘                   v (Concat) ───┘

A row in which every key is masked comes out as the mean of the values (the operator gives zeros): masks are finite.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.attend import attend, behind, bias_of, by_head, causal, masked, side_by_side
from sanitize.passes import Change, Pass
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has a kernel. Raises RingstepError naming node and feature."""
    if not target.htp:
        return []
    build = lambda node: _lower(node, masked(target))
    return match.lower(model, [("", "Attention")], build, "lowered to MatMul and Softmax")


def _lower(node: ir.Node, low: float) -> list[ir.Value | None]:
    if match.used(node, 3):
        raise match.refuse(node, "its output qk_matmul_output is read, and has no lowering; export without it")
    q, k, v, mask, past_key, past_value, lengths = (match.given(node, at) for at in range(7))
    if q is None or k is None or v is None:
        raise match.refuse(node, "an input is missing")
    flat = match.rank(q) == 3
    heads, kv_heads = (graphs.attribute(node, f"{name}_num_heads", 0) for name in ("q", "kv"))
    q, k, v = by_head(node, q, heads), by_head(node, k, kv_heads), by_head(node, v, kv_heads)
    new = match.static(node, k, "its keys")[2]
    k, v = behind(node, past_key, k), behind(node, past_value, v)
    _, _, n, size = match.static(node, q, "its query")
    total = match.static(node, k, "its keys and past_key")[2]
    biases: list[ir.Value | np.ndarray | None] = []
    if graphs.attribute(node, "is_causal", 0):
        if lengths is not None:
            raise match.refuse(node, "is_causal together with nonpad_kv_seqlen has no lowering; give a mask instead")
        biases.append(causal(q, n, total, total - new, low))
    if mask is not None:
        if match.inner(mask) not in (total, 1):
            raise match.refuse(node, f"its mask covers {match.inner(mask)} of {total} keys; give one for all")
        biases.append(bias_of(node, mask, q, low) if mask.dtype == ir.DataType.BOOL else mask)
    if lengths is not None:
        ends = match.emit(node, "Reshape", lengths, match.ints(-1, 1, 1, 1))
        inside = match.emit(node, "Less", np.arange(total, dtype=np.int64).reshape(1, 1, 1, total), ends)
        biases.append(bias_of(node, inside, q, low))
    scale = graphs.attribute(node, "scale") or size**-0.5
    softcap = graphs.attribute(node, "softcap", 0.0)
    result = attend(node, q, k, v, scale=scale, softcap=softcap, biases=tuple(biases))
    return [side_by_side(node, result) if flat else result, k, v]


PASS = Pass("lower-attention", "Attention to MatMul, Softmax, MatMul", run, min_db=100.0)
