"""Take out a Reshape and the one that undoes it where only pointwise operators stand between them.

    [8, 32] ─ Reshape [1, 8, 32] ─┬─ Tanh ─ Mul ─ Reshape [8, 32]          ─┬─ Tanh ─ Mul ─
                                  └──────────┘                      →       └──────────┘

Only leading dims may differ between the two shapes: the last one is how the data lies, and what a bias is added along.
"""

from __future__ import annotations

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.evaluate import POINTWISE
from sanitize.passes import Change, Pass
from sanitize.target import Target

VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
THROUGH = (POINTWISE | {"Gelu", "HardSwish", "Swish", "Elu", "Selu", "Softsign"}) - {"CastLike"}
MOST = 32  # nodes between the two
Dims = tuple[int, ...]


def run(model: ir.Model, target: Target) -> list[Change]:
    """Let pointwise operators between two Reshapes work on the shape outside of them."""
    changes = []
    for node in graphs.every_node(model):
        output = node.outputs[0] if node.outputs else None
        if graphs.made_by(output, *VIEWS) is None or not node.inputs or node.inputs[0] is None or output is None:
            continue
        inside, outside = graphs.dims(node.inputs[0]), graphs.dims(output)
        if not inside or not outside or inside[-1] != outside[-1] or inside == outside:
            continue
        between = _between(node, inside, outside)
        if between is None:
            continue
        for member in between:
            for index, value in enumerate(member.inputs):
                view = graphs.made_by(value, *VIEWS)
                if view is not None and graphs.dims(value) == inside:
                    member.replace_input_with(index, view.inputs[0])
            member.outputs[0].shape = ir.Shape(outside)
        graphs.replace(output, node.inputs[0])
        graphs.remove(node)
        changes.append(Change(node.name or node.op_type, f"undoes an earlier one: {len(between)} nodes in between"))
    return changes


def _between(last: ir.Node, inside: Dims, outside: Dims) -> list[ir.Node] | None:
    """The pointwise nodes that end in `last` and begin at Reshapes from the shape it makes; None if others are in."""
    found: dict[ir.Node, None] = {}
    open_ = [last.inputs[0]]
    begun = False
    while open_:
        value = open_.pop()
        node = value.producer() if value is not None else None
        if value is None or node in found:
            continue
        if _scales_along(value, inside):
            continue
        if graphs.dims(value) != inside:
            return None
        if node is not None and (view := graphs.made_by(value, *VIEWS)) is not None:
            if node.graph is not last.graph or graphs.dims(view.inputs[0]) != outside:
                return None
            begun = True
            continue
        if node is None or node.op_type not in THROUGH or node.domain not in ("", "ai.onnx") or len(found) == MOST:
            return None
        if node.graph is not last.graph or len(node.outputs) != 1:
            return None
        found[node] = None
        open_ += node.inputs
    # Whoever else reads a value in between wants the shape inside.
    for node in found:
        value = node.outputs[0]
        if value.is_graph_output() or any(user is not last and user not in found for user in graphs.users(value)):
            return None
    return list(found) if begun and found else None


def _scales_along(value: ir.Value, inside: Dims) -> bool:
    """Whether it is a single number, or a vector along the last dim: the same for both shapes."""
    shape = graphs.dims(value)
    return shape is not None and (shape == () or shape == (1,) or (len(shape) == 1 and shape[0] == inside[-1] != 1))


PASS = Pass("reshape-pairs", "remove Reshapes that undo each other around pointwise operators", run)
