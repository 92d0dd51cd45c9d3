"""Reshape with allowzero=1, as the dynamo exporter writes it, without the attribute.

allowzero=1 says that a 0 in the shape is a dimension of size 0; without it a 0 copies the input's dimension. Where the
shape holds no 0 both mean the same. The shape is a constant, or made of constants and of dims of static tensors; then
it becomes a constant. Where a 0 cannot be ruled out, converters for phones would go wrong, so that is an error for
qnn-htp; runtimes on a CPU know the attribute and keep it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.passes import Change, Pass, fold
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Clear allowzero everywhere. Raises RingstepError naming the node where it must stay and the target is qnn-htp."""
    changes: list[Change] = []
    known: fold.Known | None = None
    for node in graphs.every_node(model):
        if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx"):
            continue
        shape = node.inputs[1]
        if shape is None or not graphs.attribute(node, "allowzero", 0):
            continue
        sizes = graphs.array(shape)
        if sizes is None:
            known = fold.known_values(model)[0] if known is None else known
            sizes = known.get(shape, _from_output(node))
        if sizes is None or 0 in sizes:
            if target.htp:
                raise RingstepError(_why(node, shape, sizes))
            continue
        what = "allowzero=1 cleared"
        if graphs.tensor(shape) is None:
            node.replace_input_with(1, graphs.constant(node, f"{shape.name}_sizes", sizes.astype(np.int64)))
            what += ", its shape folded"
        del node.attributes["allowzero"]
        changes.append(Change(node.name or "Reshape", what))
    return changes


def _why(node: ir.Node, shape: ir.Value, sizes: np.ndarray | None) -> str:
    where = f"node {node.name or node.outputs[0].name!r} (Reshape with allowzero=1)"
    if sizes is None:
        return (
            f"{where}: its shape {shape.name!r} is computed from sizes that are not fixed, so a 0 cannot be ruled out; "
            "export with fixed input shapes, or fix them with --dim"
        )
    return (
        f"{where}: its shape {sizes.tolist()} holds a 0: an empty tensor, which the NPU cannot hold; cut that part off"
    )


def _from_output(node: ir.Node) -> np.ndarray | None:
    """The output's static shape, if the input is static as well and has as many elements, and some."""
    source, result = graphs.dims(node.inputs[0]), graphs.dims(node.outputs[0])
    if source is None or result is None or not np.prod(source) or np.prod(source) != np.prod(result):
        return None
    return np.array(result)


PASS = Pass("reshape-allowzero", "clear Reshape's allowzero=1 where the shape holds no 0", run)
