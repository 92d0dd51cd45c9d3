"""Rotary embedding and attention out of elementary operators of rank 4 at most: what the lowerings build.

Shapes: queries [batch, heads, n, size], keys and values [batch, kv heads, total, size]. Heads of a group read the same
keys because the query is reshaped, never because keys are repeated.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.match import emit, emit_all, floats, inner, ints, rank, refuse, static
from sanitize.target import Target


def masked(target: Target) -> float:
    """What is added to the score of a key that must not be seen: e to it is 0, and it is finite.

    fp16 has room for two of them; 16 bits over 10000 would be steps of 0.15.
    """
    return -100.0 if target.precision == "a16" else -10000.0


def rotate(
    before: ir.Node, x: ir.Value, cos: ir.Value, sin: ir.Value, *, interleaved: bool, rotated: int = 0
) -> ir.Value:
    """Rotate the leading `rotated` (0: all) elements of x's last dim, the rest pass through.

    x has rank 4; cos and sin broadcast against it, with rotated / 2 as the last dim. Pairs are (i, i + rotated / 2),
    interleaved (2i, 2i + 1).
    """
    size = inner(x)
    assert size is not None
    rotated = rotated or size
    half, tail = rotated // 2, size - rotated
    rest: list[ir.Value] = []
    if interleaved:
        if tail:
            x, passed = emit_all(before, "Split", 2, x, ints(rotated, tail), axis=3)
            rest = [passed]
        first, second = (emit(before, "Slice", x, ints(at), ints(rotated), ints(3), ints(2)) for at in (0, 1))
    else:
        sizes = (half, half, tail) if tail else (half, half)
        first, second, *rest = emit_all(before, "Split", len(sizes), x, ints(*sizes), axis=3)
    minus = emit(before, "Sub", emit(before, "Mul", first, cos), emit(before, "Mul", second, sin))
    plus = emit(before, "Add", emit(before, "Mul", second, cos), emit(before, "Mul", first, sin))
    if not interleaved:
        return emit(before, "Concat", minus, plus, *rest, axis=3)
    # A fifth dim would do it in one step; HTP wants four.
    columns = [emit(before, "Reshape", part, ints(0, 0, -1, 1)) for part in (minus, plus)]
    turned = emit(before, "Reshape", emit(before, "Concat", *columns, axis=3), ints(0, 0, -1, rotated))
    return emit(before, "Concat", turned, *rest, axis=3) if rest else turned


def by_head(before: ir.Node, x: ir.Value, heads: int) -> ir.Value:
    """[batch, n, heads * size] as [batch, heads, n, size]; what has rank 4 already stays."""
    if rank(x) == 4:
        return x
    batch, n, hidden = static(before, x, f"input {x.name}")
    if not heads or hidden % heads:
        raise refuse(before, f"{hidden} elements do not divide into {heads} heads")
    if n == 1:
        return emit(before, "Reshape", x, ints(batch, heads, 1, hidden // heads))
    x = emit(before, "Reshape", x, ints(batch, n, heads, hidden // heads))
    return emit(before, "Transpose", x, perm=[0, 2, 1, 3])


def behind(before: ir.Node, past: ir.Value | None, new: ir.Value) -> ir.Value:
    """[batch, heads, n, size] behind a cache [batch, heads, past, size] if there is one."""
    return emit(before, "Concat", past, new, axis=2) if past is not None else new


def side_by_side(before: ir.Node, x: ir.Value) -> ir.Value:
    """[batch, heads, n, size] as [batch, n, heads * size]."""
    batch, heads, n, size = static(before, x, "its result")
    if n > 1:
        x = emit(before, "Transpose", x, perm=[0, 2, 1, 3])
    return emit(before, "Reshape", x, ints(batch, n, heads * size))


def attend(
    before: ir.Node,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    *,
    scale: float,
    softcap: float = 0.0,
    biases: tuple[ir.Value | np.ndarray | None, ...] = (),
) -> ir.Value:
    """softmax(softcap(scale q k') + biases) v, as [batch, heads, n, value size]. Biases broadcast to the scores."""
    batch, heads, n, size = static(before, q, "its query")
    _, kv_heads, total, _ = static(before, k, "its keys")
    if heads % kv_heads:
        raise refuse(before, f"{heads} query heads do not divide into groups of {kv_heads}")
    added = [bias for bias in biases if bias is not None]
    grouped = heads != kv_heads
    # With one query a row of scores is a head, and a bias that is the same for all heads fits as it is.
    apart = grouped and bool(added) and not (n == 1 and all(_same_for_heads(bias) for bias in added))
    q = emit(before, "Mul", q, floats(q, scale))
    rows = heads // kv_heads * n
    if grouped:
        q = emit(before, "Reshape", q, ints(batch, kv_heads, rows, size))
    scores = emit(before, "MatMul", q, emit(before, "Transpose", k, perm=[0, 1, 3, 2]))
    if softcap:
        scores = emit(before, "Tanh", emit(before, "Mul", scores, floats(scores, 1 / softcap)))
        scores = emit(before, "Mul", scores, floats(scores, softcap))
    if apart:
        scores = emit(before, "Reshape", scores, ints(batch, heads, n, total))
    for bias in added:
        scores = emit(before, "Add", scores, bias)
    weights = emit(before, "Softmax", scores, axis=-1)
    if apart:
        weights = emit(before, "Reshape", weights, ints(batch, kv_heads, rows, total))
    result = emit(before, "MatMul", weights, v)
    if grouped:
        result = emit(before, "Reshape", result, ints(batch, heads, n, inner(v) or -1))
    return result


def _same_for_heads(bias: ir.Value | np.ndarray) -> bool:
    shape = bias.shape if isinstance(bias, np.ndarray) else graphs.dims(bias)
    return shape is not None and (len(shape) < 3 or shape[-3] == 1)


def causal(like: ir.Value, n: int, total: int, past: int, low: float) -> np.ndarray | None:
    """A bias, `low`, that hides from query i every key after i + past; None if that hides nothing."""
    hidden = np.arange(total)[None, :] > np.arange(n)[:, None] + past
    return floats(like, np.where(hidden, low, 0.0)) if hidden.any() else None


def bias_of(before: ir.Node, allowed: ir.Value, like: ir.Value, low: float) -> ir.Value:
    """0 where a boolean mask allows, `low` elsewhere."""
    return emit(before, "Where", allowed, floats(like, 0.0), floats(like, low))
