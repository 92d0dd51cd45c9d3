"""GELU as nodes and as expansions in accurate forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import check, ops, parse

from sanitize.passes.accurate_gelu import PASS
from sanitize.target import find_target

HTP = find_target("qnn-htp")
WIDE = {"x": np.linspace(-30, 30, 512).astype(np.float32)}
NARROW = {"x": np.random.default_rng(0).normal(size=512).astype(np.float32)}
CONSTANTS = (
    "float one = {1.0}, float half = {0.5}, float root = {1.4142135}, float inverse = {0.70710677}, "
    "float cubic = {0.044715}, float three = {3.0}, float scale = {0.7978845608}"
)


def graph(body: str, opset: int = 21) -> str:
    head = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
    return head + f"g (float[512] x) => (float[512] y) <{CONSTANTS}> {{ {body} }}"


@pytest.mark.parametrize("feeds", [WIDE, NARROW])
@pytest.mark.parametrize(
    "body",
    [
        "y = Gelu(x)",
        "y = com.microsoft.Gelu(x)",
        "a = Div(x, root) e = Erf(a) g = Add(e, one) m = Mul(x, g) y = Mul(m, half)",
        "a = Mul(inverse, x) e = Erf(a) g = Add(one, e) h = Mul(half, x) y = Mul(g, h)",
        "a = Mul(x, inverse) e = Erf(a) g = Add(e, one) h = Mul(g, half) y = Mul(h, x)",
    ],
)
def test_exact(body: str, feeds: dict[str, np.ndarray], tmp_path: Path) -> None:
    after = check(parse(graph(body)), PASS, tmp_path, feeds=feeds, changes=1)
    assert not {"Gelu", "Erf"} & set(ops(after)) and len(ops(after)) == 16


@pytest.mark.parametrize("feeds", [WIDE, NARROW])
@pytest.mark.parametrize(
    "body",
    [
        'y = Gelu<approximate = "tanh">(x)',
        "y = com.microsoft.FastGelu(x)",
        "c = Pow(x, three) d = Mul(c, cubic) s = Add(x, d) u = Mul(s, scale) t = Tanh(u) g = Add(one, t)"
        " h = Mul(half, x) y = Mul(h, g)",
        "q = Mul(x, x) c = Mul(x, q) d = Mul(cubic, c) s = Add(d, x) u = Mul(scale, s) t = Tanh(u) g = Add(t, one)"
        " h = Mul(g, x) y = Mul(half, h)",
        "q = Mul(x, x) d = Mul(cubic, q) f = Add(one, d) r = Mul(x, scale) u = Mul(r, f) t = Tanh(u) g = Add(t, one)"
        " h = Mul(g, half) y = Mul(x, h)",
    ],
)
def test_tanh_form(body: str, feeds: dict[str, np.ndarray], tmp_path: Path) -> None:
    after = check(parse(graph(body)), PASS, tmp_path, feeds=feeds, changes=1, min_db=100.0)
    assert not {"Gelu", "FastGelu", "Tanh"} & set(ops(after)) and len(ops(after)) == 11


@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu"])
def test_bias(op: str, tmp_path: Path) -> None:
    model = parse(f"g (float[4,8] x, float[8] b) => (float[4,8] y) {{ y = com.microsoft.{op}(x, b) }}")
    assert ops(check(model, PASS, tmp_path, changes=1))[0] == "Add"


def test_the_gate_goes_on(tmp_path: Path) -> None:
    """GeGLU: what multiplies GELU stays."""
    body = "a = Div(x, root) e = Erf(a) g = Add(e, one) m = Mul(x, g) h = Mul(m, half) y = Mul(h, three)"
    after = check(parse(graph(body)), PASS, tmp_path, feeds=NARROW, changes=1)
    assert len(ops(after)) == 17


@pytest.mark.parametrize(
    "body",
    [
        "a = Mul(x, half) e = Erf(a) g = Add(e, one) m = Mul(x, g) y = Mul(m, half)",  # another width
        "a = Div(x, root) e = Erf(a) g = Add(e, one) m = Mul(x, g) y = Mul(m, three)",
        "a = Div(x, root) e = Erf(a) g = Add(e, half) m = Mul(x, g) y = Mul(m, half)",
        "a = Div(x, root) e = Erf(a) g = Sub(one, e) m = Mul(x, g) y = Mul(m, half)",
        "a = Div(root, x) e = Erf(a) g = Add(e, one) m = Mul(x, g) y = Mul(m, half)",
        "t = Tanh(x) g = Add(t, one) m = Mul(x, g) y = Mul(m, half)",
        "y = Tanh(x)",
    ],
)
def test_look_alikes(body: str, tmp_path: Path) -> None:
    check(parse(graph(body)), PASS, tmp_path, feeds=NARROW, changes=0)


def test_inner_value_returned(tmp_path: Path) -> None:
    """The gate is a graph output: the expansion cannot go, so it stays whole."""
    model = parse(
        f"g (float[8] x) => (float[8] y, float[8] g) <{CONSTANTS}> "
        "{ a = Div(x, root) e = Erf(a) g = Add(e, one) m = Mul(x, g) y = Mul(m, half) }"
    )
    check(model, PASS, tmp_path, changes=0)


def test_calibration_decides(tmp_path: Path) -> None:
    model = parse(graph("y = Gelu(x)"))
    inside = replace(HTP, ranges={"x": (-0.5, 0.9)})
    change = check(model, PASS, tmp_path / "a", target=inside, feeds=NARROW, changes=1)
    assert "Gelu" not in ops(change)
    check(model, PASS, tmp_path / "b", target=find_target("ort-mobile"), feeds=NARROW, changes=0)
