"""Softplus, Mish, Elu and products with HardSigmoid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import check, ops, parse

from sanitize.passes.accurate_softplus import PASS
from sanitize.target import find_target

HTP = find_target("qnn-htp")
FEEDS = {"x": np.linspace(-60, 60, 512).astype(np.float32)}
TAIL = {"x": np.linspace(-8, 0, 512).astype(np.float32)}


@pytest.mark.parametrize("feeds", [FEEDS, TAIL])
@pytest.mark.parametrize(
    ("body", "count", "min_db"),
    [
        ("y = Softplus(x)", 15, 85.0),
        ("y = Mish(x)", 17, 85.0),
        ("y = Elu(x)", 5, 110.0),
        ("y = Elu<alpha = 0.5>(x)", 6, 110.0),
    ],
)
def test_forms(body: str, count: int, min_db: float, feeds: dict[str, np.ndarray], tmp_path: Path) -> None:
    model = parse(f"g (float[512] x) => (float[512] y) {{ {body} }}")
    after = check(model, PASS, tmp_path, feeds=feeds, changes=1, min_db=min_db)
    assert len(ops(after)) == count


def test_hard_sigmoid_stands_first(tmp_path: Path) -> None:
    head = "g (float[8] x) => (float[8] y) { h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(x)"
    after = check(parse(f"{head} y = Mul(x, h) }}"), PASS, tmp_path / "a", changes=1)
    product = after.graph[-1]
    assert product.inputs[1] is after.graph.inputs[0]
    check(parse(f"{head} y = Mul(h, x) }}"), PASS, tmp_path / "b", changes=0)


def test_where_the_kernel_is_right_it_stays(tmp_path: Path) -> None:
    model = parse("g (float[8] x) => (float[8] y) { y = Softplus(x) }")
    check(model, PASS, tmp_path / "a", target=replace(HTP, ranges={"x": (50.0, 900.0)}), changes=0)
    check(model, PASS, tmp_path / "b", target=find_target("qnn-htp", precision="a16"), changes=0)
    check(parse("g (float[8] x) => (float[8] y) { y = LeakyRelu(x) }"), PASS, tmp_path / "c", changes=0)
