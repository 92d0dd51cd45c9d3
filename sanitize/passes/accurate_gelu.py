"""GELU where HTP's fp16 kernel is wrong: its negative tail, down to flipped signs.

Gelu, FastGelu and BiasGelu nodes, and the erf and tanh expansions, which the compiler would fuse to the same kernel.
The exact form becomes relu(x) - a exp(fit(a)), a = min(|x|, 6), good to 94 dB on standard normal x; the tanh form
is an identity.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.passes import Change, Pass, forms
from sanitize.target import Target

Polynomial = dict[int, float]
GATES: dict[str, Polynomial] = {
    "Erf": {1: math.sqrt(0.5)},
    "Tanh": {1: math.sqrt(2.0 / math.pi), 3: math.sqrt(2.0 / math.pi) * 0.044715},
}
CLOSE = 2e-3  # constants written with three digits, or rounded to fp16
DEPTH = 8


def run(model: ir.Model, target: Target) -> list[Change]:
    """Rewrite every GELU, as one node or written out."""
    if not forms.concerned(model, target):
        return []
    changes = []
    for node in graphs.every_node(model):
        if node.graph is None:
            continue
        found = _one_node(node) or _expansion(node)
        if found is None or not forms.floating(found[1]):
            continue
        root, x, by_tanh = found
        native = ("GeluTanh/native" if root is node else "GeluTanh/tanh") if by_tanh else "Gelu/native"
        gain = forms.gain(target, native, "GeluTanh/abs" if by_tanh else "Gelu/relu5", forms.span(x, target))
        if not gain:
            continue
        write = forms.Writer(root, root.outputs[0])
        if root is node and len(node.inputs) > 1 and node.inputs[1] is not None:
            x = write("Add", x, node.inputs[1])
        forms.swap(root, (forms.gelu_tanh if by_tanh else forms.gelu)(write, x))
        changes.append(Change(root.name or root.op_type, gain))
    return changes


def _one_node(node: ir.Node) -> tuple[ir.Node, ir.Value, bool] | None:
    """(node, x, whether it is the tanh form) of a GELU operator; a bias is its second input."""
    x = node.inputs[0] if node.inputs else None
    if x is None:
        return None
    if node.op_type == "Gelu" and node.domain in ("", "ai.onnx", "com.microsoft"):
        return node, x, graphs.attribute(node, "approximate", "none") == "tanh"
    if node.op_type in ("FastGelu", "BiasGelu") and node.domain == "com.microsoft":
        return node, x, node.op_type == "FastGelu"
    return None


def _expansion(node: ir.Node) -> tuple[ir.Node, ir.Value, bool] | None:
    """(last node, x, whether it is the tanh form) of 0.5 x (1 + f(x)), from its Erf or Tanh, in any order."""
    if node.op_type not in GATES or node.domain not in ("", "ai.onnx"):
        return None
    value, factor, offset = node.outputs[0], 1.0, None
    x: ir.Value | None = None
    for _ in range(5):
        user = graphs.sole_user(value)
        if user is None or user.op_type not in ("Mul", "Add", "Div") or user.domain not in ("", "ai.onnx"):
            return None
        other = user.inputs[1] if user.inputs[0] is value else user.inputs[0]
        number = graphs.scalar(other)
        value = user.outputs[0]
        if user.op_type == "Div":
            if number is None or other is not user.inputs[1]:
                return None
            factor /= number
        elif user.op_type == "Add":
            # 1 + f, or 0.5 + 0.5 f.
            if offset is not None or x is not None or number is None or abs(number - factor) > CLOSE:
                return None
            offset = number
        elif number is not None:
            factor *= number
        elif x is None and offset is not None and other is not None:
            scaled = _argument(other, node)
            if scaled is None:
                return None
            x, factor = scaled[0], factor * scaled[1]
        else:
            return None
        if x is not None and abs(factor - 0.5) < CLOSE:
            return user, x, node.op_type == "Tanh"
    return None


def _argument(value: ir.Value, gate: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, c) if a value is c x and the gate's argument is GELU's of x."""
    node = graphs.made_by(value, "Mul", "Div")
    inner = [v for v in node.inputs if v is not None and graphs.scalar(v) is None] if node else []
    for x in (value, *inner):
        factor, have = _polynomial(value, x), _polynomial(gate.inputs[0], x)
        if factor is None or have is None or set(factor) != {1}:
            continue
        want = GATES[gate.op_type]
        if set(have) == set(want) and all(abs(have[k] / want[k] - 1.0) < CLOSE for k in want):
            return x, factor[1]
    return None


def _polynomial(value: ir.Value | None, x: ir.Value, depth: int = DEPTH) -> Polynomial | None:
    """Coefficients by power of a value that is a polynomial of x; None if it is not."""
    if value is x:
        return {1: 1.0}
    number = graphs.scalar(value)
    if number is not None:
        return {0: number}
    node = graphs.made_by(value, "Mul", "Add", "Div", "Pow")
    if node is None or not depth:
        return None
    a, b = (_polynomial(v, x, depth - 1) for v in node.inputs)
    if a is None or b is None:
        return None
    if node.op_type == "Add":
        return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {*a, *b}}
    if node.op_type == "Mul":
        return _product(a, b)
    if set(b) != {0} or not b[0]:
        return None
    if node.op_type == "Div":
        return {k: c / b[0] for k, c in a.items()}
    result: Polynomial = {0: 1.0}
    if b[0] not in (1.0, 2.0, 3.0):
        return None
    for _ in range(int(b[0])):
        result = _product(result, a)
    return result


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for i, c in a.items():
        for k, d in b.items():
            result[i + k] = result.get(i + k, 0.0) + c * d
    return result


PASS = Pass("accurate-gelu", "GELU in forms that HTP's fp16 gets right", run, min_db=80.0)
