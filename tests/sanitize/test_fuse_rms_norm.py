"""Every spelling of RMSNorm becomes RMSNormalization, and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from graphs import check, ops, parse
from halves import in_float16

from sanitize import graph as graphs
from sanitize.passes import accurate_square
from sanitize.passes.fuse_rms_norm import PASS
from sanitize.target import find_target

SQUARES = {"mul": "s = Mul(x, x)", "pow": "two = Constant<value = float {2.0}>()\n s = Pow(x, two)"}
ROOTS = {
    "reciprocal": "r = Sqrt(me)\n i = Reciprocal(r)\n n = Mul(x, i)",
    "one over": "one = Constant<value = float {1.0}>()\n r = Sqrt(me)\n i = Div(one, r)\n n = Mul(i, x)",
    "div": "r = Sqrt(me)\n n = Div(x, r)",
    "pow": "half = Constant<value = float {-0.5}>()\n i = Pow(me, half)\n n = Mul(x, i)",
}
WEIGHTS = {"left": "y = Mul(w, n)", "right": "y = Mul(n, w)", "none": "y = Identity(n)"}


def spelling(square: str = "mul", root: str = "reciprocal", weight: str = "right", shape: str = "2, 3, 8") -> str:
    return f"""
    g (float[{shape}] x) => (float[{shape}] y)
    <float[8] w = {{1, 2, 3, 4, 5, 6, 7, 8}}, int64[1] axes = {{-1}}, float eps = {{0.00001}}> {{
      {SQUARES[square]}
      m = ReduceMean<keepdims = 1>(s, axes)
      me = Add(m, eps)
      {ROOTS[root]}
      {WEIGHTS[weight]}
    }}"""


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("square, weight", [("mul", "left"), ("pow", "right"), ("mul", "none")])
def test_spellings(tmp_path: Path, square: str, root: str, weight: str) -> None:
    after = check(parse(spelling(square, root, weight)), PASS, tmp_path, changes=1)
    left = [op for op in ops(after) if op not in ("Constant", "Identity")]
    assert left == ["RMSNormalization"]
    assert graphs.opset(after) == 23


def test_axes_as_attribute_at_opset_17(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2, 8] x) => (float[2, 8] y, float[2, 1] z) <float eps = {0.000001}, float[8] w = {1,2,3,4,5,6,7,8}> {
      s = Mul(x, x)
      m = ReduceMean<axes = [1]>(s)
      me = Add(eps, m)
      r = Sqrt(me)
      n = Div(x, r)
      y = Mul(n, w)
      z = ReduceMean<axes = [-1]>(x)
    }"""
    after = check(parse(text), PASS, tmp_path, changes=1)
    assert ops(after) == ["RMSNormalization", "ReduceMean"]
    assert len(after.graph.node(1).inputs) == 2, "the other ReduceMean takes its axes as an input now"


def test_float16_as_transformers_writes_it(tmp_path: Path) -> None:
    text = """
    g (float[2, 8] x) => (float[2, 8] y) <float[8] w = {1,2,3,4,5,6,7,8}, int64[1] axes = {-1},
      float eps = {0.000001}> {
      c = Cast<to = 1>(x)
      two = Constant<value = float {2.0}>()
      s = Pow(c, two)
      m = ReduceMean(s, axes)
      me = Add(m, eps)
      r = Sqrt(me)
      i = Reciprocal(r)
      n = Mul(c, i)
      h = Cast<to = 10>(n)
      y = Mul(w, h)
    }"""
    half = in_float16(parse(text), keep=("eps",))
    after = check(half, PASS, tmp_path, changes=1, min_db=60)
    assert [op for op in ops(after) if op != "Constant"] == ["RMSNormalization"]
    big = {"x": np.full((2, 8), 3000, np.float16) * np.linspace(-1, 1, 8).astype(np.float16)}
    check(half, PASS, tmp_path, feeds=big, min_db=60)


def test_gemma_adds_one_to_its_weight(tmp_path: Path) -> None:
    text = """
    g (float[2, 8] x) => (float[2, 8] y) <float[8] w = {1,2,3,4,5,6,7,8}, int64[1] axes = {-1},
      float eps = {0.000001}, float one = {1}> {
      c = Cast<to = 1>(x)
      s = Mul(c, c)
      m = ReduceMean(s, axes)
      me = Add(m, eps)
      r = Sqrt(me)
      i = Reciprocal(r)
      n = Mul(c, i)
      w1 = Add(w, one)
      f = Mul(n, w1)
      y = Cast<to = 10>(f)
    }"""
    half = in_float16(parse(text), keep=("eps", "w", "one"))
    after = check(half, PASS, tmp_path, changes=1, min_db=60)
    assert ops(after) == ["Cast", "Add", "RMSNormalization", "Cast"]


def test_wide_heads_become_a_matrix_on_htp(tmp_path: Path) -> None:
    wide = parse(spelling(shape="1, 9, 4, 8"))
    assert ops(check(wide, PASS, tmp_path)) == ["Reshape", "RMSNormalization", "Reshape"]
    assert ops(check(wide, PASS, tmp_path, target=find_target("ort-mobile"))) == ["RMSNormalization"]
    assert ops(check(parse(spelling(shape="1, 8, 4, 8")), PASS, tmp_path)) == ["RMSNormalization"]


def test_native_norms_are_reshaped_and_renamed(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 23]>
    g (float[12, 2, 8] x) => (float[12, 2, 8] y) <float[8] w = {1,2,3,4,5,6,7,8}> {
      h = RMSNormalization<epsilon = 0.001>(x, w)
      y = SimplifiedLayerNormalization<axis = -1, epsilon = 0.01, stash_type = 1>(h, w)
    }"""
    model = parse(text)
    after = check(model, PASS, tmp_path, changes=2)
    assert ops(after) == ["Reshape", "RMSNormalization", "Reshape"] * 2


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("Mul(x, x)", "Mul(x, w)"),
        ("axes = {-1}", "axes = {0}"),
        ("i = Reciprocal(r)", "i = Neg(r)"),
        ("n = Mul(x, i)", "n = Mul(w, i)"),
        ("me = Add(m, eps)", "me = Add(m, m)"),
    ],
)
def test_look_alikes_stay(tmp_path: Path, right: str, wrong: str) -> None:
    text = spelling(shape="8, 8")
    assert right in text
    check(parse(text.replace(right, wrong)), PASS, tmp_path, changes=0)


@pytest.mark.parametrize(
    "square, root, right, wrong",
    [
        ("pow", "div", "float {2.0}", "float {4.0}"),
        ("mul", "pow", "float {-0.5}", "float {0.5}"),
        ("mul", "div", "Div(x, r)", "Div(r, x)"),
        ("mul", "one over", "Div(one, r)", "Div(r, one)"),
        ("mul", "div", "eps = {0.00001}", "eps = {1.0}"),
    ],
)
def test_look_alikes_of_other_roots_stay(tmp_path: Path, square: str, root: str, right: str, wrong: str) -> None:
    text = spelling(square, root, shape="2, 8")
    assert right in text
    check(parse(text.replace(right, wrong)), PASS, tmp_path, changes=0)


def test_a_norm_of_a_norm(tmp_path: Path) -> None:
    body = spelling(shape="2, 8").split("{\n", 1)[1].rsplit("}", 1)[0]
    second = body.replace("x", "y").replace("ayes", "axes")
    for name in ("s", "m", "me", "r", "i", "n"):
        second = re.sub(rf"\b{name}\b", f"{name}2", second)
    second = re.sub(r"\by = ", "z = ", second)
    text = spelling(shape="2, 8").replace(body, body + second).replace("=> (float[2, 8] y)", "=> (float[2, 8] z)")
    assert ops(check(parse(text), PASS, tmp_path, changes=2)) == ["RMSNormalization"] * 2


def test_an_intermediate_that_is_read_elsewhere_stops_it(tmp_path: Path) -> None:
    text = spelling(shape="2, 8").replace("=> (float[2, 8] y)", "=> (float[2, 8] y, float[2, 1] m)")
    check(parse(text), PASS, tmp_path, changes=0)
    used = spelling(shape="2, 8").replace("=> (float[2, 8] y)", "=> (float[2, 8] y, float[2, 1] z)")
    check(parse(used.replace("y = Mul(n, w)", "y = Mul(n, w)\n z = Neg(r)")), PASS, tmp_path, changes=0)


def test_the_normalised_value_may_be_read_before_its_weight(tmp_path: Path) -> None:
    text = spelling(shape="2, 8").replace("=> (float[2, 8] y)", "=> (float[2, 8] y, float[2, 8] n)")
    after = check(parse(text), PASS, tmp_path, changes=1)
    assert ops(after) == ["RMSNormalization", "Mul"]


OUT_OF_REACH = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[2, 8] x, float[1, 4, 4, 4] i, float[1, 2, 2, 2] at) => (float[2, 8] y, float[1, 4, 2, 2] z)
    <float[8] w = {1,2,3,4,5,6,7,8}, float eps = {0.00001}, int64[1] last = {-1}> {
      s = Mul(x, x)
      m = ReduceMean(s, last)
      me = Add(m, eps)
      r = Sqrt(me)
      n = Div(x, r)
      y = Mul(n, w)
      z = GridSample<mode = "bilinear">(i, at)
    }"""
"""GridSample spells its modes in another way from opset 20 on."""


def test_out_of_reach_of_opset_23_squares_stay_in_range(tmp_path: Path) -> None:
    check(parse(OUT_OF_REACH), PASS, tmp_path / "fuse", changes=0)
    after = check(parse(OUT_OF_REACH), accurate_square.PASS, tmp_path, changes=1)
    assert "ReduceMax" in ops(after) and graphs.opset(after) == 18
