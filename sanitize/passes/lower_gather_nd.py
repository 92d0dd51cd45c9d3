"""GatherND of constant indices to Gather, or to a Reshape where it gathers everything in order.

    GatherND(mask [1, 8], [[[0, 0]], ..., [[0, 7]]])  ->  Reshape(mask, [1, 1, 1, 8])

The dynamo exporter writes every padding mask so, and HTP's GatherND takes no bool and no int64 (sanitize/support).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Only for HTP, and only without batch_dims; data [d0, .., dk, rest], indices [.., k]."""
    changes: list[Change] = []
    if not target.htp:
        return changes
    for node in graphs.every_node(model):
        if node.op_type != "GatherND" or node.domain or graphs.attribute(node, "batch_dims", 0):
            continue
        data, output = node.inputs[0], node.outputs[0]
        shape, indices = graphs.dims(data), graphs.array(node.inputs[1])
        if data is None or shape is None or indices is None or 0 in shape or 0 in indices.shape:
            continue
        if not indices.ndim or indices.dtype.kind != "i":
            continue
        depth = indices.shape[-1]
        head, rest = shape[:depth], shape[depth:]
        columns = np.moveaxis(indices, -1, 0)
        if any((column < -size).any() or (column >= size).any() for column, size in zip(columns, head, strict=True)):
            continue  # out of range: the runtime's error is the truth about this model
        flat = np.ravel_multi_index(tuple(c % s for c, s in zip(columns, head, strict=True)), head)
        name, final = node.name or output.name or "GatherND", (*flat.shape, *rest)
        if flat.size == math.prod(head) and np.array_equal(flat.reshape(-1), np.arange(flat.size)):
            new = graphs.reshape(node, data, final, name=f"{name}/Reshape")
            what = "GatherND of everything in order is a Reshape"
        else:
            table = data if depth == 1 else graphs.reshape(node, data, (math.prod(head), *rest), name=f"{name}/flat")
            rows = graphs.constant(node, f"{name}/indices", flat.astype(np.int32))
            new = graphs.insert(node, "Gather", [table, rows], {"axis": 0}, name=f"{name}/Gather", dtype=data.dtype,
                                shape=final)  # fmt: skip
            what = "GatherND of constant indices is a Gather"
        graphs.swap(node, new)
        changes.append(Change(name, what))
    return changes


PASS = Pass("lower-gather-nd", "GatherND of constant indices to Gather or Reshape", run)
