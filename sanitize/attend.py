"""Rotary embedding and attention out of elementary operators of rank 4 at most: what the lowerings build."""

from __future__ import annotations

import onnx_ir as ir

from sanitize.match import emit, emit_all, inner, ints


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
