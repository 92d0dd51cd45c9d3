"""com.microsoft's GroupQueryAttention becomes MatMul, Softmax, MatMul over caches of static size.

    seqlens_k ─ + 1 - n = start ┬ Gather(cos, start + i) ─ rotary of q and k
                                ├ present[start + i] = k[i], the rest is past      (a Where; data flow only)
                                └ key j is hidden from query i if j > start + i, or outside the window

`start` is how many entries of past are valid. Rows of present behind start + n are past's, or zero. A first prompt
that is padded on the right (seqlens_k + 1 < n without any past) differs in its padding rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.attend import attend, bias_of, by_head, masked, rotate, side_by_side
from sanitize.match import emit, ints, refuse, static
from sanitize.passes import Change, Pass
from sanitize.target import Target

KIND = ("com.microsoft", "GroupQueryAttention")
UNSUPPORTED = {11: "head_sink", 12: "k_scale", 13: "v_scale", 14: "q_norm_weight", 15: "k_norm_weight",
               16: "query_seqlens"}  # fmt: skip
SWITCHES = ("smooth_softmax", "sliding_window_cache", "qk_output", "kv_cache_bit_width")


@dataclass(frozen=True)
class Cache:
    """How long things are, and where the new entries go."""

    n: int
    total: int
    past: int
    start: ir.Value | None
    """Valid entries of past, int32 [batch, 1, 1, 1]; None: there is no past."""


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has a kernel. Raises RingstepError naming node and feature."""
    if not target.htp:
        return []
    return match.lower(model, [KIND], lambda node: _lower(node, masked(target)), "lowered to MatMul and Softmax")


def _lower(node: ir.Node, low: float) -> list[ir.Value | None]:
    match.refuse_inputs(node, UNSUPPORTED)
    for name in SWITCHES:
        if graphs.attribute(node, name, 0) > 0:
            raise refuse(node, f"its attribute {name} has no lowering; export without it")
    q, k, v, past_key, past_value, lengths, _, cos, sin, positions, bias = (match.given(node, i) for i in range(11))
    heads, kv_heads = graphs.attribute(node, "num_heads", 0), graphs.attribute(node, "kv_num_heads", 0)
    if q is None or lengths is None:
        raise refuse(node, "an input is missing")
    if k is None or v is None:
        size = static(node, q, "its query")[2] // (heads + 2 * kv_heads)
        q, k, v = match.emit_all(node, "Split", 3, q, ints(*(size * h for h in (heads, kv_heads, kv_heads))), axis=2)
    q, k, v = by_head(node, q, heads), by_head(node, k, kv_heads), by_head(node, v, kv_heads)
    _, _, n, size = static(node, q, "its query")
    cache = _cache(node, n, past_key, lengths)
    if graphs.attribute(node, "do_rotary", 0):
        if cos is None or sin is None:
            raise refuse(node, "do_rotary without cos_cache and sin_cache")
        q, k = _rotated(node, q, k, cos, sin, positions, cache)
    keys, values = _present(node, k, past_key, cache), _present(node, v, past_value, cache)
    if bias is not None and match.inner(bias) != cache.total:
        raise refuse(node, f"its attention_bias covers {match.inner(bias)} of {cache.total} keys; give one for all")
    result = attend(
        node, q, keys, values, scale=graphs.attribute(node, "scale", 0.0) or size**-0.5,
        softcap=graphs.attribute(node, "softcap", 0.0), biases=(bias, _hidden(node, q, cache, low)),
    )  # fmt: skip
    return [side_by_side(node, result), keys, values]


def _cache(node: ir.Node, n: int, past_key: ir.Value | None, lengths: ir.Value) -> Cache:
    past = static(node, past_key, "past_key")[2] if past_key is not None else 0
    present = graphs.dims(node.outputs[1]) if len(node.outputs) > 1 else None
    longest = graphs.scalar(match.given(node, 6))
    if present is not None:
        total = present[2]
    elif longest is not None or not past:
        total = max(int(longest or n), past, n)
    else:
        raise refuse(node, "the length of present_key is not static; fix the model's output shapes first")
    if total < max(past, n):
        raise refuse(node, f"present_key holds {total} entries, past_key {past}; fix the model's shapes")
    if not past:
        return Cache(n, total, 0, None)
    # seqlens_k counts the last entry from 0.
    start = emit(node, "Sub", lengths, np.array(n - 1, np.int32))
    return Cache(n, total, past, emit(node, "Reshape", start, ints(-1, 1, 1, 1)))


def _rotated(
    node: ir.Node, q: ir.Value, k: ir.Value, cos: ir.Value, sin: ir.Value, positions: ir.Value | None, cache: Cache
) -> tuple[ir.Value, ir.Value]:
    half = match.inner(cos)
    if half is None:
        raise refuse(node, "the width of cos_cache is not static")
    steps = np.arange(cache.n, dtype=np.int32)
    if cache.start is None and positions is None:
        rows = (emit(node, "Slice", table, ints(0), ints(cache.n), ints(0)) for table in (cos, sin))
    else:
        if positions is None:
            positions = emit(node, "Add", emit(node, "Reshape", cache.start, ints(-1, 1)), steps)
        elif cache.start is None:
            # Of a first prompt's positions the operator reads one and counts on from there.
            first = emit(node, "Slice", emit(node, "Reshape", positions, ints(-1)), ints(0), ints(1))
            positions = emit(node, "Add", first, steps.astype((positions.dtype or ir.DataType.INT64).numpy()))
        rows = (emit(node, "Gather", table, positions, axis=0) for table in (cos, sin))
    cos, sin = (emit(node, "Reshape", row, ints(-1, 1, cache.n, half)) for row in rows)
    interleaved = bool(graphs.attribute(node, "rotary_interleaved", 0))
    q, k = (rotate(node, x, cos, sin, interleaved=interleaved, rotated=2 * half) for x in (q, k))
    return q, k


def _present(node: ir.Node, new: ir.Value, past: ir.Value | None, cache: Cache) -> ir.Value:
    """[batch, kv heads, total, size]: past with the new entries in their place."""
    batch, heads, _, size = static(node, new, "its keys")
    room = cache.total - (cache.past or cache.n)
    if cache.start is None or past is None:
        return _padded(node, new, (batch, heads, room, size))
    past = _padded(node, past, (batch, heads, room, size))
    rows = np.arange(cache.total, dtype=np.int32).reshape(1, 1, -1, 1)
    if cache.n == 1:
        return emit(node, "Where", emit(node, "Equal", rows, cache.start), new, past)
    # Row j takes new entry j - start: a product with zeros and ones, exact in any precision.
    steps = np.arange(cache.n, dtype=np.int32).reshape(1, 1, 1, -1)
    ahead = (rows - steps).astype(np.int32)
    chosen = emit(node, "Cast", emit(node, "Equal", ahead, cache.start), to=new.dtype or ir.DataType.FLOAT)
    moved = emit(node, "MatMul", chosen, new)
    return emit(node, "Where", emit(node, "Less", rows, cache.start), past, moved)


def _padded(node: ir.Node, x: ir.Value, room: tuple[int, int, int, int]) -> ir.Value:
    if not room[2]:
        return x
    return emit(node, "Concat", x, match.floats(x, np.zeros(room)), axis=2)


def _hidden(node: ir.Node, like: ir.Value, cache: Cache, low: float) -> ir.Value | np.ndarray | None:
    """The bias of the causal mask and the window."""
    window = graphs.attribute(node, "local_window_size", -1)
    ahead = np.arange(cache.total)[None, :] - np.arange(cache.n)[:, None]
    if not graphs.attribute(node, "causal", 1):
        raise refuse(node, "causal = 0 has no lowering; use MultiHeadAttention")
    if cache.start is None:
        hidden = (ahead > 0) | ((ahead <= -window) if window > 0 else False)
        return match.floats(like, np.where(hidden, low, 0.0)) if hidden.any() else None
    ahead = ahead.astype(np.int32).reshape(1, 1, cache.n, cache.total)
    allowed = emit(node, "LessOrEqual", ahead, cache.start)
    if window > 0:
        near = emit(node, "Greater", (ahead + np.int32(window)).astype(np.int32), cache.start)
        allowed = emit(node, "And", allowed, near)
    return bias_of(node, allowed, like, low)


PASS = Pass("lower-group-query-attention", "com.microsoft GroupQueryAttention to MatMul and Softmax", run, min_db=100.0)
