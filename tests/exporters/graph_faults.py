"""Faults planted in an exported artifact: its ONNX graphs and weight files are edited, product code is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

Plant = Callable[[ir.Model, int], str]
"""Edits a graph in one layer; returns the node at which it must be found."""


def find(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def named(node: ir.Node, start: str) -> bool:
    return str(node.name).startswith(start)


def read(node: ir.Node) -> list[ir.Value]:
    """What a node reads, nothing left out."""
    return [value for value in node.inputs if value is not None]


def constant(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT),
                     const_value=ir.tensor(array, name=name))  # fmt: skip
    model.graph.initializers[name] = value
    return value


def wrong_weights(model: ir.Model, layer: int) -> str:
    """Another layer's query projection."""
    node = find(model, f"/layers.{layer}/attn/q_proj/Gemm")
    other = find(model, f"/layers.{(layer + 1) % 8}/attn/q_proj/Gemm")
    node.replace_input_with(1, other.inputs[1])
    return str(node.name)


def one_bad_row(model: ir.Model, layer: int) -> str:
    """A single output channel of down_proj is zero."""
    node = find(model, f"/layers.{layer}/mlp/down_proj/Gemm")
    weight = node.inputs[1]
    assert weight is not None and weight.const_value is not None
    array = weight.const_value.numpy().copy()
    array[3] = 0
    node.replace_input_with(1, constant(model, f"planted.{layer}", array))
    return str(node.name)


def flipped_rotary(model: ir.Model, layer: int) -> str:
    """first * cos + second * sin instead of the difference."""
    node = find(model, f"/layers.{layer}/attn/Sub")
    node.op_type = "Add"
    return str(node.name)


def norm_eps(model: ir.Model, layer: int) -> str:
    """A thousand times the epsilon."""
    node = find(model, f"/layers.{layer}/input_norm/RMSNormalization")
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", node.attributes["epsilon"].as_float() * 1000)
    return str(node.name)


def gate_of(model: ir.Model, layer: int) -> ir.Node:
    """The product with the head-wise gate: the Mul that reads the values' sum, outside the MLP."""
    gate = next(n for n in model.graph if named(n, f"/layers.{layer}/attn/") and n.op_type == "Sigmoid")
    made = {gate.outputs[0]}
    for node in model.graph:
        if node.op_type == "Mul" and named(node, f"/layers.{layer}/attn/") and made & set(node.inputs):
            return node
        if node.op_type in ("Reshape", "Transpose") and made & set(node.inputs):
            made.add(node.outputs[0])
    raise AssertionError("no gate")


def bypass(model: ir.Model, node: ir.Node, value: ir.Value) -> str:
    """Take a node out: what reads its result reads `value`. Returns the first reader's name."""
    reader = next(iter(node.outputs[0].uses())).node
    for user, index in list(node.outputs[0].uses()):
        user.replace_input_with(index, value)
    model.graph.remove(node, safe=True)
    return str(reader.name)


def dropped_gate(model: ir.Model, layer: int) -> str:
    """What reads the gated values reads the ungated ones."""
    node = gate_of(model, layer)
    sums = ("Add", "MatMul")
    plain = next(v for v in read(node) if (maker := v.producer()) is not None and maker.op_type in sums)
    return bypass(model, node, plain)


def attention_scale(model: ir.Model, layer: int) -> str:
    """Queries scaled by 0.3."""
    node = next(n for n in model.graph if str(n.name).startswith(f"/layers.{layer}/attn/Mul")
                and any(v.const_value is not None for v in read(n)))  # fmt: skip
    index = next(i for i, v in enumerate(read(node)) if v.const_value is not None)
    node.replace_input_with(index, constant(model, f"planted.{layer}", np.array(0.3, np.float32)))
    return str(node.name)


def dropped_mask(model: ir.Model, layer: int) -> str:
    """Scores without their mask: empty slots and later tokens are seen."""
    node = next(n for n in model.graph if str(n.name).startswith(f"/layers.{layer}/attn/Add")
                and any(str(v.name).startswith("mask_") for v in read(n)))  # fmt: skip
    scores = next(v for v in read(node) if not str(v.name).startswith("mask_"))
    return bypass(model, node, scores)


def lost_residual(model: ir.Model, layer: int) -> str:
    """The MLP's output is subtracted."""
    node = next(n for n in model.graph if any(v.name == f"hidden_{layer}" for v in n.outputs))
    node.op_type = "Sub"
    return str(node.name)


def swapped_heads(model: ir.Model, layer: int) -> str:
    """Values' projection reads its rows in reverse: heads in the wrong order."""
    node = find(model, f"/layers.{layer}/attn/v_proj/Gemm")
    weight = node.inputs[1]
    assert weight is not None and weight.const_value is not None
    array = np.ascontiguousarray(weight.const_value.numpy()[::-1])
    node.replace_input_with(1, constant(model, f"planted.{layer}", array))
    return str(node.name)


FAULTS: tuple[Plant, ...] = (
    wrong_weights, one_bad_row, flipped_rotary, norm_eps, dropped_gate, attention_scale, dropped_mask, lost_residual,
    swapped_heads,
)  # fmt: skip


def plant(path: Path, fault: Plant, layer: int) -> str:
    """Put a fault into one layer of a graph file; returns the node to be found."""
    model = ir.load(path)
    name = fault(model, layer)
    ir.save(model, path)
    return name
