"""A weight and its transpose are stored once, and nothing transposes it at run time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import check, in_if, ops, parse
from onnx import numpy_helper

from sanitize import graph as graphs
from sanitize.model_file import read_model
from sanitize.passes.transposed import PASS
from sanitize.target import find_target

WORDS, WIDTH = 300, 64
TABLE = np.random.default_rng(0).normal(size=(WORDS, WIDTH)).astype(np.float32)


def model(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    made = parse(text)
    made.graph.initializer.extend(numpy_helper.from_array(np.ascontiguousarray(w), n) for n, w in weights.items())
    return made


def tied(rank2: bool, head: np.ndarray = TABLE.T) -> onnx.ModelProto:
    dims = "7" if rank2 else "1,7"
    return model(
        f"g (int64[{dims}] ids) => (float[{dims},{WORDS}] y) {{"
        " x = Gather(table, ids) a = Tanh(x) y = MatMul(a, head) }",
        table=TABLE, head=head,
    )  # fmt: skip


def test_tied_head(tmp_path: Path) -> None:
    after = check(tied(True), PASS, tmp_path / "2", changes=1)
    assert ops(after) == ["Gather", "Tanh", "Gemm"]
    assert (tmp_path / "2" / "plain" / "after.onnx.data").stat().st_size == TABLE.nbytes
    after = check(tied(False), PASS, tmp_path / "3", changes=1)
    assert ops(after) == ["Gather", "Tanh", "Reshape", "Gemm", "Reshape"]


def test_order_of_the_two_is_no_matter(tmp_path: Path) -> None:
    turned = tied(True)
    tensors = list(turned.graph.initializer)
    del turned.graph.initializer[:]
    turned.graph.initializer.extend(reversed(tensors))
    assert ops(check(turned, PASS, tmp_path, changes=1)) == ["Gather", "Tanh", "Gemm"]


@pytest.mark.parametrize("index", [0, 5000, WORDS * WIDTH - 1])
def test_one_bit_makes_a_difference(tmp_path: Path, index: int) -> None:
    other = np.ascontiguousarray(TABLE.T)
    other.view(np.uint32).reshape(-1)[index] ^= 1
    check(tied(True, other), PASS, tmp_path, changes=0)


def test_square_weights(tmp_path: Path) -> None:
    square = np.random.default_rng(1).normal(size=(130, 130)).astype(np.float32)
    text = "g (float[2,130] x) => (float[2,130] y) { a = MatMul(x, v) b = Gemm<transB=1>(a, w) y = Gemm(b, v) }"
    after = check(model(text, v=square, w=square.T), PASS, tmp_path, changes=1)
    assert len(after.graph.initializers) == 1
    text = "g (float[2,130] x) => (float[2,130] y) { a = MatMul(x, v) y = MatMul(a, w) }"
    check(model(text, v=square, w=square[::-1]), PASS, tmp_path / "b", changes=0)


def test_transpose_of_a_weight(tmp_path: Path) -> None:
    text = f"g (float[3,{WIDTH}] x) => (float[3,{WORDS}] y) {{ t = Transpose<perm=[1,0]>(table) y = MatMul(x, t) }}"
    assert ops(check(model(text, table=TABLE), PASS, tmp_path, changes=1)) == ["Gemm"]
    text = f"g (float[b,3,{WIDTH}] x) => (float[b,3,{WORDS}] y) {{ t = Transpose<perm=[1,0]>(table) y = MatMul(x, t) }}"
    assert ops(check(model(text, table=TABLE), PASS, tmp_path / "b", changes=1)) == ["Reshape", "Gemm", "Reshape"]


def test_other_users_keep_the_copy(tmp_path: Path) -> None:
    text = (
        f"g (float[3,{WIDTH}] x) => (float[3,{WORDS}] y, float[{WIDTH},{WORDS}] z) {{ y = MatMul(x, head) z = Neg(head)"
    )
    both = model(text + " n = Neg(table) }", table=TABLE, head=TABLE.T)
    check(both, PASS, tmp_path, changes=0)


def test_each_branch_of_an_if_shares_its_own(tmp_path: Path) -> None:
    onnx.save(in_if(tied(True)), tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert len(PASS.run(loaded, find_target("qnn-htp"))) == 2
    assert [len(graph.initializers) for graph in graphs.every_graph(loaded)] == [0, 1, 1]
