"""Linear layers become 1x1 convolutions; what looks like one stays."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from graphs import check, ops, weights, with_weights
from onnx import TensorProto, helper

from sanitize.model_file import read_model, write_model
from sanitize.passes.linear_as_conv import PASS
from sanitize.target import find_target

LINEARS = {
    "gemm rows": ("g (float[3, 8] x) => (float[3, 6] y) { y = Gemm <transB = 1> (x, w, b) }", {"w": (6, 8), "b": (6,)}),
    "gemm": ("g (float[3, 8] x) => (float[3, 6] y) { y = Gemm (x, w, b) }", {"w": (8, 6), "b": (1, 6)}),
    "no bias": ("g (float[1, 8] x) => (float[1, 6] y) { y = Gemm <transB = 1> (x, w) }", {"w": (6, 8)}),
    "matmul": ("g (float[2, 3, 8] x) => (float[2, 3, 6] y) { y = MatMul (x, w) }", {"w": (8, 6)}),
    "add": ("g (float[1, 3, 8] x) => (float[1, 3, 6] y) { m = MatMul (x, w) y = Add (b, m) }",
            {"w": (8, 6), "b": (1, 1, 6)}),
}  # fmt: skip


@pytest.mark.parametrize("case", LINEARS)
def test_a_linear_layer(tmp_path: Path, case: str) -> None:
    text, shapes = LINEARS[case]
    after = check(with_weights(text, **shapes), PASS, tmp_path, changes=1)
    assert ops(after) == ["Reshape", "Transpose", "Conv", "Transpose", "Reshape"]
    (conv,) = [node for node in after.graph if node.op_type == "Conv"]
    assert [tuple(v.shape) for v in conv.inputs[1:]] == [(6, 8, 1, 1)] + [(6,)] * ("b" in shapes)
    assert set(after.graph.initializers) >= {v.name for v in conv.inputs[1:]}
    assert len([v for v in after.graph.initializers.values() if v.dtype == ir.DataType.FLOAT]) == len(shapes)


MLP = """g (float[2, 3, 8] x) => (float[2, 3, 8] y) {
  g = MatMul (x, wg)  u = MatMul (x, wu)  s = Sigmoid (g)  a = Mul (g, s)  h = Mul (a, u)  y = MatMul (h, wd)
}"""


def test_neighbours_share_their_layout(tmp_path: Path) -> None:
    after = check(with_weights(MLP, wg=(8, 6), wu=(8, 6), wd=(6, 8)), PASS, tmp_path, changes=3)
    kinds = ["Conv"] * 3 + ["Mul"] * 2 + ["Reshape"] * 2 + ["Sigmoid"] + ["Transpose"] * 2
    assert sorted(ops(after)) == kinds
    assert len([v for v in after.graph.initializers.values() if v.dtype == ir.DataType.INT64]) == 2


def test_an_inner_value_may_be_an_output(tmp_path: Path) -> None:
    text = MLP.replace("(float[2, 3, 8] y)", "(float[2, 3, 8] y, float[2, 3, 6] g, float[2, 3, 6] a)")
    after = check(with_weights(text, wg=(8, 6), wu=(8, 6), wd=(6, 8)), PASS, tmp_path)
    assert ops(after).count("Transpose") == 4


def test_what_reads_something_else_stays_outside(tmp_path: Path) -> None:
    text = """g (float[3, 8] x, float[3, 6] r, float[1, 6] row) => (float[3, 6] y, float[3, 6] z, float[1, 3, 6] c) {
      a = MatMul (x, w)  y = Add (a, r)  z = Mul (a, row)
      one = Constant <value = float[1, 1, 1] {2.0}> ()  c = Mul (a, one)
    }"""
    after = check(with_weights(text, w=(8, 6)), PASS, tmp_path, changes=1)
    assert ops(after).count("Transpose") == 2


def test_constants_of_one_element_go_along(tmp_path: Path) -> None:
    text = """g (float[3, 8] x) => (float[3, 6] y) {
      a = MatMul (x, w)  half = Constant <value = float {0.5}> ()  low = Constant <value = float {-1.0}> ()
      b = Mul (a, half)  c = Clip (b, low)  d = Gelu <approximate = "tanh"> (c)  y = MatMul (d, v)
    }"""
    after = check(with_weights(text, w=(8, 5), v=(5, 6)), PASS, tmp_path, changes=2)
    assert ops(after).count("Transpose") == 2
    (gelu,) = [node for node in after.graph if node.op_type == "Gelu"]
    assert gelu.attributes["approximate"].value == "tanh"


LOOK_ALIKES = {
    "scaled": ("g (float[3, 8] x) => (float[3, 6] y) { y = Gemm <alpha = 2.0> (x, w) }", {"w": (8, 6)}),
    "transposed input": ("g (float[8, 3] x) => (float[3, 6] y) { y = Gemm <transA = 1> (x, w) }", {"w": (8, 6)}),
    "bias a row": ("g (float[3, 8] x) => (float[3, 6] y) { y = Gemm (x, w, b) }", {"w": (8, 6), "b": (3, 1)}),
    "batched": ("g (float[2, 3, 8] x) => (float[2, 3, 6] y) { y = MatMul (x, w) }", {"w": (2, 8, 6)}),
    "vector": ("g (float[8] x) => (float[6] y) { y = MatMul (x, w) }", {"w": (8, 6)}),
    "weight first": ("g (float[8, 6] x) => (float[3, 6] y) { y = MatMul (w, x) }", {"w": (3, 8)}),
    "no weight": ("g (float[3, 8] x, float[8, 6] w) => (float[3, 6] y) { y = MatMul (x, w) }", {}),
    "rows unknown": ("g (float[N, 8] x) => (float[N, 6] y) { y = MatMul (x, w) }", {"w": (8, 6)}),
}


@pytest.mark.parametrize("case", LOOK_ALIKES)
def test_look_alikes_stay(tmp_path: Path, case: str) -> None:
    text, shapes = LOOK_ALIKES[case]
    check(with_weights(text, **shapes), PASS, tmp_path, changes=0)


def test_an_add_of_no_bias_stays(tmp_path: Path) -> None:
    text = "g (float[3, 8] x) => (float[3, 6] y) { m = MatMul (x, w) y = Add (m, b) }"
    for shape in ((3, 6), (3, 1), (6,)):
        after = check(with_weights(text, w=(8, 6), b=shape), PASS, tmp_path / str(len(shape)), changes=1)
        assert ("Add" in ops(after)) == (shape != (6,)), shape


def test_a_weight_in_a_file_stays_there(tmp_path: Path) -> None:
    """Rows are the convolution's order: no copy, also beside another user of the same weight."""
    node = lambda op, name, ins, out, **a: helper.make_node(op, ins, [out], name, **a)
    shape = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node("Gather", "embed", ["w", "ids"], "h"), node("Gemm", "head", ["h", "w"], "y", transB=1)], "g",
        [shape("ids", TensorProto.INT64, [3])], [shape("y", TensorProto.FLOAT, [3, 64])], weights(w=(64, 32)),
    )  # fmt: skip
    proto = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    after = check(proto, PASS, tmp_path)
    onnx.save(proto, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    PASS.run(loaded, find_target("qnn-htp"))
    table, conv = (loaded.graph.initializers[name].const_value for name in ("w", "w_conv"))
    assert isinstance(table, ir.ExternalTensor) and isinstance(conv, ir.ExternalTensor)
    assert (table.offset, table.length) == (conv.offset, conv.length)
    write_model(loaded, tmp_path / "out" / "b.onnx")
    assert (tmp_path / "out" / "b.onnx.data").stat().st_size == 64 * 32 * 4
    assert {v.name for v in after.graph.initializers.values() if v.dtype == ir.DataType.FLOAT} == {"w", "w_conv"}


def test_one_weight_used_twice_is_turned_once(tmp_path: Path) -> None:
    text = "g (float[3, 8] x, float[2, 8] z) => (float[3, 8] y, float[2, 8] v) { y = MatMul (x, w) v = MatMul (z, w) }"
    after = check(with_weights(text, w=(8, 8)), PASS, tmp_path, changes=2)
    assert len([v for v in after.graph.initializers.values() if v.dtype == ir.DataType.FLOAT]) == 1
