"""GatherND of constant indices: to Gather, to Reshape, in an If body; what is not constant stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import check, ops, parse
from onnx import numpy_helper

from sanitize.model_file import read_model
from sanitize.passes.lower_gather_nd import PASS
from sanitize.target import find_target


def model(data: tuple[int, ...], indices: np.ndarray, dtype: str = "float") -> onnx.ModelProto:
    shape = ",".join(map(str, data))
    out = ",".join(map(str, (*indices.shape[:-1], *data[indices.shape[-1] :])))
    made = parse(f"g ({dtype}[{shape}] x) => ({dtype}[{out}] y) {{ y = GatherND(x, i) }}")
    made.graph.initializer.append(numpy_helper.from_array(indices.astype(np.int64), "i"))
    return made


@pytest.mark.parametrize("dtype", ["float", "bool"])
def test_everything_in_order_is_a_reshape(tmp_path: Path, dtype: str) -> None:
    indices = np.stack([np.zeros(8), np.arange(8)], -1).reshape(1, 1, 1, 8, 2)
    assert ops(check(model((1, 8), indices, dtype), PASS, tmp_path, changes=1)) == ["Reshape"]


@pytest.mark.parametrize(("depth", "kinds"), [(1, ["Gather"]), (2, ["Reshape", "Gather"]), (3, ["Reshape", "Gather"])])
def test_any_rows(tmp_path: Path, depth: int, kinds: list[str]) -> None:
    indices = np.random.default_rng(depth).integers(-2, 2, (3, 5, depth))
    assert ops(check(model((2, 2, 3, 4), indices), PASS, tmp_path, changes=1)) == kinds


def test_what_stays(tmp_path: Path) -> None:
    changing = parse("g (float[2,4] x, int64[3,1] i) => (float[3,4] y) { y = GatherND(x, i) }")
    batched = parse("g (float[2,4] x) => (float[2] y) <int64[2,1] i = {1, 2}> { y = GatherND<batch_dims=1>(x, i) }")
    for kept in (changing, batched):
        check(kept, PASS, tmp_path, changes=0)
    check(model((2, 4), np.array([[1]])), PASS, tmp_path, target=find_target("ort-mobile"), changes=0)


def test_data_of_any_size_is_not_counted_through(tmp_path: Path) -> None:
    text = "g (float[900000000, 16] x) => (float[1] y) <int64[1, 2] i = {1, 2}> { y = GatherND(x, i) }"
    onnx.save(parse(text), tmp_path / "a.onnx")
    read = read_model(tmp_path / "a.onnx")
    assert len(PASS.run(read, find_target("qnn-htp"))) == 1
