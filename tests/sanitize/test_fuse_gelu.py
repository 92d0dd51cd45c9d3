"""Every spelling of GELU becomes Gelu, and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from graphs import check, ops, parse
from halves import in_float16

from sanitize import graph as graphs
from sanitize.passes.fuse_gelu import PASS

ERF = "a = Div(x, root2)\n e = Erf(a)\n b = Add(e, one)\n"
TANH = """p = Pow(x, three)
 q = Mul(p, cubic)
 s = Add(x, q)
 a = Mul(s, slope)
 e = Tanh(a)
 b = Add(one, e)
"""
FACTORED = """p = Mul(x, x)
 q = Mul(cubic, p)
 s = Add(q, one)
 c0 = Mul(x, slope)
 a = Mul(c0, s)
 e = Tanh(a)
 b = Add(e, one)
"""
PRODUCTS = {
    "x first": "c = Mul(x, b)\n y = Mul(c, half)",
    "half of x first": "c = Mul(x, half)\n y = Mul(c, b)",
    "half of the sum first": "c = Mul(half, b)\n y = Mul(x, c)",
    "x over two": "c = Div(x, two)\n y = Mul(b, c)",
    "over two at last": "c = Mul(b, x)\n y = Div(c, two)",
}


def gelu(curve: str, product: str, outputs: str = "") -> onnx.ModelProto:
    return parse(f"""
    g (float[4, 16] x) => (float[4, 16] y{outputs})
    <float root2 = {{1.41421356}}, float rroot2 = {{0.70710678}}, float one = {{1}}, float half = {{0.5}},
     float two = {{2}}, float three = {{3}}, float cubic = {{0.044715}}, float slope = {{0.79788456}}> {{
      {curve} {product}
    }}""")


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("curve, form", [(ERF, "none"), (TANH, "tanh")])
def test_spellings(tmp_path: Path, curve: str, form: str, product: str) -> None:
    after = check(gelu(curve, PRODUCTS[product]), PASS, tmp_path, changes=1)
    assert ops(after) == ["Gelu"]
    assert graphs.attribute(after.graph.node(0), "approximate", "none") == form


def test_other_arguments(tmp_path: Path) -> None:
    product = PRODUCTS["x first"]
    assert ops(check(gelu(ERF.replace("Div(x, root2)", "Mul(rroot2, x)"), product), PASS, tmp_path)) == ["Gelu"]
    assert ops(check(gelu(FACTORED, product), PASS, tmp_path)) == ["Gelu"]
    cubes = TANH.replace("p = Pow(x, three)", "x2 = Mul(x, x)\n p = Mul(x, x2)")
    assert ops(check(gelu(cubes, product), PASS, tmp_path)) == ["Gelu"]


def test_an_older_opset_is_raised(tmp_path: Path) -> None:
    model = gelu(ERF, PRODUCTS["x first"])
    model.opset_import[0].version = 14
    assert graphs.opset(check(model, PASS, tmp_path)) == 20


def test_a_gelu_of_a_gelu(tmp_path: Path) -> None:
    first = f"{ERF} {PRODUCTS['x first']}"
    second = re.sub(r"\b([abce])\b", r"\g<1>2", first)
    second = re.sub(r"\by = ", "z = ", re.sub(r"\bx\b", "y", second))
    model = gelu(first.replace("y = ", "h = "), re.sub(r"\by\b", "h", second).replace("z = ", "y = "))
    assert ops(check(model, PASS, tmp_path, changes=2)) == ["Gelu", "Gelu"]


def test_float16(tmp_path: Path) -> None:
    assert ops(check(in_float16(gelu(ERF, PRODUCTS["x first"])), PASS, tmp_path, min_db=50)) == ["Gelu"]


@pytest.mark.parametrize(
    "curve, product",
    [
        (ERF.replace("root2", "two"), PRODUCTS["x first"]),
        (ERF, PRODUCTS["x first"].replace("half", "two")),
        (ERF.replace("Add(e, one)", "Add(e, half)"), PRODUCTS["x first"]),
        (ERF, "n = Neg(x)\n c = Mul(n, b)\n y = Mul(c, half)"),
        (ERF, "c = Mul(b, b)\n y = Mul(c, half)"),
        (TANH.replace("cubic", "half"), PRODUCTS["x first"]),
        (TANH.replace("Pow(x, three)", "Pow(x, two)"), PRODUCTS["x first"]),
    ],
)
def test_look_alikes_stay(tmp_path: Path, curve: str, product: str) -> None:
    check(gelu(curve, product), PASS, tmp_path, changes=0)


@pytest.mark.parametrize("name", ["a", "e", "b", "c"])
def test_an_intermediate_that_is_an_output_stops_it(tmp_path: Path, name: str) -> None:
    check(gelu(ERF, PRODUCTS["x first"], outputs=f", float[4, 16] {name}"), PASS, tmp_path, changes=0)
