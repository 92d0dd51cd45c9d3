"""com.microsoft's GELUs and Swish against ONNX Runtime's own kernels."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import check, ops, parse

from sanitize import graph as graphs
from sanitize.passes import lower_gelu, lower_swish
from sanitize.target import find_target


def model(call: str, header: str = '"" : 17') -> onnx.ModelProto:
    return parse(f"""<ir_version: 10, opset_import: [{header}, "com.microsoft" : 1]>
    g (float[3, 4] x, float[4] b) => (float[3, 4] y) {{ y = {call} }}""")


@pytest.mark.parametrize(
    "call, want",
    [
        ("com.microsoft.Gelu(x)", ["Gelu"]),
        ("com.microsoft.BiasGelu(x, b)", ["Add", "Gelu"]),
        ("com.microsoft.FastGelu(x, b)", ["Add", "Gelu"]),
        ("com.microsoft.FastGelu(x)", ["Gelu"]),
        ("com.microsoft.QuickGelu<alpha = 1.5>(x)", ["Mul", "Sigmoid", "Mul"]),
    ],
)
def test_gelus(tmp_path: Path, call: str, want: list[str]) -> None:
    after = check(model(call), lower_gelu.PASS, tmp_path, changes=1)
    assert ops(after) == want
    assert graphs.opset(after) == (20 if "Gelu" in want else 17)
    check(model(call), lower_gelu.PASS, tmp_path / "cpu", target=find_target("xnnpack"), changes=0)


@pytest.mark.parametrize("call, want", [("Swish(x)", 2), ("Swish<alpha = 2.0>(x)", 3)])
def test_swish(tmp_path: Path, call: str, want: int) -> None:
    after = check(model(call, '"" : 24'), lower_swish.PASS, tmp_path, changes=1)
    assert len(ops(after)) == want and "Swish" not in ops(after)


def test_other_operators_stay(tmp_path: Path) -> None:
    check(model("Gelu(x)", '"" : 20'), lower_gelu.PASS, tmp_path, changes=0)
    check(model("Sigmoid(x)"), lower_swish.PASS, tmp_path, changes=0)
