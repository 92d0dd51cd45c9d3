"""FusedMatMul against ONNX Runtime's own kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import check, ops, parse

from ringstep.errors import RingstepError
from sanitize.passes.lower_fused_matmul import PASS
from sanitize.target import find_target


@pytest.mark.parametrize(
    "a, b, attributes, want",
    [
        ("3, 4", "4, 5", "alpha = 0.5", ["Mul", "MatMul"]),
        ("3, 4", "5, 4", "transB = 1", ["Transpose", "MatMul"]),
        ("2, 4, 3", "2, 5, 4", "transA = 1, transB = 1, alpha = 2.0", ["Transpose", "Transpose", "Mul", "MatMul"]),
    ],
)
def test_equals_the_kernel(tmp_path: Path, a: str, b: str, attributes: str, want: list[str]) -> None:
    y = "2, 3, 5" if a.startswith("2") else "3, 5"
    text = f"g (float[{a}] a, float[{b}] b) => (float[{y}] y) {{ y = com.microsoft.FusedMatMul<{attributes}>(a, b) }}"
    assert ops(check(parse(text), PASS, tmp_path, changes=1)) == want
    check(parse(text), PASS, tmp_path / "cpu", target=find_target("xnnpack"), changes=0)


def test_a_transposed_batch_is_refused(tmp_path: Path) -> None:
    shape = "float[2, 2, 2]"
    text = f"g ({shape} a, {shape} b) => ({shape} y) {{ y = com.microsoft.FusedMatMul<transBatchA = 1>(a, b) }}"
    with pytest.raises(RingstepError, match=r"FusedMatMul.*batch"):
        check(parse(text), PASS, tmp_path)
