"""Softmax, LogSoftmax and Exp as HTP's fp16 gets them right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graphs import check, ops, parse, run

from sanitize.model_file import read_model, write_model
from sanitize.passes.accurate_exp import PASS as EXP
from sanitize.passes.accurate_gelu import PASS as GELU
from sanitize.passes.accurate_softmax import PASS
from sanitize.target import find_target

HTP = find_target("qnn-htp")
SOFTMAX = ["ReduceMax", "Sub", "Max", "Exp", "ReduceSum", "Pow", "Mul"]


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_any_axis(opset: int, axis: int, tmp_path: Path) -> None:
    model = parse(
        f'<ir_version: 8, opset_import: ["" : {opset}]>\n'
        f"g (float[2,7,5] x) => (float[2,7,5] y) {{ y = Softmax<axis = {axis}>(x) }}"
    )
    after = check(model, PASS, tmp_path, changes=1)
    assert ops(after) == SOFTMAX
    total = next(node for node in after.graph if node.op_type == "ReduceSum").outputs[0]
    assert total.shape is not None and total.shape[axis] == 1


@pytest.mark.parametrize("body", ["y = LogSoftmax(x)", "s = Softmax(x) y = Log(s)"])
def test_log_softmax(body: str, tmp_path: Path) -> None:
    after = check(parse(f"g (float[3,50] x) => (float[3,50] y) {{ {body} }}"), PASS, tmp_path, changes=1)
    assert ops(after) == ["ReduceMax", "Sub", "Max", "Exp", "ReduceSum", "Log", "Sub"]


def test_softmax_read_by_log_and_returned(tmp_path: Path) -> None:
    model = parse("g (float[3,50] x) => (float[3,50] y, float[3,50] s) { s = Softmax(x) y = Log(s) }")
    after = check(model, PASS, tmp_path, changes=2)
    assert "Softmax" not in ops(after)


def test_masks_in_half_precision(tmp_path: Path) -> None:
    """Masked keys get exactly 0; a row that is masked whole stays finite, as with the operator."""
    path = tmp_path / "m.onnx"
    path.write_bytes(parse("g (float16[3,64] x) => (float16[3,64] y) { y = Softmax(x) }").SerializeToString())
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float16)
    x[0, 40:] -= np.float16(10000.0)
    x[1] = np.float16(-60000.0)
    model = read_model(path)
    assert len(PASS.run(model, HTP)) == 1
    write_model(model, tmp_path / "after.onnx")
    y = run(tmp_path / "after.onnx", {"x": x})["y"]
    assert (y[0, 40:] == 0).all() and np.isfinite(y).all()
    np.testing.assert_allclose(y[1].astype(float), 1 / 64, rtol=1e-3)
    np.testing.assert_allclose(y.sum(-1, dtype=np.float32), 1.0, rtol=2e-3)


def test_scores_with_an_added_mask(tmp_path: Path) -> None:
    model = parse(
        "g (float[2,3,4,16] s, float[1,1,4,16] m) => (float[2,3,4,16] y) { a = Add(s, m) y = Softmax<axis = 3>(a) }"
    )
    assert ops(check(model, PASS, tmp_path, changes=1)) == ["Add", *SOFTMAX]


def test_quantised_graphs_keep_the_kernel(tmp_path: Path) -> None:
    model = parse("g (float[3,50] x) => (float[3,50] y) { y = Softmax(x) }")
    check(model, PASS, tmp_path / "a16", target=find_target("qnn-htp", precision="a16"), changes=0)
    check(model, PASS, tmp_path / "cpu", target=find_target("xnnpack"), changes=0)


def test_exp_is_bounded(tmp_path: Path) -> None:
    model = parse("g (float[64] x) => (float[64] y) { y = Exp(x) }")
    feeds = {"x": np.linspace(-1000, 10, 64).astype(np.float32)}
    after = check(model, EXP, tmp_path, feeds=feeds, changes=1)
    assert ops(after) == ["Max", "Exp"]


@pytest.mark.parametrize(
    "body",
    [
        "a = Clip(x, low, high) y = Exp(a)",
        "a = Max(x, low) y = Exp(a)",
        "a = Abs(x) y = Exp(a)",
        "a = Tanh(x) b = Neg(a) y = Exp(b)",
    ],
)
def test_exp_that_cannot_go_far_is_left_alone(body: str, tmp_path: Path) -> None:
    text = f"g (float[8] x) => (float[8] y) <float low = {{-17.0}}, float high = {{10.5}}> {{ {body} }}"
    check(parse(text), EXP, tmp_path, changes=0)


def test_an_explicit_softmax_is_bounded_once(tmp_path: Path) -> None:
    text = (
        "g (float[3,50] x) => (float[3,50] y) <int64[1] axis = {-1}> "
        "{ m = ReduceMax(x, axis) d = Sub(x, m) e = Exp(d) t = ReduceSum(e, axis) y = Div(e, t) }"
    )
    after: ir.Model = check(parse(text), EXP, tmp_path, changes=1)
    assert ops(after) == ["ReduceMax", "Sub", "Max", "Exp", "ReduceSum", "Div"]


def test_accurate_gelu_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(parse("g (float[8] x) => (float[8] y) { y = Gelu(x) }").SerializeToString())
    model = read_model(path)
    assert len(GELU.run(model, HTP)) == 1
    assert EXP.run(model, HTP) == []
