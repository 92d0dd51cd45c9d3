"""Take out what no output needs: nodes, initializers of every graph, optional outputs that nobody reads."""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target


def run(model: ir.Model, target: Target) -> list[Change]:
    """Remove dead nodes, unused initializers, unused optional outputs."""
    changes = _dead_nodes(model.graph)
    version = graphs.opset(model)
    for node in graphs.every_node(model):
        changes += _unused_outputs(node, version)
    for graph in graphs.every_graph(model):
        for value in list(graph.initializers.values()):
            if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
                assert value.name is not None
                del graph.initializers[value.name]
                changes.append(Change(value.name, "unused initializer removed"))
    return changes


def _dead_nodes(graph: ir.Graph) -> list[Change]:
    """From the last node to the first, so that what only dead nodes read is dead by then."""
    changes: list[Change] = []
    dead: list[ir.Node] = []
    for node in reversed(list(graph)):
        if node.outputs and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            dead.append(node)
            graphs.detach(node)
        else:
            for body in graphs.bodies(node):
                changes += _dead_nodes(body)
    graphs.remove_all(dead)
    return [Change(node.name or node.op_type, f"dead {node.op_type} removed") for node in dead] + changes


def _unused_outputs(node: ir.Node, version: int) -> list[Change]:
    optional = _optional_outputs(node.op_type, node.domain, version) if len(node.outputs) > 1 else ()
    changes = []
    for value, may_go in zip(node.outputs, optional, strict=False):
        if may_go and value.name and not value.uses() and not value.is_graph_output():
            changes.append(Change(node.name or node.op_type, f"unused output {value.name} removed"))
            value.name = ""
    if changes:
        named = [index for index, value in enumerate(node.outputs) if value.name]
        node.resize_outputs(named[-1] + 1)
    return changes


@functools.lru_cache(maxsize=1024)
def _optional_outputs(op: str, domain: str, version: int) -> tuple[bool, ...]:
    # The number of outputs says whether an old BatchNormalization is in training.
    if domain not in ("", "ai.onnx") or op == "BatchNormalization":
        return ()
    try:
        outputs = onnx.defs.get_schema(op, version, "").outputs
    except onnx.defs.SchemaError:
        return ()
    return tuple(output.option == onnx.defs.OpSchema.FormalParameterOption.Optional for output in outputs)


PASS = Pass("dead-nodes", "remove nodes, initializers and optional outputs that nothing needs", run)
