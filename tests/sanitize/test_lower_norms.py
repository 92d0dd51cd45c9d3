"""Norms of com.microsoft, and LayerNormalization on chips without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import check, ops, parse

from ringstep.errors import RingstepError
from sanitize.passes import lower_layer_norm, lower_skip_norm
from sanitize.target import find_target

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
OLD = find_target("qnn-htp", "qcs6490")


def skip(call: str, outputs: str = "y") -> str:
    values = ", ".join(f"float[1, 3, 4] {name}" for name in outputs.split(","))
    constants = ", ".join(f"float[4] {name} = {{1, 2, 3, {i}}}" for i, name in enumerate(("w", "b", "c")))
    return f"{HEADER} g (float[1, 3, 4] x, float[1, 3, 4] s) => ({values}) <{constants}> {{ {call} }}"


@pytest.mark.parametrize(
    "call, outputs, want",
    [
        ("y = com.microsoft.SkipLayerNormalization(x, s, w, b, c)", "y", ["Add", "Add", "LayerNormalization"]),
        ("y, , , z = com.microsoft.SkipLayerNormalization(x, s, w)", "y,z", ["Add", "LayerNormalization"]),
        (
            "y, , , z = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.01>(x, s, w, c)", "y,z",
            ["Add", "Add", "RMSNormalization"],
        ),
    ],
)  # fmt: skip
def test_skip_norms(tmp_path: Path, call: str, outputs: str, want: list[str]) -> None:
    after = check(parse(skip(call, outputs)), lower_skip_norm.PASS, tmp_path, changes=1)
    assert ops(after) == want
    check(parse(skip(call, outputs)), lower_skip_norm.PASS, tmp_path / "c", target=find_target("xnnpack"), changes=0)


def test_a_mean_that_is_read_is_refused(tmp_path: Path) -> None:
    text = skip("y, m = com.microsoft.SkipLayerNormalization(x, s, w)").replace(
        "[1, 3, 4] y)", "[1, 3, 4] y, float[1, 3, 1] m)"
    )
    with pytest.raises(RingstepError, match="mean"):
        check(parse(text), lower_skip_norm.PASS, tmp_path)


LAYER = skip("y = LayerNormalization<epsilon = 0.001>(x, w, b)").replace(", float[1, 3, 4] s", "")


def test_layer_norm_on_an_old_chip(tmp_path: Path) -> None:
    after = check(parse(LAYER), lower_layer_norm.PASS, tmp_path, target=OLD, changes=1)
    assert ops(after) == ["ReduceMean", "Sub", "RMSNormalization", "Add"]
    wide = LAYER.replace("[1, 3, 4]", "[12, 3, 4]")
    assert "Reshape" in ops(check(parse(wide), lower_layer_norm.PASS, tmp_path / "wide", target=OLD, changes=1))


def test_layer_norm_stays_where_it_compiles(tmp_path: Path) -> None:
    check(parse(LAYER), lower_layer_norm.PASS, tmp_path, changes=0)
    over_two = LAYER.replace("<epsilon = 0.001>", "<axis = 1>").replace(
        "float[4] w = {1, 2, 3, 0}", "float[3, 4] w = {1,2,3,4,5,6,7,8,9,1,2,3}"
    )
    over_two = over_two.replace("(x, w, b)", "(x, w)")
    check(parse(over_two), lower_layer_norm.PASS, tmp_path / "two", target=OLD, changes=0)


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_a_quantised_layer_norm_stays(tmp_path: Path, kind: str) -> None:
    text = f"""{HEADER} g (float[1, 3, 4] x) => (float[1, 3, 4] y) <float s = {{0.01}}, {kind} z = {{128}},
        float[4] w = {{1, 2, 3, 0}}> {{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        n = LayerNormalization(d, w) r = QuantizeLinear(n, s, z) y = DequantizeLinear(r, s, z) }}"""
    check(parse(text), lower_layer_norm.PASS, tmp_path, target=OLD, changes=0)
