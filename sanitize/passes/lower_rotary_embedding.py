"""RotaryEmbedding (ONNX's and com.microsoft's) becomes Split, Mul, Add and Concat, which HTP has.

x ─ Split ┬ first * cos - second * sin ┬ Concat          cos, sin: as given, or Gather(cache, position_ids)
          └ second * cos + first * sin ┘
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.attend import rotate
from sanitize.passes import Change, Pass
from sanitize.target import Target

MICROSOFT = "com.microsoft"


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a CPU has kernels for both. Raises RingstepError naming node and feature."""
    kinds = (("", "RotaryEmbedding"), (MICROSOFT, "RotaryEmbedding"))
    return match.lower(model, kinds, _lower, "lowered to Mul and Add") if target.htp else []


def _lower(node: ir.Node) -> list[ir.Value | None]:
    microsoft = node.domain == MICROSOFT
    x, positions = match.given(node, 0), match.given(node, 1 if microsoft else 3)
    cos, sin = (match.given(node, at) for at in ((2, 3) if microsoft else (1, 2)))
    rank = match.rank(x)
    if x is None or cos is None or sin is None or rank not in (3, 4):
        raise match.refuse(node, "its input has no known rank of 3 or 4")
    if graphs.attribute(node, "is_packed_batching", 0):
        raise match.refuse(node, "packed batches (is_packed_batching) have no form on the NPU; export without them")
    if graphs.attribute(node, "scale", 1.0) != 1.0:
        raise match.refuse(node, "a scale other than 1 is not supported; scale the caches instead")
    rotated, heads = graphs.attribute(node, "rotary_embedding_dim", 0), graphs.attribute(node, "num_heads", 0)
    hidden = match.inner(x)
    if rank == 3:
        half = match.inner(cos)
        if hidden is None or (not heads and half is None):
            raise match.refuse(node, "its hidden size is not static")
        size = hidden // heads if heads else 2 * (half or 1)
        x = match.emit(node, "Reshape", x, match.ints(0, 0, hidden // size, size))
    axis = 2 if rank == 3 else 1
    if positions is not None:
        cos, sin, axes = _gather(node, cos, sin, positions, 1 if rank == 3 else 2, axis)
    else:
        axes = match.ints(axis)
    cos, sin = (match.emit(node, "Unsqueeze", table, axes) for table in (cos, sin))
    interleaved = bool(graphs.attribute(node, "interleaved", 0))
    result = rotate(node, x, cos, sin, interleaved=interleaved, rotated=rotated)
    return [match.emit(node, "Reshape", result, match.ints(0, 0, hidden or -1)) if rank == 3 else result]


def _gather(
    node: ir.Node, cos: ir.Value, sin: ir.Value, positions: ir.Value, sequence_axis: int, head_axis: int
) -> tuple[ir.Value, ir.Value, np.ndarray]:
    """The rows of the caches, and the axes to put in so that they broadcast against x of rank 4."""
    axes = match.ints(head_axis)
    if match.rank(positions) == 1:
        # One number: where the sequence starts.
        x = node.inputs[0]
        length = x.shape[1 if match.rank(x) == 3 else 2] if x is not None and x.shape is not None else None
        if not isinstance(length, int):
            raise match.refuse(node, "its sequence length is not static")
        dtype = positions.dtype or ir.DataType.INT64
        positions = match.emit(node, "Add", positions, np.arange(length, dtype=dtype.numpy()))
        axes = match.ints(0, 1 if sequence_axis == 2 else 2)
    cos, sin = (match.emit(node, "Gather", table, positions, axis=0) for table in (cos, sin))
    return cos, sin, axes


PASS = Pass("lower-rotary-embedding", "RotaryEmbedding to Mul, Add and Concat", run, min_db=110.0)
