"""Dynamic dims by name: fixed in every input, inferred behind, verified against the dynamic original."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import parse

from ringstep.errors import RingstepError
from sanitize.command import sanitize_file
from sanitize.fix_dims import fix_dims, parse_dims
from sanitize.model_file import read_model

TEXT = """g (float[batch,n,8] x, float[n,4] p) => (float[batch,n,12] y, int64[3] s) {
  t = Shape(x)
  s = Identity(t)
  r = Reshape(x, t)
  d = Concat<axis=0>(one, t2)
  e = Expand(p, d)
  y = Concat<axis=2>(r, e)
}"""


def dynamic() -> onnx.ModelProto:
    text = TEXT.replace(
        "d = Concat<axis=0>(one, t2)",
        "b = Slice(t, zero, one)\n t2 = Constant<value_ints=[1,4]>()\n"
        "n = Slice(t, one, two)\n four = Constant<value_ints=[4]>()\n d = Concat<axis=0>(b, n, four)",
    )
    head = "g (float[batch,n,8] x, float[n,4] p) => (float[batch,n,12] y, int64[3] s)"
    return parse(text.replace(head, head + " <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}>"))


def test_every_shape_becomes_static(tmp_path: Path) -> None:
    onnx.save(dynamic(), tmp_path / "a.onnx")
    model = read_model(tmp_path / "a.onnx")
    assert {c.what for c in fix_dims(model, {"batch": 1, "n": 5})} == {
        "shape fixed to [1, 5, 8]", "shape fixed to [5, 4]"
    }  # fmt: skip
    assert tuple(model.graph.outputs[0].shape or ()) == (1, 5, 12)
    assert fix_dims(read_model(tmp_path / "a.onnx"), {}) == []


def test_shape_arithmetic_goes_and_the_original_agrees(tmp_path: Path) -> None:
    onnx.save(dynamic(), tmp_path / "a.onnx")
    report = sanitize_file(tmp_path / "a.onnx", tmp_path / "b.onnx", target="qnn-htp", verify=True,
                           dims={"batch": 1, "n": 5})  # fmt: skip
    assert all(c["equal"] for c in report["verified"])
    assert "Shape" not in {node.op_type for node in read_model(tmp_path / "b.onnx").graph}


def test_mistakes_are_named(tmp_path: Path) -> None:
    onnx.save(dynamic(), tmp_path / "a.onnx")
    with pytest.raises(RingstepError, match=r"no such dim \(did you mean batch\?\); the inputs have batch, n"):
        fix_dims(read_model(tmp_path / "a.onnx"), {"bach": 1})
    for wrong in ("batch", "batch=", "batch=0", "batch=-1", "batch=1.5", "=99999999999"):
        with pytest.raises(RingstepError, match="NAME=SIZE"):
            parse_dims((wrong,))
