"""RMSNormalization of rank 3 and more on HTP: garbage, without an error, where the third dim from the end exceeds 8."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms
from sanitize.target import Target

LIMIT = 8


def run(model: ir.Model, target: Target) -> list[Change]:
    """Put such norms over the last dim between Reshapes to rank 2 and back."""
    if not target.htp:
        return []
    changes = []
    for node in graphs.every_node(model):
        if node.op_type != "RMSNormalization" or node.domain not in ("", "ai.onnx"):
            continue
        x, y, shape = node.inputs[0], node.outputs[0], graphs.dims(node.inputs[0])
        if x is None or shape is None or len(shape) < 3 or shape[-3] <= LIMIT:
            continue
        if graphs.attribute(node, "axis", -1) not in (-1, len(shape) - 1):
            continue
        write = forms.Writer(node, x)
        flat = [int(np.prod(shape[:-1])), shape[-1]]
        name = node.name or node.op_type
        whole = graphs.constant(node, f"{name}/shape", np.array(shape, np.int64))
        rows = graphs.constant(node, f"{name}/rows", np.array(flat, np.int64))
        inner = write("Reshape", x, rows)
        inner.shape = ir.Shape(flat)
        normed = graphs.insert(
            node, node.op_type, [inner, *node.inputs[1:]], {**node.attributes, "axis": -1},
            dtype=y.dtype, shape=flat, name=f"{name}/flat",
        )  # fmt: skip
        forms.swap(node, graphs.insert(node, "Reshape", [normed, whole], like=y, name=f"{name}/back"))
        changes.append(Change(name, "RMSNormalization moved to rank 2: garbage -> 74 dB (simulated)"))
    return changes


PASS = Pass("norm-rank", "RMSNormalization over more than 8 slices at rank 2, elsewhere HTP returns garbage", run)
