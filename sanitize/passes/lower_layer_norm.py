"""LayerNormalization where the chip lacks it (v68 with 16 bit activations): the mean taken off, then RMSNormalization.

    x ┬ ReduceMean ─ Sub ─ RMSNormalization(weight) ─ Add bias
      └──────────────┘

The compiler refuses LayerNormalization of 16 bit activations and 16 bit weights on v68, and takes RMSNormalization.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.opset import raise_opset
from sanitize.passes import Change, Pass
from sanitize.passes.fuse_layer_norm import takes_layer_norm
from sanitize.passes.fuse_rms_norm import OPSET, on_last, rms_norm
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module. Norms that are quantised, over several dims, or whose mean is read stay for the lint to name."""
    if takes_layer_norm(target):
        return []
    found = [node for node in graphs.every_node(model) if node.op_type == "LayerNormalization" and _plain(node)]
    if not found or raise_opset(model, OPSET):
        return []
    changes = []
    for node in found:
        x, weight, bias = node.inputs[0], node.inputs[1], match.given(node, 2)
        assert x is not None
        mean = match.emit(node, "ReduceMean", x, match.ints(-1), keepdims=1)
        apart = match.emit(node, "Sub", x, mean)
        result = rms_norm(node, apart, weight, graphs.attribute(node, "epsilon", 1e-5), target, like=apart)
        if bias is not None:
            result = match.emit(node, "Add", result, bias)
        graphs.swap(node, result)
        changes.append(Change(node.name or node.op_type, "LayerNormalization lowered to RMSNormalization"))
    return changes


def _plain(node: ir.Node) -> bool:
    x = node.inputs[0]
    quantised = graphs.dequantised(x) is not None  # what is written in its place would compute in floats
    return x is not None and not quantised and match.inner(x) is not None and on_last(node, x) and not any(
        match.used(node, at) for at in (1, 2)
    )  # fmt: skip


PASS = Pass("lower-layer-norm", "LayerNormalization without a kernel (v68) to RMSNormalization", run, min_db=90.0)
