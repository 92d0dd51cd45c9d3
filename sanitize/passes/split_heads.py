"""Attention over a batch of heads becomes one chain of operators for each head.

    q [1, h, n, d] ─┐                                                   for each head
                    MatMul ─ Add ─ Softmax    q ─ Reshape [h, n, d] ─ Split ─ [1, n, d] ─┐
    k [1, h, d, m] ─┘                                                                    MatMul ─ Add ─ Softmax
                                              k ─ Reshape [h, d, m] ─ Split ─ [1, d, m] ─┘

A chain starts at a MatMul of two activations whose only batch dimension is the heads, and goes on through elementwise
operators, Softmax, reductions, Concat, Split, Transpose and Reshape as long as heads stay apart; behind it the parts
are put together again. Other operands are split, or go to each head as they are where they are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.passes.linear_as_conv import ELEMENTWISE
from sanitize.target import Target

Parts = dict[tuple[int, ir.Value], list[ir.Value]]
"""By graph, by id, and value: the heads of a value [1.., h, *tail] as values [1, *tail]."""


def run(model: ir.Model, target: Target) -> list[Change]:
    """Split every attention of static shape."""
    if graphs.opset(model) < 13:
        return []  # Softmax and Split were other operators then
    changes: list[Change] = []
    chains: Parts = {}
    others: Parts = {}
    for node in graphs.every_node(model):
        if node.domain != "" or any(graphs.dims(v) is None for v in (*node.outputs, *_given(node))):
            continue
        heads = _heads(node, chains)
        parts = _apply(node, heads, chains, others) if heads else None
        if parts is None:
            continue
        if node.op_type == "MatMul":
            changes.append(Change(node.name or node.op_type, f"split into {heads} heads"))
        for output, split in zip(list(node.outputs), parts, strict=True):
            whole = _join(node, split, graphs.dims(output) or ())
            graphs.replace(output, whole)
            chains[id(node.graph), whole] = split
        graphs.prune(node.outputs[0])
    return changes


def _given(node: ir.Node) -> list[ir.Value]:
    return [v for v in node.inputs if v is not None]


def _heads(node: ir.Node, chains: Parts) -> int:
    """How many heads a node works on separately: those of a chain it reads, or of a MatMul that starts one; else 0."""
    for value in _given(node):
        if (parts := chains.get((id(node.graph), value))) is not None:
            return len(parts)
    if node.op_type != "MatMul" or any(graphs.tensor(v) is not None for v in _given(node)):
        return 0
    shape = graphs.dims(node.outputs[0]) or ()
    return shape[-3] if len(shape) in (3, 4) and math.prod(shape[:-2]) == shape[-3] > 1 else 0


def _tail(shape: Sequence[int], heads: int) -> tuple[int, ...] | None:
    """What follows the heads in a shape [1.., h, *tail], None for other shapes."""
    for i, size in enumerate(shape):
        if size != 1:
            return tuple(shape[i + 1 :]) if size == heads else None
    return None


def _apply(node: ir.Node, heads: int, chains: Parts, others: Parts) -> list[list[ir.Value]] | None:
    """The parts of each output, None where the node mixes heads or is none of those that are known."""
    wholes = [graphs.dims(v) or () for v in node.outputs]
    tails = [_tail(shape, heads) for shape in wholes]
    if any(tail is None for tail in tails):
        return None
    tail = tails[0] or ()
    rank, out_rank = len(tail) + 1, len(wholes[0])
    first = graphs.dims(_given(node)[0]) or ()
    in_tail = _tail(first, heads)
    op, attributes = node.op_type, {a.name: a.value for a in node.attributes.values()}
    # Axes count from the end: the parts lost dimensions before the heads only.
    axis = graphs.attribute(node, "axis", {"Softmax": -1, "Split": 0}.get(op, 0))
    behind = axis if axis < 0 else axis - len(first)
    if op in ("Softmax", "Concat", "Split"):
        if in_tail is None or behind < -len(in_tail):
            return None
        attributes["axis"] = behind
    read: list[list[ir.Value] | None]
    if op == "MatMul":
        if rank != 3 or any(graphs.tensor(v) is not None for v in node.inputs):
            return None
        read = [_operand(node, v, heads, out_rank, rank, chains, others, matrix=True) for v in node.inputs]
    elif op in ELEMENTWISE:
        read = [_operand(node, v, heads, out_rank, rank, chains, others) for v in node.inputs]
    elif op in ("Softmax", "Concat"):
        read = [chains.get((id(node.graph), v)) or _split(node, v, heads, others) if v else None for v in node.inputs]
    elif op in ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"):
        axes = graphs.array(node.inputs[1]) if len(node.inputs) > 1 else graphs.attribute(node, "axes")
        from_end = [int(a) if a < 0 else int(a) - len(first) for a in (axes if axes is not None else ())]
        if in_tail is None or not from_end or min(from_end) < -len(in_tail) or not attributes.get("keepdims", 1):
            return None
        read = [chains.get((id(node.graph), _given(node)[0]))]
        if len(node.inputs) > 1:
            given = graphs.constant(node, f"{node.name or op}/heads_axes", np.array(from_end, np.int64))
            read.append([given] * heads)
        else:
            attributes["axes"] = from_end
    elif op == "Split":
        read = [chains.get((id(node.graph), _given(node)[0])), *([v] * heads if v else None for v in node.inputs[1:])]
    elif op == "Transpose":
        perm, lead = attributes.get("perm"), len(first) - len(in_tail or ()) - 1
        if in_tail is None or not perm or list(perm[: lead + 1]) != list(range(lead + 1)):
            return None
        attributes["perm"] = [0, *(p - lead for p in perm[lead + 1 :])]
        read = [chains.get((id(node.graph), _given(node)[0]))]
    elif op == "Reshape":
        to = graphs.constant(node, f"{node.name or op}/heads_shape", np.array([1, *tail], np.int64))
        attributes, read = {}, [chains.get((id(node.graph), _given(node)[0])), [to] * heads]
    else:
        return None
    if any(v is not None and parts is None for v, parts in zip(node.inputs, read, strict=True)):
        return None
    return _each(node, heads, [t or () for t in tails], attributes, read)


def _each(
    node: ir.Node, heads: int, tails: list[tuple[int, ...]], attributes: dict[str, object],
    read: Sequence[Sequence[ir.Value] | None],
) -> list[list[ir.Value]]:  # fmt: skip
    """The node once for each head: the parts of each output."""
    results: list[list[ir.Value]] = [[] for _ in node.outputs]
    for head in range(heads):
        name = f"{node.name or node.op_type}/{head}"
        inputs = [parts[head] if parts is not None else None for parts in read]
        if node.op_type == "Split":
            axis = attributes["axis"]
            assert isinstance(axis, int) and inputs[0] is not None
            made = graphs.split(node, inputs[0], [([1, *t])[axis] for t in tails], axis, name=name)
        else:
            made = (graphs.insert(node, node.op_type, inputs, attributes, name=name, like=node.outputs[0],
                                  shape=(1, *tails[0])),)  # fmt: skip
        for result, value in zip(results, made, strict=True):
            result.append(value)
    return results


def _operand(
    node: ir.Node, value: ir.Value | None, heads: int, out_rank: int, rank: int, chains: Parts, others: Parts,
    *, matrix: bool = False,
) -> list[ir.Value] | None:  # fmt: skip
    """One value for each head that broadcasts against parts of `rank` as `value` does against the whole."""
    if value is None:
        return None
    if (parts := chains.get((id(node.graph), value))) is not None:
        # Parts of the same length as the output's, or the heads stand elsewhere.
        return parts if len(parts) == heads and len(parts[0].shape or ()) == rank else None
    shape = graphs.dims(value)
    if shape is None or (matrix and len(shape) < 2):
        return None
    padded = (1,) * (out_rank - len(shape)) + shape
    before, tail = padded[: out_rank - rank + 1], padded[out_rank - rank + 1 :]
    if math.prod(before) == 1:
        if len(shape) <= rank:
            return [value] * heads
        return [graphs.reshape(node, value, (1, *tail), name=f"{node.name or node.op_type}/for_all")] * heads
    return _split(node, value, heads, others) if before[-1] == heads == math.prod(before) else None


def _split(node: ir.Node, value: ir.Value, heads: int, others: Parts) -> list[ir.Value] | None:
    """The heads of a value from outside the chains."""
    key = id(node.graph), value
    if key not in others:
        tail = _tail(graphs.dims(value) or (), heads)
        if tail is None:
            return None
        whole, name = (heads, *tail), f"{node.name or node.op_type}/heads"
        flat = value if graphs.dims(value) == whole else graphs.reshape(node, value, whole, name=f"{name}/flat")
        others[key] = list(graphs.split(node, flat, [1] * heads, 0, name=name))
    return others[key]


def _join(node: ir.Node, parts: list[ir.Value], shape: tuple[int, ...]) -> ir.Value:
    name = f"{node.name or node.op_type}/joined"
    whole = (len(parts), *(graphs.dims(parts[0]) or ())[1:])
    value = graphs.insert(node, "Concat", parts, {"axis": 0}, name=name, like=parts[0], shape=whole)
    if whole != shape:
        value = graphs.reshape(node, value, shape, name=f"{node.name or node.op_type}/whole")
    return value


PASS = Pass("split-heads", "attention over a batch of heads as one chain for each head", run, min_db=100.0)
