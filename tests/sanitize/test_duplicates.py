"""Every weight is stored once, wherever it was repeated."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from graphs import check, in_if, ops, parse, run
from onnx import numpy_helper

from sanitize import graph as graphs
from sanitize.model_file import read_model, write_model
from sanitize.passes.duplicates import PASS
from sanitize.target import find_target

TARGET = find_target("qnn-htp")
SIZE = 64
WEIGHT = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)


def twice(second: np.ndarray) -> onnx.ModelProto:
    model = parse(f"g (float[1,{SIZE}] x) => (float[1,{SIZE}] y) {{ a = MatMul(x, v) y = MatMul(a, w) }}")
    model.graph.initializer.extend([numpy_helper.from_array(WEIGHT, "v"), numpy_helper.from_array(second, "w")])
    return model


def stays(model: onnx.ModelProto, folder: Path) -> None:
    """Not in an If: the weights of its two branches are equal."""
    onnx.save(model, folder / "a.onnx")
    assert PASS.run(read_model(folder / "a.onnx"), TARGET) == []


def test_equal_weights_become_one(tmp_path: Path) -> None:
    after = check(twice(WEIGHT.copy()), PASS, tmp_path)
    assert list(after.graph.initializers) == ["v"] and ops(after) == ["MatMul", "MatMul"]
    assert (tmp_path / "plain" / "after.onnx.data").stat().st_size == WEIGHT.nbytes
    # The two branches of the If: four copies before, one after.
    assert (tmp_path / "if" / "after.onnx.data").stat().st_size == WEIGHT.nbytes


def test_one_bit_makes_a_difference(tmp_path: Path) -> None:
    for index in (0, 1000, SIZE * SIZE - 1):
        other = WEIGHT.copy()
        other.view(np.uint32).reshape(-1)[index] ^= 1
        stays(twice(other), tmp_path)


def test_types_and_shapes_are_not_mixed(tmp_path: Path) -> None:
    text = (
        "g (float[4] x, int32[4] i) => (float[4] y, int32[4] j) <float[4] a = {0,0,0,0}, int32[4] b = {0,0,0,0}> { "
        "y = Add(x, a) j = Add(i, b) }"
    )
    stays(parse(text), tmp_path)
    text = (
        "g (float[4] x) => (float[1,4] y) <float[4] a = {1,1,1,1}, float[1,4] b = {1,1,1,1}> { "
        "c = Add(x, a) y = Add(c, b) }"
    )
    stays(parse(text), tmp_path)
    text = "g (float[1] x) => (float[1] y) <float[1] a = {0.0}, float[1] b = {-0.0}> { c = Add(x, a) y = Add(c, b) }"
    stays(parse(text), tmp_path)


def test_one_place_in_a_file_needs_no_reading(tmp_path: Path) -> None:
    onnx.save(twice(WEIGHT), tmp_path / "a.onnx", save_as_external_data=True, location="a.bin", size_threshold=0)
    proto = onnx.load(tmp_path / "a.onnx", load_external_data=False)
    del proto.graph.initializer[1].external_data[:]
    proto.graph.initializer[1].external_data.extend(proto.graph.initializer[0].external_data)
    onnx.save(proto, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    os.truncate(tmp_path / "a.bin", 0)
    assert len(PASS.run(loaded, TARGET)) == 1


def test_an_overridable_initializer_stays(tmp_path: Path) -> None:
    model = parse(
        "g (float[2] x, float[2] c) => (float[2] y) <float[2] c = {1, 2}, float[2] d = {1, 2}> {"
        " a = Add(x, c) y = Add(a, d) }"
    )
    onnx.save(model, tmp_path / "a.onnx")
    assert PASS.run(read_model(tmp_path / "a.onnx"), TARGET) == []


def test_a_body_uses_what_is_outside(tmp_path: Path) -> None:
    model = in_if(twice(WEIGHT))
    model.graph.node.append(onnx.helper.make_node("MatMul", ["x", "outer"], ["z"], "z"))
    model.graph.initializer.append(numpy_helper.from_array(WEIGHT, "outer"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, [1, SIZE]))
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert len(PASS.run(loaded, TARGET)) == 4 and PASS.run(loaded, TARGET) == []
    assert [list(graph.initializers) for graph in graphs.every_graph(loaded)] == [["outer"], [], []]
    write_model(loaded, tmp_path / "b.onnx")
    feeds = {"x": np.ones((1, SIZE), np.float32), "choose_branch": np.array(False)}
    before, after = run(tmp_path / "a.onnx", feeds), run(tmp_path / "b.onnx", feeds)
    assert all((before[name] == after[name]).all() for name in before)
