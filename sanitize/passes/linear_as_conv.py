"""Linear layers as 1x1 convolutions, which is how some NPU compilers like them.

    x [.., k] ─ Reshape [1, 1, r, k] ─ Transpose [1, k, 1, r] ─ Conv, weight [n, k, 1, 1] ─┐
                └─────────────── enter ─────────────────────┘                              │
            y [.., n] ─ Reshape [.., n] ─ Transpose [1, 1, r, n] ──────────────────────────┘
                        └─────────────── leave ────────────────┘

The transposes are those between NHWC, which HTP computes in, and ONNX's NCHW: the compiler's own ones cancel them.
Siblings share one `enter`; elementwise operators between two linears work on the convolution's layout, so that
`leave` and `enter` between them disappear. A bias is the convolution's own.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from sanitize import graph as graphs
from sanitize.linear import Linear, linear, reshaped, turned
from sanitize.passes import Change, Pass
from sanitize.target import Target

ELEMENTWISE = frozenset(
    ("Abs", "Add", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Max",
     "Min", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh")
)  # fmt: skip
Key = tuple[int, ir.Value]
"""A graph, by id, and a value that its nodes read: bodies do not share what they make."""


def run(model: ir.Model, target: Target) -> list[Change]:
    """Turn every linear layer of static shape into a convolution."""
    changes: list[Change] = []
    entered: dict[Key, ir.Value] = {}
    left: dict[Key, ir.Value] = {}
    weights: dict[ir.Value, ir.Value] = {}
    for node in graphs.every_node(model):
        if node.graph is None:  # an Add that became a bias
            continue
        found = linear(node)
        if found is not None and graphs.dims(found.x) is not None:
            changes.append(Change(node.name or node.op_type, "linear layer as 1x1 Conv"))
            _convolve(found, entered, left, weights)
        elif node.op_type in ELEMENTWISE and node.domain == "" and left:
            _stay(node, left)
    return changes


def _convolve(
    found: Linear,
    entered: dict[Key, ir.Value],
    left: dict[Key, ir.Value],
    weights: dict[ir.Value, ir.Value],
) -> None:
    node, name = found.node, found.node.name or found.node.op_type
    shape = graphs.dims(found.x)
    assert shape is not None
    at = (id(node.graph), found.x)
    x = left.get(at) or entered.get(at)
    if x is None:
        x = entered[at] = _enter(node, found.x, shape, name)
    if found.weight not in weights:
        data = graphs.tensor(found.weight)
        assert data is not None
        conv_shape = (found.n, found.k, 1, 1)
        data = reshaped(data, conv_shape) if found.rows else turned(data, conv_shape)
        weights[found.weight] = graphs.initializer(found.weight, f"{found.weight.name}_conv", data)
    last, bias = node, found.bias
    if bias is None and (add := _bias_add(found)) is not None:
        last, bias = add
    if bias is not None and graphs.dims(bias) != (found.n,):
        data = graphs.tensor(bias)
        assert data is not None
        bias = graphs.initializer(bias, f"{bias.name}_conv", reshaped(data, (found.n,)))
    rows = math.prod(shape[:-1])
    y = graphs.insert(
        last, "Conv", [x, weights[found.weight], *([bias] if bias is not None else [])], {"kernel_shape": [1, 1]},
        name=f"{name}/Conv", like=found.x, shape=(1, found.n, 1, rows),
    )  # fmt: skip
    _leave(last, y, (*shape[:-1], found.n), left)


def _bias_add(found: Linear) -> tuple[ir.Node, ir.Value] | None:
    """The Add of a constant [n] behind a MatMul, and the constant."""
    add = graphs.sole_user(found.y)
    if add is None or add.op_type != "Add" or add.domain != "" or add.graph is not found.node.graph:
        return None
    other = next((v for v in add.inputs if v is not found.y), None)
    shape, data = graphs.dims(other), graphs.tensor(other)
    if other is None or data is None or not shape or shape[-1] != found.n or math.prod(shape) != found.n:
        return None
    dims = graphs.dims(found.x)
    return (add, other) if dims is not None and len(shape) <= len(dims) else None


def _enter(before: ir.Node, x: ir.Value, shape: tuple[int, ...], name: str) -> ir.Value:
    wide = (1, 1, math.prod(shape[:-1]), shape[-1])
    x = graphs.reshape(before, x, wide, name=f"{name}/enter")
    return graphs.insert(
        before, "Transpose", [x], {"perm": [0, 3, 1, 2]}, name=f"{name}/nchw", like=x, shape=(1, wide[3], 1, wide[2])
    )


def _leave(node: ir.Node, y: ir.Value, shape: tuple[int, ...], left: dict[Key, ir.Value]) -> None:
    """Put y [1, n, 1, r] in place of the node's output, which is `shape`."""
    name = node.name or node.op_type
    assert y.shape is not None
    nhwc = graphs.insert(
        node, "Transpose", [y], {"perm": [0, 2, 3, 1]}, name=f"{name}/nhwc", like=y,
        shape=(1, 1, y.shape[3], y.shape[1]),
    )  # fmt: skip
    plain = graphs.reshape(node, nhwc, shape, name=f"{name}/leave")
    left[id(node.graph), plain] = y
    graphs.swap(node, plain)


def _stay(node: ir.Node, left: dict[Key, ir.Value]) -> None:
    """Let an elementwise operator work on the convolution's layout if all it reads comes from there."""
    read = [v for v in node.inputs if v is not None and not (graphs.dims(v) is not None and _single(v))]
    inside = {v: left.get((id(node.graph), v)) for v in read}
    shapes = {graphs.dims(v) for v in read}
    if not read or len(shapes) != 1 or None in shapes or None in inside.values() or len(node.outputs) != 1:
        return
    (shape,) = shapes
    wide = next(iter(inside.values()))
    assert shape is not None and wide is not None
    if any(len(graphs.dims(v) or ()) > len(shape) for v in node.inputs if v is not None):
        return  # a constant [1, 1, 1] adds a dimension
    name = node.name or node.op_type
    inputs = [inside.get(v, v) if v is not None else None for v in node.inputs]
    attributes = {a.name: a.value for a in node.attributes.values()}
    y = graphs.insert(
        node, node.op_type, inputs, attributes, name=f"{name}/wide", like=wide, dtype=node.outputs[0].dtype
    )
    _leave(node, y, shape, left)


def _single(value: ir.Value) -> bool:
    return graphs.array(value, 1) is not None


PASS = Pass("linear-as-conv", "linear layers as 1x1 convolutions", run, min_db=100.0)
