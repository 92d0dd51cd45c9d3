"""Every spelling of LayerNorm becomes LayerNormalization, and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from graphs import check, ops, parse
from halves import in_float16

from sanitize.passes import fuse_rms_norm
from sanitize.passes.fuse_layer_norm import PASS
from sanitize.target import find_target

DIV = "s = Mul(d, d)\n v = ReduceMean(s, axes)\n e = Add(v, eps)\n r = Sqrt(e)\n n = Div(d, r)"
RECIPROCAL = (
    "s = Pow(d, two)\n v = ReduceMean(s, axes)\n e = Add(eps, v)\n r = Sqrt(e)\n i = Reciprocal(r)\n n = Mul(i, d)"
)
AFFINE = "p = Mul(n, w)\n y = Add(p, b)"


def spelling(middle: str = DIV, end: str = AFFINE, outputs: str = "") -> str:
    return f"""
    g (float[2, 3, 4] x) => (float[2, 3, 4] y{outputs})
    <float[4] w = {{1, 2, 3, 4}}, float[4] b = {{4, 3, 2, 1}}, int64[1] axes = {{-1}}, float eps = {{0.00001}},
     float two = {{2}}> {{
      m = ReduceMean(x, axes)
      d = Sub(x, m)
      {middle}
      {end}
    }}"""


@pytest.mark.parametrize("middle", [DIV, RECIPROCAL])
@pytest.mark.parametrize("end", [AFFINE, "p = Mul(w, n)\n y = Add(b, p)", "y = Mul(n, w)", "y = Identity(n)"])
def test_spellings(tmp_path: Path, middle: str, end: str) -> None:
    after = check(parse(spelling(middle, end)), PASS, tmp_path, changes=1)
    assert [op for op in ops(after) if op != "Identity"] == ["LayerNormalization"]


def test_a_difference_computed_twice(tmp_path: Path) -> None:
    text = spelling().replace("n = Div(d, r)", "d2 = Sub(x, m)\n n = Div(d2, r)")
    assert ops(check(parse(text), PASS, tmp_path)) == ["LayerNormalization"]


def test_a_norm_of_a_norm(tmp_path: Path) -> None:
    body = f"m = ReduceMean(x, axes)\n d = Sub(x, m)\n {DIV}\n {AFFINE}"
    second = re.sub(r"\b([mdsvernp])\b", r"\g<1>2", body)
    second = re.sub(r"\by = ", "z = ", re.sub(r"\bx\b", "y", second))
    text = spelling(end=f"{AFFINE}\n {second}").replace("[2, 3, 4] y)", "[2, 3, 4] z)")
    assert ops(check(parse(text), PASS, tmp_path, changes=2)) == ["LayerNormalization"] * 2


def test_float32_inside_a_float16_model(tmp_path: Path) -> None:
    text = spelling(end="h = Cast<to = 10>(n)\n p = Mul(h, w)\n y = Add(p, b)")
    text = text.replace("ReduceMean(x, axes)", "ReduceMean(c, axes)").replace("Sub(x, m)", "Sub(c, m)")
    text = text.replace("m = Red", "c = Cast<to = 1>(x)\n m = Red")
    model = in_float16(parse(text), keep=("eps", "two"))
    assert ops(check(model, PASS, tmp_path, min_db=60)) == ["LayerNormalization"]


def test_float64_behind_the_difference(tmp_path: Path) -> None:
    text = spelling(end="h = Cast<to = 10>(n)\n p = Mul(h, w)\n y = Add(p, b)")
    text = text.replace("d = Sub(x, m)", "d0 = Sub(x, m)\n d = Cast<to = 11>(d0)").replace("float eps", "double eps")
    assert ops(check(in_float16(parse(text)), PASS, tmp_path, min_db=55)) == ["LayerNormalization"]


def test_older_opset(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 13]>' + spelling().replace("(x, axes)", "<axes = [2]>(x)")
    text = text.replace("(s, axes)", "<axes = [-1]>(s)").replace("int64[1] axes = {-1}, ", "")
    assert ops(check(parse(text), PASS, tmp_path)) == ["LayerNormalization"]


def test_old_chips_get_a_mean_taken_off_and_rms_norm(tmp_path: Path) -> None:
    old = find_target("qnn-htp", "qcs6490")
    check(parse(spelling()), PASS, tmp_path, target=old, changes=0)
    after = check(parse(spelling()), fuse_rms_norm.PASS, tmp_path / "rms", target=old, changes=1)
    assert ops(after) == ["ReduceMean", "Sub", "RMSNormalization", "Add"]


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("Sub(x, m)", "Sub(m, x)"),
        ("Sub(x, m)", "Add(x, m)"),
        ("m = ReduceMean(x, axes)", "m = ReduceMax(x, axes)"),
        ("m = ReduceMean(x, axes)", "ax = Constant<value_ints = [1]>()\n m = ReduceMean(x, ax)"),
        ("n = Div(d, r)", "n = Div(x, r)"),
    ],
)
def test_look_alikes_stay(tmp_path: Path, right: str, wrong: str) -> None:
    check(parse(spelling().replace(right, wrong)), PASS, tmp_path, changes=0)


@pytest.mark.parametrize("name, shape", [("m", "2, 3, 1"), ("d", "2, 3, 4"), ("r", "2, 3, 1")])
def test_an_intermediate_that_is_an_output_stops_it(tmp_path: Path, name: str, shape: str) -> None:
    check(parse(spelling(outputs=f", float[{shape}] {name}")), PASS, tmp_path, changes=0)
