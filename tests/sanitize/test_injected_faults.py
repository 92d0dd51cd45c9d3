"""Generated graphs with the faults of exporters injected: clean by lint, equal by ONNX Runtime, in an If body too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from graphs import in_if
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from exporters.qnn import compile_context
from ringstep.devices import find_device
from sanitize.command import sanitize_file
from sanitize.target import find_target

ROWS, WIDTH = 3, 8


class Builder:
    """A graph of one [3, 8] stream and the faults on its way."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.last = "x"

    def const(self, array: np.ndarray) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], f"n{len(self.nodes)}", **attributes))
        return name


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def f32(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def matmul(b: Builder, x: str) -> str:
    weight = np.random.default_rng(len(b.nodes)).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3
    return b.node("Add", b.node("MatMul", x, b.const(weight)), b.const(np.full(WIDTH, 0.25, np.float32)))


def guard(b: Builder, x: str) -> str:
    soft = b.node("Softmax", x, axis=-1)
    return b.node("Where", b.node("IsNaN", soft), b.const(f32(0)), soft)


def masked_guard(b: Builder, x: str) -> str:
    hidden = np.triu(np.full((ROWS, WIDTH), -np.inf, np.float32), 2)
    soft = b.node("Softmax", b.node("Add", x, b.const(hidden)), axis=-1)
    return b.node("Where", b.node("Not", b.node("IsNaN", soft)), soft, b.const(f32(0)))


def where_mask(b: Builder, x: str) -> str:
    keep = np.tril(np.ones((ROWS, WIDTH), bool))
    mask = b.node("Where", b.const(keep), b.const(f32(0)), b.const(f32(-np.inf)))
    return b.node("Softmax", b.node("Add", x, mask), axis=-1)


def allowzero(b: Builder, x: str) -> str:
    flat = b.node("Reshape", x, b.const(i64(-1)), allowzero=1)
    return b.node("Reshape", flat, b.const(i64(ROWS, WIDTH)), allowzero=1)


def shape_arithmetic(b: Builder, x: str) -> str:
    shape = b.node("Shape", x)
    rows = b.node("Unsqueeze", b.node("Gather", shape, b.const(np.array(0, np.int64))), b.const(i64(0)))
    wide = b.node("Reshape", x, b.node("Concat", rows, b.const(i64(2, -1)), axis=0))
    return b.node("Reshape", wide, shape)


def scalar_axes(b: Builder, x: str) -> str:
    mean = b.node("ReduceMean", x, b.const(i64(1)), keepdims=0)
    return b.node("Sub", x, b.node("Unsqueeze", mean, b.const(i64(-1))))


def double(b: Builder, x: str) -> str:
    wide = b.node("Cast", x, to=TensorProto.DOUBLE)
    return b.node("Cast", wide, to=TensorProto.FLOAT)


def gather(b: Builder, x: str) -> str:
    return b.node("Gather", x, b.const(i64(2, 0, 1)), axis=0)


def noise(b: Builder, x: str) -> str:
    same = b.node("Transpose", b.node("Transpose", b.node("Identity", x), perm=[1, 0]), perm=[1, 0])
    b.node("Neg", same)  # dead
    return b.node("Add", b.node("Tanh", same), b.node("Tanh", same))


def silu(b: Builder, x: str) -> str:
    return b.node("Mul", x, b.node("Sigmoid", x))


def gelu(b: Builder, x: str) -> str:
    erf = b.node("Erf", b.node("Div", x, b.const(f32(2**0.5))))
    return b.node("Mul", b.node("Mul", x, b.node("Add", erf, b.const(f32(1)))), b.const(f32(0.5)))


def rms_norm(b: Builder, x: str) -> str:
    mean = b.node("ReduceMean", b.node("Pow", x, b.const(f32(2))), b.const(i64(-1)), keepdims=1)
    root = b.node("Sqrt", b.node("Add", mean, b.const(f32(1e-6))))
    scaled = b.node("Mul", x, b.node("Div", b.const(f32(1)), root))
    return b.node("Mul", scaled, b.const(np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)))


FAULTS: list[Callable[[Builder, str], str]] = [
    matmul, guard, masked_guard, where_mask, allowzero, shape_arithmetic, scalar_axes, double, gather, noise, silu,
    gelu, rms_norm,
]  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    builder = Builder()
    outputs = []
    for fault in draw(st.lists(st.sampled_from(FAULTS), min_size=1, max_size=7)):
        builder.last = fault(builder, builder.last)
        # A tensor may be read by all that follows and be an output at once.
        if draw(st.booleans()):
            outputs.append(builder.last)
    outputs = list(dict.fromkeys([*outputs, builder.last]))
    info = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, WIDTH])
    graph = helper.make_graph(builder.nodes, "g", [info("x")], [info(o) for o in outputs], builder.tensors)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    return in_if(model) if draw(st.booleans()) else model


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(model=models())
def test_injected_faults_are_mended(model: onnx.ModelProto) -> None:
    from sanitize.lint import lint_file

    with TemporaryDirectory() as name:
        source, out = Path(name) / "a.onnx", Path(name) / "b.onnx"
        onnx.save(model, source)
        # --verify compares both in ONNX Runtime and raises where they differ.
        sanitize_file(source, out, target="qnn-htp", chip="sm8750", precision="fp16", verify=True)
        has_if = any(node.op_type == "If" for node in model.graph.node)
        findings = lint_file(out, find_target("qnn-htp", "sm8750", "fp16"))
        # An If that reads weights from outside of it is what no pass mends.
        assert {f.rule for f in findings if f.severity == "error"} <= ({"if-branches"} if has_if else set())
        assert [f for f in findings if f.fixed_by] == []
        again = sanitize_file(out, None, target="qnn-htp", chip="sm8750", precision="fp16")
        assert not any(p["changes"] for p in again["passes"])


def test_all_faults_in_a_row_compile(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    builder = Builder()
    for fault in FAULTS:
        builder.last = fault(builder, builder.last)
    info = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, WIDTH])
    graph = helper.make_graph(builder.nodes, "g", [info("x")], [info(builder.last)], builder.tensors)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "a.onnx")
    chip = find_device("sm8750").chip
    sanitize_file(tmp_path / "a.onnx", tmp_path / "b.onnx", target="qnn-htp", chip="sm8750", verify=True, refuse=True)
    report = compile_context(tmp_path / "b.onnx", tmp_path / "qnn", chip=chip, fp16=True, name="b")
    assert sum(report.npu_ops.values()) > len(FAULTS)
