"""Sibling linear layers merge into one and come apart again; weights in files are copied only where they must be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import check, ops, run, with_weights

from sanitize.model_file import read_model, write_model
from sanitize.passes.merge_projections import PASS as MERGE
from sanitize.passes.split_projections import PASS as SPLIT
from sanitize.target import find_target

GEMMS = """g (float[3, 8] x) => (float[3, 6] q, float[3, 2] k, float[3, 2] v) {
  q = Gemm <transB = 1> (x, wq, bq)  k = Gemm <transB = 1> (x, wk, bk)  v = Gemm <transB = 1> (x, wv, bv)
}"""
GEMM_SHAPES = {"wq": (6, 8), "bq": (6,), "wk": (2, 8), "bk": (1, 2), "wv": (2, 8), "bv": (2,)}
MATMULS = """g (float[N, 3, 8] x) => (float[N, 3, 6] y) {
  g = MatMul (x, wg)  u = MatMul (x, wu)  s = Sigmoid (g)  y = Mul (s, u)
}"""


def test_projections_merge(tmp_path: Path) -> None:
    after = check(with_weights(GEMMS, **GEMM_SHAPES), MERGE, tmp_path, changes=1)
    assert ops(after) == ["Gemm", "Split"]
    assert sorted(tuple(v.shape) for v in after.graph.initializers.values()) == [(3,), (10,), (10, 8)]


def test_columns_merge_with_any_number_of_rows(tmp_path: Path) -> None:
    after = check(with_weights(MATMULS, wg=(8, 6), wu=(8, 6)), MERGE, tmp_path, changes=1)
    assert ops(after) == ["MatMul", "Split", "Sigmoid", "Mul"]


def test_merged_projections_come_apart(tmp_path: Path) -> None:
    for text, shapes in ((GEMMS, GEMM_SHAPES), (MATMULS, {"wg": (8, 6), "wu": (8, 6)})):
        folder = tmp_path / str(len(shapes))
        check(with_weights(text, **shapes), MERGE, folder, changes=1)
        merged = onnx.load(folder / "plain" / "after.onnx")
        after = check(merged, SPLIT, folder / "back", changes=1)
        assert sorted(ops(after)) == sorted(ops(with_weights(text, **shapes)))
        sizes = sorted(int(np.prod(tuple(v.shape))) for v in after.graph.initializers.values())
        assert sizes == sorted(int(np.prod(shape)) for shape in shapes.values())


MERGE_LOOK_ALIKES = {
    "another input": ("g (float[3, 8] x, float[3, 8] z) => (float[3, 6] a, float[3, 6] b) "
                      "{ a = MatMul (x, w) b = MatMul (z, v) }", {"w": (8, 6), "v": (8, 6)}),
    "rows and columns": ("g (float[3, 8] x) => (float[3, 6] a, float[3, 6] b) "
                         "{ a = MatMul (x, w) b = Gemm <transB = 1> (x, v) }", {"w": (8, 6), "v": (6, 8)}),
    "one has a bias": ("g (float[3, 8] x) => (float[3, 6] a, float[3, 6] b) "
                       "{ a = Gemm (x, w, c) b = Gemm (x, v) }", {"w": (8, 6), "v": (8, 6), "c": (6,)}),
    "a shared weight": ("g (float[3, 8] x) => (float[3, 6] a, float[3, 6] b, float[8, 6] c) "
                        "{ a = MatMul (x, w) b = MatMul (x, v) c = Neg (w) }", {"w": (8, 6), "v": (8, 6)}),
    "the same weight": ("g (float[3, 8] x) => (float[3, 6] a, float[3, 6] b) "
                        "{ a = MatMul (x, w) b = MatMul (x, w) }", {"w": (8, 6)}),
}  # fmt: skip
SPLIT_TEXT = "g (float[3, 8] x) => (float[3, 4] a, float[3, 2] b) { m = MatMul (x, w) a, b = Split <axis = -1> (m, s) }"


@pytest.mark.parametrize("case", MERGE_LOOK_ALIKES)
def test_no_siblings_stay(tmp_path: Path, case: str) -> None:
    text, shapes = MERGE_LOOK_ALIKES[case]
    check(with_weights(text, **shapes), MERGE, tmp_path, changes=0)


SPLITS = {
    "uneven": ("g (float[3, 8] x) => (float[3, 4] a, float[3, 1] b) "
               "{ m = Gemm <transB = 1> (x, w, c) s = Constant <value = int64[2] {4, 1}> ()"
               " a, b = Split <axis = 1> (m, s) }", {"w": (5, 8), "c": (1, 5)}),
    "a number of parts": ("g (float[3, 8] x) => (float[3, 2] a, float[3, 2] b, float[3, 1] c) "
                          "{ m = MatMul (x, w) a, b, c = Split <axis = -1, num_outputs = 3> (m) }", {"w": (8, 5)}),
}  # fmt: skip
HALVES = "m = MatMul (x, w) a, b = Split <axis = -1, num_outputs = 2> (m)"
IO = "(float[3, 8] x) => (float[3, 2] a, float[3, 2] b"
SPLIT_LOOK_ALIKES = {
    "another reader": (f"g {IO}, float[3, 4] n) {{ {HALVES} n = Neg (m) }}", {"w": (8, 4)}),
    "an output": (f"g {IO}, float[3, 4] m) {{ {HALVES} }}", {"w": (8, 4)}),
    "another axis": ("g (float[4, 8] x) => (float[2, 4] a, float[2, 4] b) "
                     "{ m = MatMul (x, w) a, b = Split <axis = 0, num_outputs = 2> (m) }", {"w": (8, 4)}),
    "a shared weight": (f"g {IO}, float[8, 4] n) {{ {HALVES} n = Neg (w) }}", {"w": (8, 4)}),
    "no weight": (f"g {IO.replace('x)', 'x, float[8, 4] w)')}) {{ {HALVES} }}", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS)
def test_a_split_linear_layer(tmp_path: Path, case: str) -> None:
    text, shapes = SPLITS[case]
    after = check(with_weights(text, **shapes), SPLIT, tmp_path, changes=1)
    assert set(ops(after)) <= {"Gemm", "MatMul"}


@pytest.mark.parametrize("case", SPLIT_LOOK_ALIKES)
def test_other_splits_stay(tmp_path: Path, case: str) -> None:
    text, shapes = SPLIT_LOOK_ALIKES[case]
    check(with_weights(text, **shapes), SPLIT, tmp_path, changes=0)


def test_sizes_that_are_not_constant_stay(tmp_path: Path) -> None:
    text = SPLIT_TEXT.replace("(float[3, 8] x)", "(float[3, 8] x, int64[2] s)")
    feeds = {"x": np.ones((3, 8), np.float32), "s": np.array([4, 2])}
    check(with_weights(text, w=(8, 6)), SPLIT, tmp_path, feeds=feeds, changes=0)


@pytest.mark.parametrize("order", [["wq", "wk", "wv"], ["wv", "wq", "wk"]])
def test_rows_side_by_side_in_a_file_stay_there(tmp_path: Path, order: list[str]) -> None:
    """Merged and split again: the same region of the same file, whatever the order."""
    shapes = {"wq": (64, 64), "wk": (32, 64), "wv": (32, 64)}
    text = "g (float[3, 64] x) => (float[3, 64] q, float[3, 32] k, float[3, 32] v) {"
    text += "".join(f" {name[1]} = Gemm <transB = 1> (x, {name}) " for name in shapes) + "}"
    proto = with_weights(text, **{name: shapes[name] for name in order})
    onnx.save(proto, tmp_path / "a.onnx", save_as_external_data=True, location="a.bin", size_threshold=0)
    loaded = read_model(tmp_path / "a.onnx")
    MERGE.run(loaded, find_target("qnn-htp"))
    (merged,) = [v.const_value for v in loaded.graph.initializers.values() if v.dtype == ir.DataType.FLOAT]
    assert isinstance(merged, ir.ExternalTensor)
    assert (merged.offset, merged.length, tuple(merged.shape)) == (0, 128 * 64 * 4, (128, 64))
    write_model(loaded, tmp_path / "merged" / "b.onnx")
    SPLIT.run(loaded, find_target("qnn-htp"))
    parts = [v.const_value for v in loaded.graph.initializers.values()]
    assert all(isinstance(part, ir.ExternalTensor) for part in parts) and len(parts) == 3
    write_model(loaded, tmp_path / "split" / "c.onnx")
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)}
    want = run(tmp_path / "a.onnx", feeds)
    for path in ("merged/b.onnx", "split/c.onnx"):
        for name, have in run(tmp_path / path, feeds).items():
            np.testing.assert_allclose(have, want[name], rtol=1e-4, atol=1e-4)


def test_rows_apart_are_joined_when_written(tmp_path: Path) -> None:
    text = "g (float[3, 64] x) => (float[3, 64] q, float[3, 32] k) { q = MatMul (x, wq) k = MatMul (x, wk) }"
    onnx.save(with_weights(text, wq=(64, 64), wk=(64, 32)), tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    MERGE.run(loaded, find_target("qnn-htp"))
    (merged,) = [v.const_value for v in loaded.graph.initializers.values() if v.dtype == ir.DataType.FLOAT]
    assert isinstance(merged, ir.LazyTensor)
