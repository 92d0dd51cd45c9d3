"""Give every node, value and initializer a name of its own that any converter takes.

Letters, digits and _ . / : - stay, anything else becomes "_", as does what would climb a folder ("/.."). Inputs and
outputs of the model keep their names, whatever they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target

ODD = re.compile(r"[^A-Za-z0-9_./:\-]|\.(?=\.)|(?<=\.)\.")


def run(model: ir.Model, target: Target) -> list[Change]:
    """Rename what is nameless, odd or named twice; a second run finds nothing."""
    changes: list[Change] = []
    fixed = {*model.graph.inputs, *model.graph.outputs}
    taken = {value.name: 1 for value in fixed if value.name}
    # A good name is kept by the first that has it, even if an odd name before it would become the same.
    late: list[ir.Value] = []
    for value in _values(model):
        if value in fixed:
            continue
        if value.name in taken or _clean(value.name or "") != value.name:
            late.append(value)
        else:
            taken[value.name] = 1
    for value in late:
        old = value.name
        value.name = _unique(_clean(old or "value"), taken)
        changes.append(Change(str(old), f"value renamed {value.name}"))
    used: dict[str, int] = {}
    odd = []
    for node in graphs.every_node(model):
        if not node.name or node.name in used or _clean(node.name) != node.name:
            odd.append(node)
        else:
            used[node.name] = 1
    for node in odd:
        old = node.name
        first = node.outputs[0].name if node.outputs else ""
        node.name = _unique(_clean(old or f"{node.op_type}_{first}"), used)
        changes.append(Change(old or node.op_type, f"node named {node.name}"))
    if changes:
        model.graph.meta.pop(graphs.NAMES, None)
    return changes


def _values(model: ir.Model) -> Iterable[ir.Value]:
    for graph in graphs.every_graph(model):
        yield from graph.inputs
        yield from [value for value in graph.initializers.values() if not value.is_graph_input()]
    for node in graphs.every_node(model):
        # An output of no name is one left out.
        yield from (value for value in node.outputs if value.name != "")


def _clean(name: str) -> str:
    return ODD.sub("_", name)


def _unique(wanted: str, taken: dict[str, int]) -> str:
    name = wanted
    while name in taken:
        name = f"{wanted}_{taken[wanted]}"
        taken[wanted] += 1
    taken[name] = 1
    return name


PASS = Pass("names", "make names unique and plain; those of inputs and outputs stay", run)
