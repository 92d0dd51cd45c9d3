"""Explicit softmax becomes Softmax where that is the better form."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import check, ops, parse

from sanitize import graph as graphs
from sanitize.passes.fuse_softmax import PASS
from sanitize.target import find_target

A16 = find_target("qnn-htp", precision="a16")
DIV, RECIPROCAL = "y = Div(e, s)", "i = Reciprocal(s)\n y = Mul(e, i)"


def explicit(end: str = DIV, axis: int = -1, top: str = "m = ReduceMax(x, axes)\n d = Sub(x, m)") -> str:
    return f"""
    g (float[2, 3, 4] x) => (float[2, 3, 4] y) <int64[1] axes = {{{axis}}}, int64[1] other = {{0}}> {{
      {top}
      e = Exp(d)
      s = ReduceSum(e, axes)
      {end}
    }}"""


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("end", [DIV, RECIPROCAL, RECIPROCAL.replace("e, i", "i, e")])
@pytest.mark.parametrize("top", ["m = ReduceMax(x, axes)\n d = Sub(x, m)", "d = Identity(x)"])
def test_spellings(tmp_path: Path, axis: int, end: str, top: str) -> None:
    after = check(parse(explicit(end, axis, top)), PASS, tmp_path, target=A16, changes=1)
    assert [op for op in ops(after) if op != "Identity"] == ["Softmax"]
    assert graphs.attribute(next(n for n in after.graph if n.op_type == "Softmax"), "axis", -1) % 3 == axis % 3


def test_htp_in_fp16_keeps_the_explicit_form(tmp_path: Path) -> None:
    check(parse(explicit()), PASS, tmp_path, changes=0)
    check(parse(explicit()), PASS, tmp_path, target=find_target("xnnpack"), changes=1)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("y = Div(e, s)", "y = Div(s, e)"),
        ("y = Div(e, s)", "y = Mul(e, s)"),
        ("y = Div(e, s)", "t = Add(s, x)\n y = Div(e, t)"),
        ("y = Div(e, s)", "n = Neg(e)\n q = Div(e, s)\n y = Add(q, n)"),
        ("s = ReduceSum(e, axes)", "s = ReduceMax(e, axes)"),
    ],
)
def test_look_alikes_stay(tmp_path: Path, right: str, wrong: str) -> None:
    check(parse(explicit().replace(right, wrong)), PASS, tmp_path, target=A16, changes=0)


def test_a_maximum_over_another_axis_is_no_part_of_it(tmp_path: Path) -> None:
    text = explicit().replace("ReduceMax(x, axes)", "ReduceMax(x, other)")
    assert ops(check(parse(text), PASS, tmp_path, target=A16, changes=1)) == ["ReduceMax", "Sub", "Softmax"]


@pytest.mark.parametrize("name, shape", [("e", "2, 3, 4"), ("s", "2, 3, 1"), ("d", "2, 3, 4")])
def test_an_intermediate_that_is_an_output_stops_it(tmp_path: Path, name: str, shape: str) -> None:
    text = explicit().replace("=> (", f"=> (float[{shape}] {name}, ")
    check(parse(text), PASS, tmp_path, target=A16, changes=0)
