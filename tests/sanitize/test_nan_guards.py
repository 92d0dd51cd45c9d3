"""NaN guards: gone in every form that exporters write, left where the test is about something else."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import check, ops, parse

from sanitize.model_file import read_model
from sanitize.passes.nan_guards import PASS
from sanitize.target import find_target

FORMS = {
    "plain": "n = IsNaN(s) y = Where(n, zero, s)",
    "inverse": "n = IsNaN(s) k = Not(n) y = Where(k, s, zero)",
    "double not": "n = IsNaN(s) k = Not(n) j = Not(k) y = Where(j, zero, s)",
    "identity": "i = Identity(s) n = IsNaN(i) y = Where(n, zero, s)",
    "identity on both": "i = Identity(s) n = IsNaN(s) m = Identity(n) y = Where(m, zero, i)",
    "test of a cast": "h = Cast<to=11>(s) n = IsNaN(h) y = Where(n, zero, s)",
    "then used": "n = IsNaN(s) g = Where(n, zero, s) y = Mul(g, two)",
    "twice": "n = IsNaN(s) g = Where(n, zero, s) m = IsNaN(g) y = Where(m, two, g)",
}
LOOK_ALIKES = {
    "another value": "n = IsNaN(x) y = Where(n, zero, s)",
    "chooses on purpose": "n = IsNaN(s) y = Where(n, s, zero)",
    "between two constants": "n = IsNaN(s) y = Where(n, zero, two)",
    "square root": "r = Sqrt(x) n = IsNaN(r) y = Where(n, zero, r)",
    "scaled logarithm": "r = Log(x) t = Mul(r, two) n = IsNaN(t) y = Where(n, zero, t)",
    "input": "n = IsNaN(x) y = Where(n, zero, x)",
    "not a guard": "c = Greater(s, two) y = Where(c, two, s)",
    "cast to int": "i = Cast<to=6>(s) f = Cast<to=1>(i) n = IsNaN(f) y = Where(n, zero, s)",
}


def model(body: str, zero: str = "float zero = {0}") -> str:
    return f"g (float[1,2,4,4] x) => (float[1,2,4,4] y) <{zero}, float two = {{2}}> {{ s = Softmax(x) {body} }}"


@pytest.mark.parametrize("form", FORMS)
def test_removed(tmp_path: Path, form: str) -> None:
    after = check(parse(model(FORMS[form])), PASS, tmp_path)
    assert not {"IsNaN", "Where", "Not"} & set(ops(after))


@pytest.mark.parametrize("form", LOOK_ALIKES)
def test_left(tmp_path: Path, form: str) -> None:
    check(parse(model(LOOK_ALIKES[form])), PASS, tmp_path, changes=0)


def test_a_branch_that_stretches_stays(tmp_path: Path) -> None:
    text = """g (float[4] x) => (float[3,4] y) <float[3,1] zero = {0,0,0}> {
        s = Softmax(x) n = IsNaN(s) y = Where(n, zero, s) }"""
    check(parse(text), PASS, tmp_path, changes=0)


def test_other_readers_of_the_test_keep_it(tmp_path: Path) -> None:
    text = """g (float[2,4] x) => (float[2,4] y, bool[2,4] n) <float zero = {0}> {
        s = Softmax(x) n = IsNaN(s) y = Where(n, zero, s) }"""
    after = check(parse(text), PASS, tmp_path, changes=1)
    assert ops(after) == ["Softmax", "IsNaN"]


def test_both_outputs(tmp_path: Path) -> None:
    text = """g (float[2,4] x) => (float[2,4] s, float[2,4] y) <float zero = {0}> {
        s = Softmax(x) n = IsNaN(s) y = Where(n, zero, s) }"""
    after = check(parse(text), PASS, tmp_path, changes=1)
    assert [value.name for value in after.graph.outputs] == ["s", "y"]


def test_a_callers_mask_keeps_its_guard_on_a_cpu(tmp_path: Path) -> None:
    text = """g (float[2,4] x, float[2,4] mask) => (float[2,4] y) <float zero = {0}> {
        e = Exp(x) a = Add(e, mask) s = Softmax(a) n = IsNaN(s) y = Where(n, zero, s) }"""
    check(parse(text), PASS, tmp_path / "cpu", target=find_target("xnnpack"), changes=0)
    check(parse(text), PASS, tmp_path / "htp", changes=1)


@pytest.mark.parametrize("many", [3, 40])
def test_far_away_is_not_never(tmp_path: Path, many: int) -> None:
    """A logarithm behind more values than are looked at."""
    chain = " ".join(f"v{i + 1} = Add(v{i}, two)" for i in range(many))
    check(
        parse(model(f"v0 = Log(x) {chain} n = IsNaN(v{many}) y = Where(n, zero, v{many})")), PASS, tmp_path, changes=0
    )


def test_what_a_branch_makes_may_be_anything(tmp_path: Path) -> None:
    text = """g (float[4] x, bool c) => (float[4] y) <float zero = {0}> {
        s = If (c) <then_branch = t () => (float[4] a) { a = Sqrt(x) },
          else_branch = e () => (float[4] b) { b = Neg(x) }>
        n = IsNaN(s) y = Where(n, zero, s) }"""
    onnx.save(parse(text), tmp_path / "a.onnx")
    assert not PASS.run(read_model(tmp_path / "a.onnx"), find_target("qnn-htp"))
