"""GELU as exporters spell it becomes Gelu.

    exact: 0.5 x (1 + Erf(x / sqrt 2))         tanh: 0.5 x (1 + Tanh(sqrt(2 / pi) (x + 0.044715 x^3)))

The three factors may be multiplied in any order, constants may divide or multiply, and the argument may be any chain
of Mul, Add, Pow and Div that comes to the same polynomial in x. A Gelu node is what later passes start from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize import match
from sanitize.opset import raise_opset
from sanitize.passes import Change, Pass
from sanitize.target import Target

OPSET = 20
SLOPE = math.sqrt(2 / math.pi)
ARGUMENTS = {"Erf": (0.0, math.sqrt(0.5), 0.0, 0.0), "Tanh": (0.0, SLOPE, 0.0, SLOPE * 0.044715)}
"""The argument as a polynomial in x: the coefficients of 1, x, x^2, x^3."""
FORMS = {"Erf": "none", "Tanh": "tanh"}
LONGEST = 12

Polynomial = tuple[float, float, float, float]


@dataclass(frozen=True)
class Found:
    """A decomposed GELU."""

    x: ir.Value
    form: str
    last: ir.Node


def run(model: ir.Model, target: Target) -> list[Change]:
    """See the module. Every target takes Gelu; a model that cannot reach opset 20 stays as it is."""
    curves = [node for node in graphs.every_node(model) if node.op_type in FORMS and find_gelu(node)]
    if not curves or raise_opset(model, OPSET):
        return []
    changes = []
    for node in curves:
        # Found anew: the one before may have been what this one reads.
        gelu = find_gelu(node)
        if gelu is None:
            continue
        old = gelu.last.outputs[0]
        name = gelu.last.name or gelu.last.op_type
        new = graphs.insert(gelu.last, "Gelu", [gelu.x], {"approximate": gelu.form}, name=f"{name}/Gelu", like=old)
        graphs.swap(gelu.last, new)
        changes.append(Change(name, f"decomposed GELU fused into Gelu (approximate={gelu.form})"))
    return changes


def find_gelu(curve: ir.Node) -> Found | None:
    """The GELU of an Erf or Tanh node: from it through + 1 to the product that has x and one half."""
    add = match.next_node(curve.outputs[0], "Add")
    one = match.with_constant(add)
    if add is None or one is None or not match.near(one[1], 1, curve.outputs[0].dtype):
        return None
    nodes, factor, value, x = [curve, add], 1.0, add.outputs[0], None
    arguments: list[ir.Node] = []
    while True:
        node = match.next_node(value, "Mul", "Div")
        if node is None:
            return None
        times = match.scaled(node)
        if times is not None:
            factor *= times[1]
        else:
            other = match.other_input(node, value) if node.op_type == "Mul" and x is None else None
            if other is None:
                return None
            for candidate, scale, inside in _factors(other):
                arguments = _argument(curve, candidate)
                if arguments:
                    x, factor = candidate, factor * scale
                    nodes += inside
                    break
            else:
                return None
        if x is not None and match.near(factor, 0.5, x.dtype):
            nodes += arguments
            return Found(x, FORMS[curve.op_type], node) if match.closed(nodes, node) else None
        nodes.append(node)
        value = node.outputs[0]


def _factors(value: ir.Value) -> list[tuple[ir.Value, float, list[ir.Node]]]:
    """What x may be where this is a factor of the product: the value, or what it is a multiple of."""
    found: list[tuple[ir.Value, float, list[ir.Node]]] = [(value, 1.0, [])]
    maker = value.producer()
    times = match.scaled(maker)
    if maker is not None and times is not None:
        found.append((times[0], times[1], [maker]))
    return found


def _argument(curve: ir.Node, x: ir.Value) -> list[ir.Node]:
    """The nodes between x and the curve if they compute the curve's argument from it, else none."""
    nodes: dict[ir.Node, None] = {}
    have = _polynomial(curve.inputs[0], x, nodes, LONGEST)
    want = ARGUMENTS[curve.op_type]
    if have is None or not all(match.near(a, b, x.dtype) for a, b in zip(have, want, strict=True)):
        return []
    return list(nodes)


def _polynomial(value: ir.Value | None, x: ir.Value, nodes: dict[ir.Node, None], left: int) -> Polynomial | None:
    """The coefficients of a value as a polynomial in x up to the cube; None if it is none."""
    if value is x:
        return 0.0, 1.0, 0.0, 0.0
    number = graphs.scalar(value)
    if number is not None:
        return number, 0.0, 0.0, 0.0
    node = graphs.made_by(value, "Add", "Mul", "Div", "Pow")
    if node is None or left == 0 or len(nodes) > LONGEST:
        return None
    a = _polynomial(node.inputs[0], x, nodes, left - 1)
    b = _polynomial(node.inputs[1], x, nodes, left - 1) if a is not None else None
    if a is None or b is None:
        return None
    nodes[node] = None
    if node.op_type == "Add":
        return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
    if node.op_type == "Mul":
        return _times(a, b)
    if any(b[1:]):
        return None
    if node.op_type == "Div":
        return _times(a, (1 / b[0], 0.0, 0.0, 0.0)) if b[0] else None
    if b[0] not in (2.0, 3.0):
        return None
    square = _times(a, a)
    return _times(square, a) if square is not None and b[0] == 3 else square


def _times(a: Polynomial, b: Polynomial) -> Polynomial | None:
    product = [0.0] * 7
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            product[i + j] += left * right
    return None if any(product[4:]) else (product[0], product[1], product[2], product[3])


PASS = Pass("fuse-gelu", "decomposed GELU (erf and tanh forms) to Gelu", run, min_db=90.0)
