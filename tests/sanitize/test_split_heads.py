"""Attention is split into heads; the chain ends where heads are mixed."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import check, ops, with_weights

from sanitize.passes.split_heads import PASS

PLAIN = """g (float[1, 4, 3, 5] q, float[1, 4, 6, 5] k, float[1, 4, 6, 5] v, float[1, 1, 3, 6] mask)
           => (float[3, 20] y) {
  scale = Constant <value = float {0.25}> ()  flat = Constant <value = int64[2] {3, 20}> ()
  kt = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul (q, kt)  t = Mul (s, scale)  m = Add (t, mask)
  w = Softmax <axis = -1> (m)  o = MatMul (w, v)  c = Transpose <perm = [0, 2, 1, 3]> (o)  y = Reshape (c, flat)
}"""
CACHE = """g (float[1, 2, 6, 5] q, float[1, 2, 5, 4] kt, float[1, 2, 5, 2] nt, float[1, 2, 4, 5] v,
           float[1, 2, 2, 5] nv, float[1, 1, 2, 6] mask) => (float[6, 2, 5] y) {
  a = MatMul (q, kt)  b = MatMul (q, nt)
  four = Constant <value = int64[4] {2, 3, 2, -1}> ()  ga = Reshape (a, four)  gb = Reshape (b, four)
  s = Concat <axis = 3> (ga, gb)  m = Add (s, mask)  w = Softmax (m)
  sizes = Constant <value = int64[2] {4, 2}> ()  wa, wb = Split <axis = -1> (w, sizes)
  back = Constant <value = int64[4] {1, 2, 6, -1}> ()  fa = Reshape (wa, back)  fb = Reshape (wb, back)
  oa = MatMul (fa, v)  ob = MatMul (fb, nv)  o = Add (oa, ob)
  out = Constant <value = int64[3] {6, 2, 5}> ()  y = Reshape (o, out)
}"""


def test_plain_attention(tmp_path: Path) -> None:
    after = check(with_weights(PLAIN), PASS, tmp_path, changes=2)
    kinds = ops(after)
    assert [kinds.count(op) for op in ("MatMul", "Softmax", "Add", "Split", "Concat")] == [8, 4, 4, 3, 1]
    assert {len(v.shape) for node in after.graph if node.op_type == "MatMul" for v in node.outputs} == {3}


def test_as_many_rows_as_heads(tmp_path: Path) -> None:
    """The shapes alone do not tell that the last Transpose mixes heads."""
    text = PLAIN.replace("float[1, 4, 3, 5] q", "float[1, 4, 4, 5] q")
    text = text.replace("1, 1, 3, 6", "1, 1, 4, 6").replace("{3, 20}", "{4, 20}").replace("[3, 20]", "[4, 20]")
    after = check(with_weights(text), PASS, tmp_path, changes=2)
    assert [node.attributes["perm"].value for node in after.graph if node.op_type == "Transpose"][-1] == (0, 2, 1, 3)


def test_grouped_queries_over_a_cache(tmp_path: Path) -> None:
    after = check(with_weights(CACHE), PASS, tmp_path, changes=4)
    kinds = ops(after)
    # q, two keys, two values are split into heads, and each head's weights at the cache's end.
    assert [kinds.count(op) for op in ("MatMul", "Softmax", "Split", "Concat")] == [8, 2, 5 + 2, 2 + 1]


@pytest.mark.parametrize("inner", ["s", "m", "o"])
def test_an_inner_value_may_be_an_output(tmp_path: Path, inner: str) -> None:
    width = 5 if inner == "o" else 6
    text = PLAIN.replace("(float[3, 20] y)", f"(float[3, 20] y, float[1, 4, 3, {width}] {inner})")
    after = check(with_weights(text), PASS, tmp_path, changes=2)
    assert ops(after).count("Concat") == 1 + (inner != "o")


SHAPES = {
    "rank 3": "g (float[4, 3, 5] q, float[4, 5, 6] k) => (float[4, 3, 6] y) { y = MatMul (q, k) }",
    "one key": "g (float[1, 4, 3, 5] q, float[1, 1, 5, 6] k) => (float[1, 4, 3, 6] y) { y = MatMul (q, k) }",
    "one matrix": "g (float[1, 4, 3, 5] q, float[5, 6] k) => (float[1, 4, 3, 6] y) { y = MatMul (q, k) }",
    "a bias for each head": """g (float[1, 4, 3, 5] q, float[1, 4, 5, 6] k, float[4, 1, 6] b) => (float[1, 4, 3, 6] y)
                               { s = MatMul (q, k) y = Add (b, s) }""",
    "min and max": """g (float[1, 4, 3, 5] q, float[1, 4, 5, 6] k) => (float[1, 4, 3, 6] y)
                      { top = Constant <value = float {1.0}> () s = MatMul (q, k) y = Clip (s, , top) }""",
    "softmax in steps": """g (float[1, 4, 3, 5] q, float[1, 4, 5, 6] k) => (float[1, 4, 3, 6] y) {
                          last = Constant <value = int64[1] {3}> () s = MatMul (q, k) top = ReduceMax (s, last)
                          d = Sub (s, top) e = Exp (d) sum = ReduceSum (e, last) y = Div (e, sum) }""",
    "twice the same": "g (float[1, 4, 5, 5] q) => (float[1, 4, 5, 5] y) { y = MatMul (q, q) }",
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(tmp_path: Path, case: str) -> None:
    after = check(with_weights(SHAPES[case]), PASS, tmp_path, changes=1)
    kinds = ops(after)
    assert kinds.count("MatMul") == 4
    assert kinds.count("Concat") == 1  # nothing between is put together


def test_the_chain_ends_where_heads_mix(tmp_path: Path) -> None:
    text = """g (float[1, 4, 3, 5] q, float[1, 4, 5, 4] k) =>
      (float[1, 4, 3, 4] a, float[1, 1, 3, 4] b, float[1, 8, 3, 4] c, float[3, 1, 4, 4] d, float[4, 4, 3, 4] e,
       float[1, 4, 3, 7] f, float[1, 2, 3, 4] g1, float[1, 2, 3, 4] g2) {
      s = MatMul (q, k)  a = Softmax <axis = 1> (s)
      one = Constant <value = int64[1] {1}> ()  b = ReduceSum (s, one)  c = Concat <axis = 1> (s, s)
      d = Transpose <perm = [2, 0, 1, 3]> (s)  big = Constant <value = float[4, 1, 1, 1] {1.0, 2.0, 3.0, 4.0}> ()
      e = Add (s, big)  f = MatMul (s, w)  g1, g2 = Split <axis = 1, num_outputs = 2> (s)
    }"""
    after = check(with_weights(text, w=(4, 7)), PASS, tmp_path, changes=1)
    kinds = ops(after)
    assert [kinds.count(op) for op in ("MatMul", "Softmax", "ReduceSum", "Transpose", "Add")] == [5, 1, 1, 1, 1]


LOOK_ALIKES = {
    "two batches": "g (float[2, 4, 3, 5] q, float[2, 4, 5, 6] k) => (float[2, 4, 3, 6] y) { y = MatMul (q, k) }",
    "one head": "g (float[1, 1, 3, 5] q, float[1, 1, 5, 6] k) => (float[1, 1, 3, 6] y) { y = MatMul (q, k) }",
    "no batch": "g (float[3, 5] q, float[5, 6] k) => (float[3, 6] y) { y = MatMul (q, k) }",
    "unknown rows": "g (float[1, 4, N, 5] q, float[1, 4, 5, 6] k) => (float[1, 4, N, 6] y) { y = MatMul (q, k) }",
}


@pytest.mark.parametrize("case", LOOK_ALIKES)
def test_look_alikes_stay(tmp_path: Path, case: str) -> None:
    check(with_weights(LOOK_ALIKES[case]), PASS, tmp_path, changes=0)


def test_a_linear_layer_stays(tmp_path: Path) -> None:
    text = "g (float[4, 3, 5] x) => (float[4, 3, 6] y) { y = MatMul (x, w) }"
    check(with_weights(text, w=(5, 6)), PASS, tmp_path, changes=0)
