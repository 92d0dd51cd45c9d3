"""Norms whose squares overflow fp16, and quotients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import Feeds, check, ops, parse

from sanitize.passes import accurate_exp, accurate_gelu, accurate_sigmoid, accurate_softmax
from sanitize.passes.accurate_divide import PASS as DIVIDE
from sanitize.passes.accurate_square import PASS
from sanitize.target import find_target

HTP = find_target("qnn-htp")
CONSTANTS = (
    "float eps = {0.000001}, float two = {2.0}, float one = {1.0}, float half = {0.5}, float minus = {-0.5}, "
    "int64[1] last = {-1}"
)
SCALED = ["Abs", "ReduceMax", "Max", "Pow", "Mul", "Mul", "ReduceMean", "Mul", "Mul", "Add", "Pow", "Mul"]


def graph(body: str, opset: int = 21) -> onnx.ModelProto:
    head = f'<ir_version: 8, opset_import: ["" : {opset}]>\n'
    return parse(f"{head} g (float[6,64] x) => (float[6,64] y) <{CONSTANTS}> {{ {body} }}")


def rows() -> Feeds:
    """From a row of zeros and one of 0.001 to one of 25000."""
    x = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    return {"x": x * np.array([[0.0], [1e-3], [0.02], [1.0], [300.0], [25000.0]], np.float32)}


@pytest.mark.parametrize(
    "body",
    [
        "p = Pow(x, two) m = ReduceMean(p, last) a = Add(m, eps) s = Sqrt(a) r = Reciprocal(s) y = Mul(x, r)",
        "p = Mul(x, x) m = ReduceMean(p, last) a = Add(eps, m) s = Sqrt(a) r = Div(one, s) y = Mul(r, x)",
        "p = Mul(x, x) m = ReduceMean(p, last) a = Add(m, eps) s = Pow(a, half) y = Div(x, s)",
        "p = Mul(x, x) m = ReduceMean(p, last) a = Add(m, eps) r = Pow(a, minus) y = Mul(x, r)",
    ],
)
def test_norms(body: str, tmp_path: Path) -> None:
    assert sorted(ops(check(graph(body), PASS, tmp_path, feeds=rows(), changes=1))) == sorted(SCALED)


def test_norm_of_an_older_opset(tmp_path: Path) -> None:
    body = "p = Pow(x, two) m = ReduceMean<axes = [-1]>(p) a = Add(m, eps) s = Sqrt(a) r = Reciprocal(s) y = Mul(x, r)"
    check(graph(body, 13), PASS, tmp_path, feeds=rows(), changes=1)


def test_layer_norm(tmp_path: Path) -> None:
    body = "c = ReduceMean(x, last) d = Sub(x, c) p = Pow(d, two) m = ReduceMean(p, last) a = Add(m, eps) s = Sqrt(a)"
    after = check(graph(body + " y = Div(d, s)"), PASS, tmp_path, changes=1)
    assert ops(after)[:2] == ["ReduceMean", "Sub"] and "Sqrt" not in ops(after)


def test_calibration_decides(tmp_path: Path) -> None:
    norm = graph("p = Mul(x, x) m = ReduceMean(p, last) a = Add(m, eps) s = Sqrt(a) y = Div(x, s)")
    check(norm, PASS, tmp_path / "a", target=replace(HTP, ranges={"x": (-200.0, 180.0)}), changes=0)
    check(norm, PASS, tmp_path / "b", target=replace(HTP, ranges={"x": (-200.0, 380.0)}), changes=1)
    length = parse("g (float[6,64] x) => (float[6,1] y) <int64[1] last = {-1}> { y = ReduceL2(x, last) }")
    check(length, PASS, tmp_path / "c", changes=0)
    big = replace(HTP, ranges={"x": (-2000.0, 380.0)})
    assert "ReduceL2" not in ops(check(length, PASS, tmp_path / "d", target=big, feeds=rows(), changes=1))


@pytest.mark.parametrize(
    "body",
    [
        "p = Mul(x, x) m = ReduceMean(p) a = Add(m, eps) s = Sqrt(a) y = Div(x, s)",  # over all dims
        "p = Mul(x, x) m = ReduceMean(p, last) a = Add(m, eps) s = Sqrt(a) y = Div(s, x)",
        "p = Abs(x) m = ReduceMean(p, last) a = Add(m, eps) s = Sqrt(a) y = Div(x, s)",
        "q = Neg(x) p = Mul(x, q) m = ReduceMean(p, last) a = Add(m, eps) s = Sqrt(a) y = Div(x, s)",
        "y = Mul(x, x)",
        "y = Pow(x, half)",
    ],
)
def test_look_alikes(body: str, tmp_path: Path) -> None:
    feeds = {"x": np.random.default_rng(0).uniform(0.5, 2.0, (6, 64)).astype(np.float32)}
    check(graph(body), PASS, tmp_path, feeds=feeds, changes=0)


def test_a_square_becomes_a_product(tmp_path: Path) -> None:
    assert ops(check(graph("y = Pow(x, two)"), PASS, tmp_path, changes=1)) == ["Mul"]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("y = Reciprocal(x)", ["Pow"]),
        ("y = Div(one, x)", ["Pow"]),
        ("s = Sqrt(x) y = Reciprocal(s)", ["Pow"]),
        ("s = Sqrt(x) y = Div(x, s)", ["Pow", "Mul"]),
        ("a = Add(x, one) y = Div(x, a)", ["Add", "Pow", "Mul"]),
    ],
)
def test_quotients(body: str, want: list[str], tmp_path: Path) -> None:
    feeds = {"x": np.random.default_rng(0).uniform(0.01, 900.0, (6, 64)).astype(np.float32)}
    assert ops(check(graph(body), DIVIDE, tmp_path, feeds=feeds, changes=1)) == want


@pytest.mark.parametrize(
    "body",
    [
        "y = Div(x, two)",
        "a = Abs(x) d = Add(a, one) q = Div(x, d) p = Mul(q, d) e = Sub(x, p) f = Div(e, d) y = Add(q, f)",
        "a = Abs(x) d = Add(a, one) r = Reciprocal(d) p = Mul(d, r) e = Sub(one, p) f = Mul(r, e) y = Add(r, f)",
    ],
)
def test_right_quotients_stay(body: str, tmp_path: Path) -> None:
    check(graph(body), DIVIDE, tmp_path, changes=0)


def test_integer_division_stays(tmp_path: Path) -> None:
    model = parse("g (int64[4] x, int64[4] d) => (int64[4] y) { y = Div(x, d) }")
    check(model, DIVIDE, tmp_path, feeds={"x": np.arange(4), "d": np.arange(1, 5)}, changes=0)


def test_passes_leave_each_others_forms_alone(tmp_path: Path) -> None:
    """A second round over a model that holds every form changes nothing."""
    from sanitize.model_file import read_model

    path = tmp_path / "m.onnx"
    body = (
        "p = Pow(x, two) m = ReduceMean(p, last) a = Add(m, eps) s = Sqrt(a) n = Div(x, s) g = Gelu(n) t = Sigmoid(g) "
        'u = Mul(g, t) f = Softmax(u) l = LogSoftmax(f) e = Exp(l) q = Sigmoid(e) k = Gelu<approximate = "tanh">(q) '
        "d = Add(k, one) y = Div(k, d)"
    )
    path.write_bytes(graph(body).SerializeToString())
    model: ir.Model = read_model(path)
    everything = (accurate_softmax.PASS, accurate_gelu.PASS, accurate_sigmoid.PASS, accurate_exp.PASS, PASS, DIVIDE)
    first = [change for each in everything for change in each.run(model, HTP)]
    assert len(first) == 8
    assert [change for each in everything for change in each.run(model, HTP)] == []
