"""SiLU, QuickGelu and Sigmoid in accurate forms: what is rewritten, what is not, and that the values stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import check, ops, parse

from sanitize.passes.accurate_sigmoid import PASS
from sanitize.target import find_target

HTP = find_target("qnn-htp")
SILU = ["Mul", "Clip", "Exp", "Abs", "Tanh", "Add", "Mul", "Mul"]


def wide(*shape: int) -> np.ndarray:
    """Values that reach far beyond where gates live."""
    return np.random.default_rng(0).normal(size=shape, scale=20.0).astype(np.float32)


@pytest.mark.parametrize("order", ["x, s", "s, x"])
def test_silu_in_any_order(order: str, tmp_path: Path) -> None:
    model = parse(f"g (float[3,64] x) => (float[3,64] y) {{ s = Sigmoid(x)  y = Mul({order}) }}")
    after = check(model, PASS, tmp_path, feeds={"x": wide(3, 64)}, changes=1)
    assert sorted(ops(after)) == sorted(SILU)
    assert [o.name for o in after.graph.outputs] == ["y"]


def test_the_change_says_the_gain(tmp_path: Path) -> None:
    from sanitize.model_file import read_model

    path = tmp_path / "m.onnx"
    path.write_bytes(parse("g (float[4] x) => (float[4] y) { s = Sigmoid(x)  y = Mul(x, s) }").SerializeToString())
    (change,) = PASS.run(read_model(path), HTP)
    assert change.what.startswith("SiLU rewritten: ") and change.what.endswith("(simulated, sm8750)")


def test_quick_gelu_written_out(tmp_path: Path) -> None:
    model = parse("g (float[8] x) => (float[8] y) <float c = {1.702}> { p = Mul(c, x) s = Sigmoid(p) y = Mul(s, x) }")
    after = check(model, PASS, tmp_path, feeds={"x": wide(8)}, changes=1)
    assert "Sigmoid" not in ops(after) and len(ops(after)) == 10


def test_quick_gelu_as_one_node(tmp_path: Path) -> None:
    model = parse("g (float[8] x) => (float[8] y) { y = com.microsoft.QuickGelu(x) }")
    after = check(model, PASS, tmp_path, feeds={"x": wide(8)}, changes=1)
    assert "QuickGelu" not in ops(after)


def test_swish(tmp_path: Path) -> None:
    model = parse(
        '<ir_version: 12, opset_import: ["" : 24]>\ng (float[8] x) => (float[8] y) { y = Swish<alpha=1.5>(x) }'
    )
    after = check(model, PASS, tmp_path, feeds={"x": wide(8)}, changes=1)
    assert "Swish" not in ops(after)


def test_a_gate_of_another_value(tmp_path: Path) -> None:
    model = parse("g (float[8] x, float[8] v) => (float[8] y) { s = Sigmoid(x)  y = Mul(v, s) }")
    after = check(model, PASS, tmp_path, feeds={"x": wide(8), "v": wide(8)}, changes=1)
    assert ops(after) == ["Mul", "Abs", "Tanh", "Mul", "Add", "Clip", "Exp", "Mul", "Mul"]


def test_a_gate_read_twice_and_returned(tmp_path: Path) -> None:
    model = parse("g (float[8] x) => (float[8] y, float[8] s) { s = Sigmoid(x)  y = Mul(x, s) }")
    after = check(model, PASS, tmp_path, feeds={"x": wide(8)}, changes=2)
    assert "Sigmoid" not in ops(after)
    assert [o.name for o in after.graph.outputs] == ["y", "s"]


def test_half_precision_graph(tmp_path: Path) -> None:
    model = parse("g (float16[64] x) => (float16[64] y) { s = Sigmoid(x)  y = Mul(x, s) }")
    feeds = {"x": np.linspace(-8, 8, 64).astype(np.float16)}
    after = check(model, PASS, tmp_path, feeds=feeds, changes=1, min_db=60.0)
    assert {v.dtype.name for v in after.graph.initializers.values()} == {"FLOAT16"}


@pytest.mark.parametrize(
    "body",
    [
        "a = Abs(x)  t = Clip(a, two)  s = Sigmoid(t)  y = Mul(s, x)",  # 2 and above: the kernel is right there
        "s = HardSigmoid(x)  y = Mul(x, s)",
        "y = HardSwish(x)",
    ],
)
def test_left_alone(body: str, tmp_path: Path) -> None:
    check(parse(f"g (float[8] x) => (float[8] y) <float two = {{2.0}}> {{ {body} }}"), PASS, tmp_path, changes=0)


def test_calibration_decides(tmp_path: Path) -> None:
    model = parse("g (float[8] x) => (float[8] y) { s = Sigmoid(x)  y = Mul(x, s) }")
    check(model, PASS, tmp_path / "a", target=replace(HTP, ranges={"x": (2.0, 30.0)}), changes=0)
    check(model, PASS, tmp_path / "b", target=replace(HTP, ranges={"x": (-7.0, 3.0)}), changes=1)


@pytest.mark.parametrize("name", ["ort-mobile", "xnnpack"])
def test_other_targets_keep_their_kernels(name: str, tmp_path: Path) -> None:
    model = parse("g (float[8] x) => (float[8] y) { s = Sigmoid(x)  y = Mul(x, s) }")
    check(model, PASS, tmp_path, target=find_target(name), changes=0)
    check(model, PASS, tmp_path / "a16", target=find_target("qnn-htp", precision="a16"), changes=0)


def test_a_quantised_gate_stays(tmp_path: Path) -> None:
    model = parse(
        """g (float[8] x) => (float[8] y) <float c = {0.05}, uint8 z = {128}> { q = QuantizeLinear(x, c, z)
        d = DequantizeLinear(q, c, z) s = Sigmoid(d) m = Mul(d, s) r = QuantizeLinear(m, c, z)
        y = DequantizeLinear(r, c, z) }"""
    )
    check(model, PASS, tmp_path, changes=0)
