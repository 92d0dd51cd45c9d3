"""Compute once what is computed twice: nodes of the same operator, inputs and attributes become one.

outer   a = Exp(x)    b = Exp(x)    c = If(...)       b is a; the body's Exp(x) is a as well,
body    d = Exp(x)                                    but two bodies of one If share nothing
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Hashable

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass
from sanitize.target import Target
from sanitize.tensors import nbytes

DOMAINS = ("", "ai.onnx", "com.microsoft")
CHANCE = ("Random", "Multinomial", "Bernoulli", "Dropout", "Sampling", "Search")
COMMUTATIVE = ("Add", "Mul", "And", "Or", "Xor", "Equal", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
HASHED = 1 << 16  # bytes of an attribute that are compared; larger ones are told apart by where they lie
Seen = dict[Hashable, ir.Node]


def run(model: ir.Model, target: Target) -> list[Change]:
    """Merge equal nodes, in each graph and with those that come before it in the graphs around it."""
    changes: list[Change] = []
    _walk(model.graph, [], changes)
    return changes


def _walk(graph: ir.Graph, around: list[Seen], changes: list[Change]) -> None:
    scopes: list[Seen] = [*around, {}]
    gone = []
    for node in list(graph):
        for body in graphs.bodies(node):
            _walk(body, scopes, changes)
        key = _key(node)
        if key is None:
            continue
        first = next((seen[key] for seen in scopes if key in seen), None)
        if first is None:
            scopes[-1][key] = node
            continue
        for old, new in zip(node.outputs, first.outputs, strict=True):
            graphs.merge_shape(new, old)
            graphs.replace(old, new)
        gone.append(node)
        changes.append(Change(node.name or node.op_type, f"computes what {first.name or first.op_type} does: merged"))
    graphs.remove_all(gone)


def _key(node: ir.Node) -> Hashable | None:
    if node.domain not in DOMAINS or node.op_type in ("Identity", "Constant") or not node.inputs:
        return None
    if any(word in node.op_type for word in CHANCE):
        return None
    attributes = []
    for name in sorted(node.attributes):
        attribute = node.attributes[name]
        content = None if attribute.is_ref() else _content(attribute)
        if content is None:
            return None
        attributes.append((name, attribute.type, content))
    inputs = sorted(node.inputs, key=id) if node.op_type in COMMUTATIVE else node.inputs
    named = tuple(bool(value.name) for value in node.outputs)
    return node.domain, node.op_type, node.overload, tuple(inputs), tuple(attributes), named


def _content(attribute: ir.Attr) -> Hashable | None:
    value, kind = attribute.value, attribute.type
    if kind == ir.AttributeType.FLOAT:
        return struct.pack("<d", value)
    if kind == ir.AttributeType.FLOATS:
        return struct.pack(f"<{len(value)}d", *value)
    if kind in (ir.AttributeType.INT, ir.AttributeType.STRING):
        return value
    if kind in (ir.AttributeType.INTS, ir.AttributeType.STRINGS):
        return tuple(value)
    if kind == ir.AttributeType.TENSOR:
        return _tensor_content(attribute.as_tensor())
    return None


def _tensor_content(tensor: ir.TensorProtocol) -> Hashable | None:
    what = (tensor.dtype, tuple(tensor.shape.numpy()))
    if isinstance(tensor, ir.ExternalTensor):
        return *what, str(tensor.path), tensor.offset, tensor.length
    if tensor.dtype == ir.DataType.STRING or nbytes(tensor) > HASHED:
        return None
    return *what, hashlib.blake2b(tensor.tobytes()).digest()


PASS = Pass("common-subexpressions", "compute once what is computed twice", run)
