"""allowzero=1: cleared where no 0 is possible, an error that names the node where one is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import check, ops, parse
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from ringstep.errors import RingstepError
from sanitize.graph import array, attribute
from sanitize.model_file import read_model
from sanitize.passes import Change
from sanitize.passes.fold import known_values
from sanitize.passes.reshape_allowzero import PASS
from sanitize.target import find_target

COMPUTED = {
    "concat of shape and constants": "s = Shape(x) a = Gather(s, zero) t = Concat<axis=0>(a, c12)",
    "slice": "s = Shape(x) a = Slice(s, zero, one) t = Concat<axis=0>(a, c12)",
    "shape with start and end": "a = Shape<start=0, end=1>(x) t = Concat<axis=0>(a, c12)",
    "negative start": "a = Shape<start=-2, end=-1>(x) b = Sub(a, one) t = Concat<axis=0>(b, c12)",
    "product": "s = Shape(x) a = Gather(s, one) b = Gather(s, two) p = Mul(a, b) t = Concat<axis=0>(two, p)",
    "scalar index": "s = Shape(x) i = Squeeze(zero) a = Gather(s, i) u = Unsqueeze(a, zero) t = Concat<axis=0>(u, c12)",
    "quotient": "s = Shape(x) a = Gather(s, two) b = Div(a, two) t = Concat<axis=0>(b, c_1)",
    "through int32": "s = Shape(x) i = Cast<to=6>(s) j = Cast<to=7>(i) a = Gather(j, zero) t = Concat<axis=0>(a, c12)",
}
CONSTANTS = "<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] c12 = {12}, int64[1] c_1 = {-1}>"


def reshapes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Reshape"]


def test_constant(tmp_path: Path) -> None:
    text = "g (float[2,3,4] x) => (float[2,12] y) { s = Constant<value_ints=[2,-1]>() y = Reshape<allowzero=1>(x, s) }"
    after = check(parse(text), PASS, tmp_path, changes=1)
    assert attribute(reshapes(after)[0], "allowzero", 0) == 0


@pytest.mark.parametrize("form", COMPUTED)
def test_computed(tmp_path: Path, form: str) -> None:
    text = f"g (float[2,3,4] x) => (float[?,?] y) {CONSTANTS} {{ {COMPUTED[form]} y = Reshape<allowzero=1>(x, t) }}"
    after = check(parse(text), PASS, tmp_path, changes=1)
    assert array(reshapes(after)[0].inputs[1]) is not None


def test_a_shape_nobody_can_follow_is_taken_from_inference(tmp_path: Path) -> None:
    text = "g (float[2,3,4] x, int64[2] t) => (float[4,6] y) { y = Reshape<allowzero=1>(x, t) }"
    after = check(parse(text), PASS, tmp_path, feeds={"x": np.ones((2, 3, 4), np.float32), "t": np.array([4, 6])})
    assert array(reshapes(after)[0].inputs[1]).tolist() == [4, 6]


def test_without_the_attribute(tmp_path: Path) -> None:
    text = "g (float[2,3,4] x) => (float[2,12] y) <int64[2] s = {0,12}> { y = Reshape(x, s) }"
    check(parse(text), PASS, tmp_path, changes=0)


def refused(tmp_path: Path, text: str, target: str = "qnn-htp") -> list[Change]:
    onnx.save(parse(text), tmp_path / "a.onnx")
    return PASS.run(read_model(tmp_path / "a.onnx"), find_target(target))


DYNAMIC = """g (float[N,3,4] x) => (float[M,12] y) <int64[1] c12 = {12}> {
    a = Shape<start=0, end=1>(x) t = Concat<axis=0>(a, c12) [around] y = Reshape<allowzero=1>(x, t) }"""
EMPTY = "g (float[0,3] x) => (float[0,7] y) <int64[2] s = {0,7}> { [around] y = Reshape<allowzero=1>(x, s) }"


@pytest.mark.parametrize(("text", "why"), [(DYNAMIC, "fixed input shapes"), (EMPTY, r"\[0, 7\] holds a 0")])
def test_what_cannot_be_proved_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(RingstepError, match=f"around.*{why}"):
        refused(tmp_path, text)
    assert refused(tmp_path, text, "ort-mobile") == []


def test_two_readers_share_the_folded_parts(tmp_path: Path) -> None:
    text = f"""g (float[2,3,4] x) => (float[2,12] y, int64[2] t) {CONSTANTS} {{
        s = Shape(x) a = Gather(s, zero) t = Concat<axis=0>(a, c12) y = Reshape<allowzero=1>(x, t) }}"""
    after = check(parse(text), PASS, tmp_path, changes=1)
    assert ops(after) == ["Shape", "Gather", "Concat", "Reshape"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.data())
def test_the_numbers_are_those_of_onnx(dims: list[int], data: st.DataObject) -> None:
    index = st.integers(-len(dims), len(dims) - 1)
    i, j = data.draw(index), data.draw(index)
    start, end, step = data.draw(st.integers(-7, 7)), data.draw(st.integers(-7, 7)), data.draw(st.integers(1, 3))
    bodies = ["Concat<axis=0>(a, b, p)", "Slice(s, start, end, axis, step)", "Add(a, s)", "Mul(s, s)", "Div(s, a)",
              "Shape<start=FROM, end=TO>(x)", "Max(b, s)"]  # fmt: skip
    body = data.draw(st.sampled_from(bodies))
    text = f"""g (float[{",".join(map(str, dims))}] x) => (int64[N] t) <int64[1] i = {{{i}}}, int64[1] j = {{{j}}},
        int64[1] start = {{{start}}}, int64[1] end = {{{end}}}, int64[1] axis = {{0}}, int64[1] step = {{{step}}}> {{
        s = Shape(x) a = Gather(s, i) b = Gather(s, j) p = Sub(a, b)
        t = {body.replace("FROM", str(i)).replace("TO", str(j))} }}"""
    model = parse(text)
    loaded = ir.serde.deserialize_model(model)
    have = known_values(loaded)[0].get(loaded.graph.outputs[0])
    want = ReferenceEvaluator(model).run(None, {"x": np.zeros(dims, np.float32)})[0]
    assert have is not None and have.tolist() == want.tolist()
