"""Reshapes around pointwise operators go; those that others need, or that regroup the last dim, stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import check, ops, parse

from sanitize.passes import dead
from sanitize.passes.reshape_pairs import PASS
from sanitize.target import find_target

HEAD = """g (float[6,4] x) => (float[6,4] y) <int64[3] s = {2, 3, 4}, int64[2] r = {6, 4}, float half = {0.5},
    float[4] bias = {1, 2, 3, 4}, float[3,1] column = {1, 2, 3}, int64[2] q = {8, 3}, int64[3] p = {3, 2, 4}> {
    n = Neg(x) """


def test_goes(tmp_path: Path) -> None:
    text = (
        "a = Reshape(n, s) b = Tanh(a) c = Mul(b, half) d = Add(c, bias) e = Mul(d, a) f = Reshape(e, r) y = Exp(f) }"
    )
    after = check(parse(HEAD + text), PASS, tmp_path, changes=1)
    dead.PASS.run(after, find_target("qnn-htp"))
    assert ops(after) == ["Neg", "Tanh", "Mul", "Add", "Mul", "Exp"]


def test_as_output(tmp_path: Path) -> None:
    after = check(parse(HEAD + "a = Reshape(n, s) b = Tanh(a) y = Reshape(b, r) }"), PASS, tmp_path, changes=1)
    dead.PASS.run(after, find_target("qnn-htp"))
    assert ops(after) == ["Neg", "Tanh"]


@pytest.mark.parametrize(
    "text",
    [
        "a = Reshape(n, s) b = Tanh(a) c = Mul(b, column) y = Reshape(c, r) }",
        "a = Reshape(n, s) b = Softmax(a) y = Reshape(b, r) }",
        "a = Reshape(n, q) b = Tanh(a) y = Reshape(b, r) }",
        "a = Reshape(n, s) b = Tanh(a) c = Reshape(b, r) d = ReduceSum<keepdims=0>(b) y = Add(c, d) }",
        "a = Reshape(n, s) b = Tanh(a) c = Reshape(b, p) e = Exp(c) f = ReduceMax<keepdims=0>(e) y = Mul(n, f) }",
    ],
)
def test_stays(tmp_path: Path, text: str) -> None:
    check(parse(HEAD + text), PASS, tmp_path, changes=0)
