"""RMSNorm as exporters spell it becomes RMSNormalization.

    x ─ (Cast) ┬ Mul(x, x) | Pow(x, 2) ─ ReduceMean ─ Add eps ─ Sqrt ─ Reciprocal | Div(1, .) ┐
               │                                              │ Pow(., -0.5) ─────────────────┤
               └──────────────────────────────── Div(x, Sqrt) | Mul(x, .) ────────────────────┘ (Cast) ─ Mul weight

The decomposed form squares x, which overflows fp16 above 255: the massive activations of a first token turn into
garbage on HTP. HTP computes RMSNormalization right at rank 2, or while the third dim from the end is 8 or less.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.norms import Norm, find_norm
from sanitize.opset import raise_opset
from sanitize.passes import Change, Pass
from sanitize.target import Target

OPSET = 23
SAFE_ROWS = 8  # docs/htp-accuracy.md
WIDEST = 1 << 24  # elements of a row of ones that is written down


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module. A model that cannot reach opset 23 stays as it is; accurate-square keeps its squares in range."""
    decomposed = lambda node: find_norm(node) if node.op_type == "ReduceMean" else None
    native = lambda node: _is_other_spelling(node) or _is_unsafe(node, target)
    nodes = [node for node in graphs.every_node(model) if native(node) or decomposed(node)]
    if not nodes or raise_opset(model, OPSET):
        return []
    changes: list[Change | None] = []
    for node in nodes:
        # Found anew: the norm before may have been what this one reads.
        norm = decomposed(node)
        changes.append(_respell(node, target) if norm is None else _fuse(norm, target))
    return [change for change in changes if change is not None]


def _fuse(norm: Norm, target: Target) -> Change:
    old, name = norm.last.outputs[0], norm.last.name or norm.last.op_type
    graphs.swap(norm.last, rms_norm(norm.last, norm.x, norm.weight, norm.eps, target, like=old))
    return Change(name, "decomposed RMSNorm fused into RMSNormalization")


def rms_norm(
    before: ir.Node, x: ir.Value, weight: ir.Value | None, eps: float, target: Target, like: ir.Value
) -> ir.Value:
    """Add an RMSNormalization over x's last dim (which is known) before a node, on a matrix where HTP needs that.

    `weight` None: ones. `like` has the result's type and shape. Needs opset 23.
    """
    name = before.name or before.op_type
    size = match.inner(x)
    assert size is not None
    if weight is None:
        if size > WIDEST:
            raise match.refuse(before, f"{size} elements in a row are no norm")
        weight = graphs.constant(before, f"{name}/ones", match.floats(x, [1.0] * size))
    elif match.rank(weight) != 1:
        weight = match.emit(before, "Reshape", weight, match.ints(size))
    rows = _rows(x, size) if target.htp and not _is_safe(x) else None
    flat = match.emit(before, "Reshape", x, match.ints(rows[0], size)) if rows else x
    attributes = {"axis": -1, "epsilon": eps}
    shape = flat.shape if rows else like.shape
    result = graphs.insert(
        before, "RMSNormalization", [flat, weight], attributes, name=f"{name}/RMSNormalization",
        dtype=weight.dtype, shape=shape,
    )  # fmt: skip
    if not rows:
        return result
    back = graphs.constant(before, f"{name}/shape", match.ints(*rows[1]))
    return graphs.insert(before, "Reshape", [result, back], name=f"{name}/Reshape", like=like)


def _is_safe(x: ir.Value) -> bool:
    if x.shape is None or len(x.shape) <= 2:
        return x.shape is not None
    third = x.shape[-3]
    return isinstance(third, int) and third <= SAFE_ROWS


def _rows(x: ir.Value, size: int) -> tuple[int, tuple[int, ...]] | None:
    """Rows of x as a matrix (-1: not static) and the shape to return to; None if that cannot be written down."""
    if x.shape is None:
        return None
    known = [dim for dim in x.shape if isinstance(dim, int)]
    if len(known) < len(x.shape) - 1 or 0 in known:
        return None
    rows = math.prod(known) // size if len(known) == len(x.shape) else -1
    return rows, tuple(dim if isinstance(dim, int) else -1 for dim in x.shape)


def _is_other_spelling(node: ir.Node) -> bool:
    return node.op_type == "SimplifiedLayerNormalization" and node.domain in ("", "ai.onnx", "com.microsoft")


def _is_unsafe(node: ir.Node, target: Target) -> bool:
    """Whether HTP computes this RMSNormalization wrongly and a matrix can be made of its input."""
    if not target.htp or node.op_type != "RMSNormalization" or node.domain not in ("", "ai.onnx"):
        return False
    x = node.inputs[0]
    if x is None or x.shape is None or _is_safe(x) or not on_last(node, x):
        return False
    size = match.inner(x)
    return size is not None and _rows(x, size) is not None


def on_last(node: ir.Node, x: ir.Value) -> bool:
    axis = graphs.attribute(node, "axis", -1)
    return axis == -1 or axis == (match.rank(x) or 0) - 1


def _respell(node: ir.Node, target: Target) -> Change | None:
    x, weight, old = node.inputs[0], node.inputs[1], node.outputs[0]
    if x is None or match.inner(x) is None or not on_last(node, x):
        return None
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return None
    what = f"{node.op_type} on a matrix, the form HTP computes rightly"
    if node.op_type != "RMSNormalization":
        what = f"{node.op_type} renamed to RMSNormalization"
    result = rms_norm(node, x, weight, graphs.attribute(node, "epsilon", 1e-5), target, like=old)
    graphs.swap(node, result)
    return Change(node.name or node.op_type, what)


PASS = Pass("fuse-rms-norm", "decomposed RMSNorm to RMSNormalization, as HTP computes it rightly", run, min_db=90.0)
