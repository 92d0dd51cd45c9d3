"""The torch form of each operator against ONNX Runtime, and blocks: what they hold, hooks, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from float_models import open_session
from onnx import TensorProto, helper, numpy_helper

from quantize.torch_graph import OPERATORS, Block, block_of, run
from ringstep.errors import RingstepError

KINDS = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}


def graph_of(nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, ...]], outputs: list[str],
             constants: dict[str, np.ndarray]) -> onnx.ModelProto:  # fmt: skip
    """A model of float inputs."""
    value = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        nodes, "g", [value(n, s) for n, s in inputs.items()], [value(n, None) for n in outputs],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def by_onnx_runtime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = open_session(model.SerializeToString())
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, (np.asarray(v) for v in session.run(names, feeds)), strict=True))


def block(model: onnx.ModelProto, prefix: str = "/", weights: tuple[str, ...] = ()) -> Block:
    outputs = tuple(o.name for o in model.graph.output)
    return block_of(ir.from_proto(model).graph, prefix, outputs, weights.__contains__)


X, ROW, CUBE = (2, 3, 4), (4,), (2, 6, 4)
ints = lambda *values: np.array(values, np.int64)
scalar = lambda value: np.array(value, np.float32)
# Operator, shapes of its float inputs, integer or scalar inputs that are constants, attributes.
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Gemm", [(3, 4), (4, 5)], {}),
    ("Gemm", [(3, 4), (5, 4)], {"transB": 1}),
    ("Gemm", [(3, 4), (5, 4), (5,)], {"transB": 1}),
    ("Gemm", [(3, 4), (5, 4), (3, 1)], {"transB": 1}),
    ("Gemm", [(4, 3), (5, 4), (5,)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("MatMul", [(2, 3, 4), (2, 4, 5)], {}),
    ("MatMul", [(3, 4), (4,)], {}),
    ("Add", [X, X], {}), ("Add", [X, ROW], {}), ("Sub", [ROW, X], {}), ("Mul", [X, (3, 1)], {}),
    ("Div", [X, "positive"], {}), ("Pow", ["positive", scalar(-0.5)], {}), ("Pow", [X, scalar(3.0)], {}),
    ("Max", [X, ROW], {}), ("Min", [X, ROW], {}), ("Max", [X, ROW, (3, 1)], {}), ("Min", [X], {}),
    ("Abs", [X], {}), ("Neg", [X], {}), ("Exp", [X], {}), ("Sqrt", ["positive"], {}), ("Reciprocal", ["positive"], {}),
    ("Relu", [X], {}), ("Tanh", [X], {}), ("Sigmoid", [X], {}), ("Erf", [X], {}), ("Identity", [X], {}),
    ("Gelu", [X], {}), ("Gelu", [X], {"approximate": "tanh"}),
    ("Softmax", [X], {}), ("Softmax", [X], {"axis": 1}), ("Softmax", [X], {"axis": -3}),
    ("RMSNormalization", [X, ROW], {}), ("RMSNormalization", [X, ROW], {"epsilon": 0.3, "axis": -1}),
    ("RMSNormalization", [X, (3, 4)], {"axis": 1}),
    ("ReduceMax", [X, ints(-1)], {}), ("ReduceMax", [X, ints(0, 2)], {"keepdims": 0}), ("ReduceMax", [X], {}),
    ("ReduceSum", [X, ints(1)], {}), ("ReduceSum", [X], {"keepdims": 0}), ("ReduceMean", [X, ints(-1, 0)], {}),
    ("Reshape", [X, ints(6, 4)], {}), ("Reshape", [X, ints(0, -1)], {}), ("Reshape", [X, ints(4, 0, 2)], {}),
    ("Transpose", [X], {"perm": [2, 0, 1]}), ("Transpose", [X], {}),
    ("Concat", [X, CUBE, X], {"axis": 1}), ("Concat", [X, X], {"axis": -1}),
    ("Split", [CUBE, ints(1, 3, 2)], {"axis": 1}), ("Split", [CUBE, ints(3, 1)], {"axis": -1}),
    ("Split", [CUBE], {"axis": 1, "num_outputs": 3}), ("Split", [CUBE], {"axis": 1, "num_outputs": 4}),
    ("Slice", [CUBE, ints(1), ints(4), ints(1)], {}), ("Slice", [CUBE, ints(1, 0), ints(2, 5)], {}),
    ("Slice", [CUBE, ints(-3), ints(-1), ints(-2)], {}), ("Slice", [CUBE, ints(0), ints(1 << 62), ints(1)], {}),
    ("Slice", [CUBE, ints(-99, 1), ints(99, 4), ints(1, 2), ints(2, 2)], {}),
    ("Squeeze", [(1, 3, 1, 2), ints(0)], {}), ("Squeeze", [(1, 3, 1, 2), ints(-2, 0)], {}),
    ("Squeeze", [(1, 3, 1)], {}),
    ("Unsqueeze", [X, ints(0)], {}), ("Unsqueeze", [ROW, ints(-2, -1)], {}), ("Unsqueeze", [ROW, ints(2, 0)], {}),
    ("Unsqueeze", [X, ints(-1, 0, 2)], {}),
    ("Clip", [X, scalar(-0.5), scalar(0.5)], {}), ("Clip", [X, scalar(-0.5)], {}), ("Clip", [X, None, scalar(0.5)], {}),
    ("Clip", [X], {}),
    ("Gather", [(5, 4), ints(3, 0, 3)], {}), ("Gather", [(5, 4), ints(3, -1)], {"axis": 1}),
    ("Gather", [X, np.array(1)], {"axis": 1}),
]  # fmt: skip


def test_every_operator_has_a_case() -> None:
    assert {case[0] for case in CASES} | {"Swish"} == set(OPERATORS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[2].items()))}")
def test_as_onnx_runtime_computes_it(case: tuple[str, list[Any], dict[str, Any]]) -> None:
    op, operands, attributes = case
    random = np.random.default_rng(len(operands))
    feeds, constants, names = {}, {}, []
    for i, own in enumerate(operands):
        name = f"i{i}"
        if own is None:
            name = ""
        elif isinstance(own, np.ndarray):
            constants[name] = own
        elif own == "positive":
            feeds[name] = random.uniform(0.2, 3, X).astype(np.float32)
        else:
            feeds[name] = random.normal(size=own).astype(np.float32)
        names.append(name)
    count = 1
    if op == "Split":
        count = attributes.get("num_outputs") or len(operands[1])
    outputs = [f"y{i}" for i in range(count)]
    node = helper.make_node(op, names, outputs, name="/node", **attributes)
    model = graph_of([node], {n: a.shape for n, a in feeds.items()}, outputs, constants)
    want = by_onnx_runtime(model, feeds)
    have = run(block(model), {n: torch.from_numpy(a) for n, a in feeds.items()}, {})
    assert list(have) == outputs
    for name in outputs:
        assert tuple(have[name].shape) == want[name].shape
        np.testing.assert_allclose(have[name].numpy(), want[name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("attributes", [{}, {"alpha": 1.702}])
def test_swish(attributes: dict[str, float]) -> None:
    """ONNX Runtime has none: x * sigmoid(alpha * x) by the specification."""
    x = np.linspace(-9, 9, 50)
    made = OPERATORS["Swish"](attributes, torch.from_numpy(x))
    np.testing.assert_allclose(made.numpy(), x / (1 + np.exp(-attributes.get("alpha", 1.0) * x)), rtol=1e-12)


UNARY = ("Abs", "Tanh", "Sigmoid", "Relu", "Neg", "Erf", "Gelu", "Softmax", "Identity")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")


def random_model(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Nodes that read any earlier values of their shape, some twice, some never again; two outputs."""
    random = np.random.default_rng(seed)
    inputs = {"a": random.normal(size=(3, 4)).astype(np.float32), "b": random.normal(size=(3, 4)).astype(np.float32)}
    weights = {"w": random.normal(size=(4, 4)).astype(np.float32), "g": random.normal(size=4).astype(np.float32)}
    nodes, known = [], ["a", "b"]
    pick = lambda: str(random.choice(known))
    for i in range(int(random.integers(2, 14))):
        kind, made = int(random.integers(0, 5)), [f"v{i}"]
        if kind == 0:
            own = ("Gemm", [pick(), "w"], {"transB": int(random.integers(0, 2))})
        elif kind == 1:
            own = ("RMSNormalization", [pick(), "g"], {})
        elif kind == 2:
            own = (str(random.choice(UNARY)), [pick()], {})
        elif kind == 3:
            own = ("Split", [pick()], {"axis": 1, "num_outputs": 2})
            made = [f"v{i}.0", f"v{i}.1"]
        else:
            own = (str(random.choice(BINARY)), [pick(), pick()], {})
        nodes.append(helper.make_node(own[0], own[1], made, name=f"/{i}", **own[2]))
        if kind == 3:
            nodes.append(helper.make_node("Concat", made[::-1], [f"v{i}"], name=f"/{i}/back", axis=1))
        known.append(f"v{i}")
    outputs = sorted({pick() for _ in range(2)} - {"a", "b"} | {known[-1]})
    return graph_of(nodes, {n: a.shape for n, a in inputs.items()}, outputs, weights), inputs, weights


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    model, feeds, weights = random_model(seed)
    want = by_onnx_runtime(model, feeds)
    own = block(model, weights=("w", "g"))
    assert set(own.weights) <= {"w", "g"} and not own.constants and set(own.inputs) <= {"a", "b"}
    seen: list[str] = []

    def hook(name: str, x: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return x

    given = {n: torch.from_numpy(a) for n, a in feeds.items()}
    have = run(own, given, {n: torch.from_numpy(a) for n, a in weights.items()}, hook)
    for name, array in want.items():
        np.testing.assert_allclose(have[name].numpy(), array, rtol=1e-4, atol=1e-4)
    assert seen == [*own.inputs, *(name for step in own.steps for name in step.outputs)]
    np.testing.assert_array_equal(given["a"].numpy(), feeds["a"])  # nothing is written in place


def test_what_a_hook_returns_is_used() -> None:
    """Everything downstream computes with it: an input, an inner tensor, a part of a Split, an output."""
    nodes = [
        helper.make_node("Add", ["x", "c"], ["y"], name="/0"),
        helper.make_node("Split", ["y"], ["l", "r"], name="/1", axis=0, num_outputs=2),
        helper.make_node("Mul", ["l", "r"], ["z"], name="/2"),
    ]
    model = graph_of(nodes, {"x": (2,)}, ["z", "y"], {"c": np.ones(1, np.float32)})
    change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "x": lambda t: t * 10, "y": lambda t: t + 1, "r": lambda t: -t, "z": lambda t: t + 0.5,
    }  # fmt: skip
    made = run(block(model), {"x": torch.tensor([1.0, 2.0])}, {}, lambda n, t: change[n](t) if n in change else t)
    assert made["y"].tolist() == [12, 22] and made["z"].tolist() == [12 * -22 + 0.5]


def two_layers() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gemm", ["x", "w1"], ["h1"], name="/layers.1/Gemm", transB=1),
        helper.make_node("Mul", ["h1", "half"], ["h2"], name="/layers.1/Mul"),
        helper.make_node("Gemm", ["h2", "w10"], ["h10"], name="/layers.10/Gemm", transB=1),
        helper.make_node("Mul", ["h10", "half"], ["y"], name="/layers.10/Mul"),
        helper.make_node("Add", ["y", "h1"], ["z"], name="/head/Add"),
    ]
    w = np.eye(4, dtype=np.float32)
    return graph_of(nodes, {"x": (2, 4)}, ["z"], {"w1": 2 * w, "w10": 3 * w, "half": scalar(0.5)})


def test_a_block_is_what_its_prefix_names() -> None:
    graph = ir.from_proto(two_layers()).graph
    one = block_of(graph, "/layers.1/", ("h2", "h1"), lambda name: name.startswith("w"))
    assert [s.name for s in one.steps] == ["/layers.1/Gemm", "/layers.1/Mul"]  # not layers.10
    assert one.inputs == ("x",) and one.weights == ("w1",) and list(one.constants) == ["half"]
    ten = block_of(graph, "/layers.10/", ("y",), lambda name: name.startswith("w"))
    head = block_of(graph, "/head/", ("z",), lambda name: False)
    assert ten.inputs == ("h2",) and head.inputs == ("y", "h1")
    x = torch.arange(8.0).reshape(2, 4)
    first = run(one, {"x": x}, {"w1": torch.eye(4) * 2})
    second = run(ten, {"h2": first["h2"]}, {"w10": torch.eye(4) * 3})
    last = run(head, {"y": second["y"], "h1": first["h1"]}, {})
    assert torch.equal(last["z"], 1.5 * x + 2 * x)


def test_weights_are_never_read_from_the_graph() -> None:
    """Their places are holes in a file that may be gone: only handed-in values count."""
    model = two_layers()
    own = block(model, "/layers.1/", ("w1", "w10"))
    with pytest.raises(KeyError):
        run(own, {"x": torch.zeros(2, 4)}, {})


@pytest.mark.parametrize(("op", "domain"), [("Conv", ""), ("Where", ""), ("MatMulNBits", "com.microsoft"),
                                            ("Gelu", "com.microsoft")])  # fmt: skip
def test_an_operator_without_a_torch_form_names_the_node(op: str, domain: str) -> None:
    nodes = [
        helper.make_node("Abs", ["x"], ["y"], name="/layers.3/attn/Abs"),
        helper.make_node(op, ["y", "y", "y"], ["z"], name=f"/layers.3/mlp/{op}", domain=domain),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1,))], [])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    found = ir.from_proto(helper.make_model(graph, opset_imports=opsets)).graph
    with pytest.raises(RingstepError, match=rf"node /layers\.3/mlp/{op}: no torch form of {op}") as caught:
        block_of(found, "/layers.3/", ("z",), lambda name: False)
    assert "\n" not in str(caught.value)
    assert len(block_of(found, "/layers.3/attn/", ("y",), lambda name: False).steps) == 1


def test_memory_is_let_go() -> None:
    """A tensor is dropped behind its last reader, so that a block's peak is not the sum of its parts."""
    alive: list[int] = []
    count = 30
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], name=f"/{i}") for i in range(count)]
    model = graph_of(nodes, {"v0": (1,)}, [f"v{count}"], {})
    finalised: set[str] = set()

    import weakref

    def hook(name: str, x: torch.Tensor) -> torch.Tensor:
        weakref.finalize(x, functools.partial(finalised.add, name))
        alive.append(int(name[1:]) - len(finalised))
        return x

    run(block(model), {"v0": torch.zeros(1)}, {}, hook)
    assert max(alive) <= 3
