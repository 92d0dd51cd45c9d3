"""MatMul and its bias become Gemm at rank 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import check, ops, parse

from sanitize.passes.fuse_linear import PASS


def linear(*, x: str = "2, 4", w: str = "4, 3", b: str = "3", y: str = "2, 3", body: str = "", extra: str = "") -> str:
    body = body or "m = MatMul(x, w)\n y = Add(m, b)"
    constants = {"3": "float[3] b = {1, 2, 3}", "1": "float[1] b = {1}", "1, 3": "float[1, 3] b = {1, 2, 3}"}
    variable = f", float[{b[1:]}] b" if b.startswith("v") else ""
    constant = f"<{constants[b]}>" if b in constants else ""
    return f"g (float[{x}] x, float[{w}] w{variable}) => (float[{y}] y{extra}) {constant} {{ {body} }}"


@pytest.mark.parametrize("body", ["m = MatMul(x, w)\n y = Add(m, b)", "m = MatMul(x, w)\n y = Add(b, m)"])
def test_matrices(tmp_path: Path, body: str) -> None:
    assert ops(check(parse(linear(body=body)), PASS, tmp_path, changes=1)) == ["Gemm"]


@pytest.mark.parametrize(
    "text",
    [
        linear(x="1, 2, 4", y="1, 2, 3"),
        linear(b="1"),
        linear(b="1, 3"),
        linear(b="v3"),
        linear(extra=", float[2, 3] m"),
        linear(body="m = MatMul(x, w)\n a = Add(m, b)\n y = Mul(a, m)"),
    ],
)
def test_look_alikes_stay(tmp_path: Path, text: str) -> None:
    check(parse(text), PASS, tmp_path, changes=0)


def test_integers_stay(tmp_path: Path) -> None:
    """ONNX Runtime has a MatMul of int32, and no Gemm."""
    text = """g (int32[2, 4] x, int32[4, 3] w) => (int32[2, 3] y) <int32[3] b = {1, 2, 3}> {
      m = MatMul(x, w)
      y = Add(m, b)
    }"""
    check(parse(text), PASS, tmp_path, changes=0)
