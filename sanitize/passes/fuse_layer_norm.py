"""LayerNorm as exporters spell it becomes LayerNormalization.

    x ┬ ReduceMean ┐
      └─────────── Sub ─ d ┬ Mul(d, d) | Pow(d, 2) ─ ReduceMean ─ Add eps ─ Sqrt ┐
                           └───────────────────────── Div | Mul(Reciprocal) ─────┘ Mul weight ─ Add bias

It must run before fuse-rms-norm, which would take the second half. Where the chip lacks LayerNormalization of 16 bit
weights (v68) that is the wish: a mean taken off and RMSNormalization compile there.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.norms import cast_back, find_norm, is_vector, same, times_weight
from sanitize.opset import raise_opset
from sanitize.passes import Change, Pass
from sanitize.target import Target

OPSET = 17


@dataclass(frozen=True)
class Found:
    """A decomposed LayerNorm."""

    x: ir.Value
    eps: float
    weight: ir.Value | None
    bias: ir.Value | None
    last: ir.Node


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module; a model that cannot reach opset 17 stays as it is."""
    if not takes_layer_norm(target):
        return []
    means = [node for node in graphs.every_node(model) if node.op_type == "ReduceMean" and _match(node)]
    if not means or raise_opset(model, OPSET):
        return []
    changes = []
    for node in means:
        # Found anew: the norm before may have been what this one reads.
        norm = _match(node)
        if norm is None:
            continue
        old, name = norm.last.outputs[0], norm.last.name or norm.last.op_type
        size = match.inner(norm.x)
        assert size is not None
        weight = norm.weight or graphs.constant(norm.last, f"{name}/ones", match.floats(norm.x, [1.0] * size))
        vectors = [v if match.rank(v) == 1 else match.emit(norm.last, "Reshape", v, match.ints(size))
                   for v in (weight, norm.bias) if v is not None]  # fmt: skip
        new = graphs.insert(
            norm.last, "LayerNormalization", [norm.x, *vectors], {"axis": -1, "epsilon": norm.eps},
            name=f"{name}/LayerNormalization", like=old, dtype=norm.x.dtype,
        )  # fmt: skip
        graphs.swap(norm.last, new)
        changes.append(Change(name, "decomposed LayerNorm fused into LayerNormalization"))
    return changes


def takes_layer_norm(target: Target) -> bool:
    """Whether LayerNormalization compiles: v68 lacks the one of 16 bit activations and weights."""
    return not (target.chip and target.precision == "a16" and not target.chip.layernorm_16x16)


def _match(mean: ir.Node) -> Found | None:
    norm = find_norm(mean)
    if norm is None:
        return None
    apart = graphs.made_by(norm.x, "Sub")
    average = graphs.made_by(apart.inputs[1], "ReduceMean") if apart is not None else None
    if apart is None or average is None or not match.last_axis(average, match.rank(norm.x)):
        return None
    x = apart.inputs[0]
    if x is None or not same(x, average.inputs[0]) or match.rank(x) != match.rank(norm.x):
        return None
    # The same difference may have been computed twice.
    twins = [d for step in norm.steps for v in step.inputs if (d := graphs.made_by(v, "Sub")) and same(v, norm.x)]
    casts = [
        c for step in norm.steps for v in step.inputs if (c := graphs.made_by(v, "Cast")) and c.inputs[0] is norm.x
    ]
    nodes = [*norm.steps, *twins, *casts, apart, average]
    last, weight = norm.last, norm.weight
    if weight is None:
        before, down = cast_back(x, last)
        if before is not None and down is not None:
            nodes.append(last)
            x, last = before, down
        inside, (last, weight) = last, times_weight(x, last)
        nodes.append(inside)
    plus = match.next_node(last.outputs[0], "Add")
    bias = match.other_input(plus, last.outputs[0]) if plus is not None else None
    nodes.append(last)
    if plus is not None and bias is not None and bias.dtype == x.dtype and is_vector(bias, x):
        last = plus
    else:
        bias = None
    nodes = [node for node in dict.fromkeys(nodes) if node is not last]
    if not match.closed(nodes, last):
        return None
    return Found(x, norm.eps, weight, bias, last)


PASS = Pass("fuse-layer-norm", "decomposed LayerNorm to LayerNormalization", run, min_db=90.0)
