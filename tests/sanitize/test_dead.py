"""What no output needs goes: nodes, initializers, optional outputs, in every graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from graphs import check, ops, parse, run
from onnx import helper

from sanitize.model_file import read_model, write_model
from sanitize.passes.dead import PASS
from sanitize.target import find_target

TARGET = find_target("qnn-htp")


def test_chains_and_their_weights(tmp_path: Path) -> None:
    model = parse("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[2] u = {3, 4}> {"
                  "a = Add(x, w) b = Neg(a) c = Exp(b) y = Neg(x) }")  # fmt: skip
    after = check(model, PASS, tmp_path, changes=5)
    assert ops(after) == ["Neg"] and not after.graph.initializers


def test_needed_nodes_stay(tmp_path: Path) -> None:
    check(parse("g (float[2] x) => (float[2] y, float[2] a) <float[2] w = {1, 2}> { a = Add(x, w) y = Neg(a) }"),
          PASS, tmp_path, changes=0)  # fmt: skip


def test_unused_optional_outputs(tmp_path: Path) -> None:
    model = parse("g (float[1,2,8] x) => (float[1,2,4] y) { y, indices = MaxPool<kernel_shape=[2], strides=[2]>(x) }")
    after = check(model, PASS, tmp_path, changes=1)
    assert [len(node.outputs) for node in after.graph] == [1]


def test_an_optional_output_in_the_middle(tmp_path: Path) -> None:
    shapes = {"w": (1, 16, 3), "r": (1, 16, 4)}
    tensors = [onnx.numpy_helper.from_array(np.full(s, 0.1, np.float32), n) for n, s in shapes.items()]
    node = helper.make_node("LSTM", ["x", "w", "r"], ["seq", "h", "c"], "lstm", hidden_size=4)
    info = lambda name, shape: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "g", [info("x", [5, 1, 3])], [info("c", [1, 1, 4])], tensors)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    after = check(model, PASS, tmp_path, changes=2)
    assert [value.name for value in after.graph[0].outputs] == ["", "", "c"]


def test_two_of_a_split_stay(tmp_path: Path) -> None:
    check(parse("g (float[4] x) => (float[2] a) { a, b = Split<num_outputs=2>(x) }"), PASS, tmp_path, changes=0)


def test_what_a_dead_if_reads(tmp_path: Path) -> None:
    out = helper.make_tensor_value_info("o", onnx.TensorProto.FLOAT, [2])
    body = helper.make_graph([helper.make_node("Add", ["outer", "w"], ["o"], "add")], "body", [], [out])
    model = parse("g (float[2] x, bool b) => (float[2] y) <float[2] w = {1, 2}> { outer = Exp(x) y = Neg(x) }")
    model.graph.node.append(helper.make_node("If", ["b"], ["z"], "if", then_branch=body, else_branch=body))
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert len(PASS.run(loaded, TARGET)) == 3 and PASS.run(loaded, TARGET) == []
    assert ops(loaded) == ["Neg"] and not loaded.graph.initializers
    write_model(loaded, tmp_path / "b.onnx")
    feeds = {"x": np.ones(2, np.float32), "b": np.array(True)}
    assert (run(tmp_path / "b.onnx", feeds)["y"] == -1).all()
