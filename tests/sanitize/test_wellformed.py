"""What is refused of a file before any pass sees it, in one line that names the node; what is let through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import parse, random_feeds, run
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

from ringstep.errors import RingstepError
from sanitize.command import sanitize_file
from sanitize.model_file import read_model

MODEL = """
g (float[2,3] x, bool c) => (float[2,3] y) <float[3] w = {1, 2, 3}> {
  a = Mul(x, w)
  p = Transpose <perm = [1, 0]> (a)
  q = Transpose <perm = [1, 0]> (p)
  y = If (c) <then_branch = t () => (float[2,3] b) { b = Exp(q) }, else_branch = e () => (float[2,3] d) { d = Neg(q) }>
}
"""


def scan(version: int) -> ModelProto:
    """A running sum, over the first dim (of each batch, before opset 9)."""
    body = parse("g (float[2] s, float[2] v) => (float[2] t, float[2] o) { t = Add(s, v) o = Identity(t) }").graph
    batch = [1] if version < 9 else []
    inputs = [helper.make_tensor_value_info("s0", TensorProto.FLOAT, [*batch, 2]),
              helper.make_tensor_value_info("x", TensorProto.FLOAT, [*batch, 3, 2])]  # fmt: skip
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*batch, 2]),
               helper.make_tensor_value_info("ys", TensorProto.FLOAT, [*batch, 3, 2])]  # fmt: skip
    names = ["", "s0", "x"] if batch else ["s0", "x"]
    node = helper.make_node("Scan", names, ["y", "ys"], body=body, num_scan_inputs=1)
    return helper.make_model(helper.make_graph([node], "g", inputs, outputs), ir_version=8,
                             opset_imports=[helper.make_opsetid("", version)])  # fmt: skip


def spoil_text(model: ModelProto) -> ModelProto:
    raw = model.SerializeToString().replace(b"Transpose", b"Trans\xff\xffse")
    return ModelProto.FromString(raw)


def drop_input(model: ModelProto) -> None:
    del model.graph.node[0].input[1]


def leave_out_input(model: ModelProto) -> None:
    model.graph.node[0].input[0] = ""


def add_output(model: ModelProto) -> None:
    model.graph.node[1].output.append("more")


def wrong_kind(model: ModelProto) -> None:
    model.graph.node[1].attribute[0].CopyFrom(helper.make_attribute("perm", "10"))


def twice(model: ModelProto) -> None:
    model.graph.node[1].attribute.append(model.graph.node[1].attribute[0])


def no_else(model: ModelProto) -> None:
    del model.graph.node[3].attribute[1]


def short_body(model: ModelProto) -> None:
    del model.graph.node[3].attribute[0].g.output[:]


def returns_outer(model: ModelProto) -> None:
    model.graph.node[3].attribute[0].g.output[0].name = "q"


def no_import(model: ModelProto) -> None:
    del model.opset_import[:]


def negative_version(model: ModelProto) -> None:
    model.opset_import[0].version = -1


def two_inputs(model: ModelProto) -> None:
    model.graph.input.append(model.graph.input[0])


def two_tensors(model: ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def no_name(model: ModelProto) -> None:
    model.graph.initializer[0].name = ""


def short_tensor(model: ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 4


def negative_tensor(model: ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [-1, -3]


def huge_tensor(model: ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [0, 1 << 62, 1 << 62]


def no_type(model: ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


def strings_elsewhere(model: ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(TensorProto(name="w", dims=[3], data_type=TensorProto.STRING, data_location=TensorProto.EXTERNAL))


def sparse_attribute(model: ModelProto) -> None:
    sparse = onnx.SparseTensorProto(values=numpy_helper.from_array(np.ones(1, np.float32)), dims=[3],
                                    indices=numpy_helper.from_array(np.zeros(1, np.int64)))  # fmt: skip
    model.graph.node.insert(0, helper.make_node("Constant", [], ["sparse"], sparse_value=sparse))


def sparse_initializer(model: ModelProto) -> None:
    model.graph.sparse_initializer.add().values.name = "s"


def empty_attribute(model: ModelProto) -> None:
    model.graph.node.insert(0, helper.make_node("Constant", [], ["nothing"]))
    model.graph.node[0].attribute.add(name="value", type=AttributeProto.TENSOR)


def elsewhere(**places: str) -> Callable[[ModelProto], None]:
    def spoil(model: ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.CopyFrom(TensorProto(name="w", dims=[3], data_type=1, data_location=TensorProto.EXTERNAL))
        for key, value in places.items():
            tensor.external_data.add(key=key, value=value)

    return spoil


def microsoft(model: ModelProto) -> None:
    model.graph.node[0].op_type, model.graph.node[0].domain = "SkipLayerNormalization", "com.microsoft"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_input, "node 'Mul' (Mul): has 1 inputs, its operator takes 2"), (leave_out_input, "input 0 is left out"),
        (add_output, "has 2 outputs, its operator takes 1"), (wrong_kind, "'perm' is of the wrong type"),
        (twice, "the attribute 'perm' twice"), (no_else, "lacks the attribute 'else_branch'"),
        (short_body, "0 inputs and 0 outputs, where 0 and 1 belong"), (returns_outer, "put an Identity between"),
        (no_import, "imports no version"), (negative_version, "imports version -1"),
        (two_inputs, "two inputs are named 'x'"), (two_tensors, "two initializers are named 'w'"),
        (no_name, "an initializer has no name"), (short_tensor, "tensor 'w': its shape [4] is not"),
        (negative_tensor, "the shape [-1, -3]"), (huge_tensor, "which no tensor has"), (no_type, "unknown type (99)"),
        (sparse_attribute, "sparse tensors are not taken"), (sparse_initializer, "initializer 's': sparse"),
        (empty_attribute, "'value' holds nothing"),
        (elsewhere(), "which is not named"), (elsewhere(location=""), "which is not named"),
        (elsewhere(location="a", offset="-4"), "the offset '-4'"), (elsewhere(location="a", length="x"), "length 'x'"),
        (elsewhere(location="a", offset="1_0"), "offset '1_0'"), (elsewhere(location="."), "is a folder"),
        (elsewhere(location="a\0b"), "cannot be read: embedded null byte"),
        (elsewhere(location="loop"), "cannot be read"),
        (strings_elsewhere, "its strings lie in another file"), (microsoft, "has 2 inputs, its operator takes 3 or"),
    ],
)  # fmt: skip
def test_what_no_operator_takes_is_refused(spoil: Callable[[ModelProto], None], words: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    model = parse(MODEL)
    spoil(model)
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(RingstepError) as refused:
        read_model(tmp_path / "a.onnx")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(spoil_text(parse(MODEL)).SerializeToString())
    with pytest.raises(RingstepError, match="no text; the file is damaged"):
        read_model(tmp_path / "a.onnx")


def test_a_call_that_leaves_out_what_its_function_needs(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "f" : 1]>
    g (float[2] x) => (float[2] y) { y = f.gate(x, ) }
    <domain: "f", opset_import: ["" : 21]> gate (a, b) => (c) { s = Sigmoid(b) c = Mul(a, s) }"""
    model = onnx.parser.parse_model(text.replace("(x, )", "(x, x)"))
    model.graph.node[0].input[1] = ""
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(RingstepError, match="node 'Sigmoid' of a function lacks its input 0"):
        read_model(tmp_path / "a.onnx")


def test_nothing_is_said_but_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = parse(MODEL)
    model.graph.node[0].input[1] = "nowhere"
    onnx.save(model, tmp_path / "a.onnx")
    with caplog.at_level(logging.INFO), pytest.raises(RingstepError, match="reads 'nowhere', which nothing makes"):
        read_model(tmp_path / "a.onnx")
    assert not caplog.records


def test_what_onnxs_checker_refuses_but_runtimes_take_is_read(tmp_path: Path) -> None:
    """An axis in place of a list of them, which rank0 mends; an operator newer than the model; no bytes of a blob."""
    model = parse("""<ir_version: 7, opset_import: ["" : 12, "own" : 1]>
    g (float[2,3] x) => (float[2,3] y) <float[3] w = {1, 2, 3}> {
      m = ReduceMean <axes = 1> (x)
      a = Sub(x, m)
      n = LayerNormalization (a, w)
      y = own.Context(n)
    }""")
    model.graph.node[3].attribute.append(AttributeProto(name="blob", type=AttributeProto.STRING, s=b"\xff\x00\xfe"))
    onnx.save(model, tmp_path / "a.onnx")
    read = read_model(tmp_path / "a.onnx")
    assert [node.op_type for node in read.graph] == ["ReduceMean", "Sub", "LayerNormalization", "Context"]


def test_a_dim_of_minus_one_is_open(tmp_path: Path) -> None:
    model = parse("""g (float[N,4] x) => (float[M] y) <int64[1] minus = {-1}> {
      s = Shape(x)
      n = ReduceProd <keepdims = 1> (s)
      y = Reshape(x, n)
    }""")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    onnx.save(model, tmp_path / "a.onnx")
    sanitize_file(tmp_path / "a.onnx", tmp_path / "b.onnx", target="xnnpack")
    feeds = {"x": np.ones((3, 4), np.float32)}
    np.testing.assert_array_equal(run(tmp_path / "b.onnx", feeds)["y"], run(tmp_path / "a.onnx", feeds)["y"])


@pytest.mark.parametrize("target", ["qnn-htp", "xnnpack"])
def test_strings_stay(target: str, tmp_path: Path) -> None:
    words = numpy_helper.from_array(np.array(["a", "b"] * 400, object), "w")
    model = parse("g (string[800] x) => (bool[800] y, string[800] z) { y = Equal(x, w) z = Identity(w) }")
    model.graph.initializer.append(words)
    onnx.save(model, tmp_path / "a.onnx")
    sanitize_file(tmp_path / "a.onnx", tmp_path / "b.onnx", target=target)
    after = run(tmp_path / "b.onnx", {"x": np.array(["a"] * 800, object)})
    np.testing.assert_array_equal(after["y"], np.arange(800) % 2 == 0)


@pytest.mark.parametrize("version", [8, 21])
def test_scans_of_old_are_read_as_new_ones(version: int, tmp_path: Path) -> None:
    onnx.save(scan(version), tmp_path / "a.onnx")
    feeds = random_feeds(scan(version))
    sanitize_file(tmp_path / "a.onnx", tmp_path / "b.onnx", target="qnn-htp")
    for name, want in run(tmp_path / "a.onnx", feeds).items():
        np.testing.assert_array_equal(run(tmp_path / "b.onnx", feeds)[name], want)
