"""RotaryEmbedding against ONNX Runtime's own kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import check, ops, parse
from onnx import TensorProto, helper, numpy_helper

from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.passes.lower_rotary_embedding import PASS
from sanitize.target import find_target

BATCH, HEADS, LENGTH, SIZE, LONGEST = 2, 3, 5, 8, 12


def rotary(
    *, microsoft: bool, rank: int, positions: str = "ids", rotated: int = 0, interleaved: int = 0, **attributes: object
) -> onnx.ModelProto:
    half = (rotated or SIZE) // 2
    angles = np.random.default_rng(0).normal(size=(LONGEST, half))
    shape = [BATCH, LENGTH, HEADS * SIZE] if rank == 3 else [BATCH, HEADS, LENGTH, SIZE]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    tables = [numpy_helper.from_array(f(angles).astype(np.float32), n) for f, n in ((np.cos, "cos"), (np.sin, "sin"))]
    if positions == "given":
        tables = []
        inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [BATCH, LENGTH, half]) for n in ("cos", "sin")]
    else:
        ids = [1] if positions == "offset" else [BATCH, LENGTH]
        inputs.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ids))
    names = ["x", "ids", "cos", "sin"] if microsoft else ["x", "cos", "sin", "ids"]
    node = helper.make_node(
        "RotaryEmbedding", [name for name in names if name != "ids" or positions != "given"], ["y"], "rope",
        domain="com.microsoft" if microsoft else "", interleaved=interleaved, rotary_embedding_dim=rotated,
        num_heads=HEADS if rank == 3 or rotated else 0, **attributes,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)], tables
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("microsoft, positions", [(False, "ids"), (False, "given"), (True, "ids"), (True, "offset")])
def test_equals_the_kernel(tmp_path: Path, rank: int, interleaved: int, microsoft: bool, positions: str) -> None:
    model = rotary(microsoft=microsoft, rank=rank, interleaved=interleaved, positions=positions)
    after = check(model, PASS, tmp_path, changes=1)
    assert "RotaryEmbedding" not in ops(after)
    assert all(value.shape is None or len(value.shape) <= 4 for node in after.graph for value in node.outputs)


@pytest.mark.parametrize("microsoft", [False, True])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_the_tail_passes_through(tmp_path: Path, microsoft: bool, interleaved: int) -> None:
    check(rotary(microsoft=microsoft, rank=3, rotated=4, interleaved=interleaved), PASS, tmp_path, changes=1)


def test_an_older_opset_is_raised(tmp_path: Path) -> None:
    model = rotary(microsoft=True, rank=3)
    model.opset_import[0].version = 11
    assert graphs.opset(check(model, PASS, tmp_path, changes=1)) == 13


def test_a_cpu_keeps_it(tmp_path: Path) -> None:
    check(rotary(microsoft=True, rank=4), PASS, tmp_path, target=find_target("ort-mobile"), changes=0)


def test_packed_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match=r"rope.*packed"):
        check(rotary(microsoft=True, rank=3, is_packed_batching=1), PASS, tmp_path)


def test_other_operators_stay(tmp_path: Path) -> None:
    check(parse("g (float[2] x) => (float[2] y) { y = Neg(x) }"), PASS, tmp_path, changes=0)
