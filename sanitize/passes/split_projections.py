"""A linear layer whose output only a Split on the last axis reads becomes one for each part: merge-projections undone.

Rows of a weight [n, k] in a file stay where they are; columns of one [k, n] are copied when the file is written.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.linear import Linear, cut, linears, reshaped
from sanitize.passes import Change, Pass
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Split every linear layer that feeds a Split alone."""
    changes: list[Change] = []
    for found in linears(model):
        split = graphs.sole_user(found.y)
        sizes = _sizes(found, split) if split is not None else None
        if split is not None and sizes is not None:
            _split(found, split, sizes)
            changes.append(Change(found.node.name or found.node.op_type, f"split into {len(sizes)} linear layers"))
    return changes


def _sizes(found: Linear, split: ir.Node) -> list[int] | None:
    """The parts of the last axis, None if the node is no such Split."""
    if split.op_type != "Split" or split.domain not in ("", "ai.onnx") or split.graph is not found.node.graph:
        return None
    rank = len(found.x.shape) if found.x.shape is not None else 0
    if graphs.attribute(split, "axis", 0) not in (-1, rank - 1) or len(found.weight.uses()) > 1:
        return None
    if found.bias is not None and len(found.bias.uses()) > 1:
        return None
    count = len(split.outputs)
    if len(split.inputs) > 1 and split.inputs[1] is not None:
        given = graphs.array(split.inputs[1])
        sizes = [int(size) for size in given] if given is not None else []
    else:
        # As the standard splits unevenly: equal parts rounded up, the last one smaller.
        size = -(-found.n // count)
        sizes = graphs.attribute(split, "split") or [size] * (count - 1) + [found.n - size * (count - 1)]
    good = len(sizes) == count and sum(sizes) == found.n and min(sizes) > 0
    return list(sizes) if good else None


def _split(found: Linear, split: ir.Node, sizes: list[int]) -> None:
    weight, node, name = graphs.tensor(found.weight), found.node, found.node.name or found.node.op_type
    bias = graphs.tensor(found.bias)
    assert weight is not None
    axis = 0 if found.rows else 1
    attributes = {a.name: a.value for a in node.attributes.values()}
    start = 0
    for i, (size, output) in enumerate(zip(sizes, split.outputs, strict=True)):
        stop = start + size
        part = graphs.initializer(found.weight, f"{found.weight.name}_{i}", cut(weight, start, stop, axis))
        inputs: list[ir.Value | None] = [found.x, part]
        if bias is not None and found.bias is not None:
            piece = cut(reshaped(bias, (found.n,)), start, stop, 0)
            inputs.append(graphs.initializer(found.bias, f"{found.bias.name}_{i}", piece))
        y = graphs.insert(split, node.op_type, inputs, attributes, name=f"{name}/{i}", like=output, dtype=found.x.dtype)
        graphs.replace(output, y)
        start = stop
    graphs.prune(split.outputs[0])


PASS = Pass("split-projections", "a linear layer that a Split follows as one for each part", run, min_db=100.0)
