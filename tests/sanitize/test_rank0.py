"""Scalars where lists belong. ONNX Runtime refuses most of them, so the reference is the same graph written right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import check, in_if, parse, random_feeds, run

from sanitize.graph import dims, every_node
from sanitize.model_file import read_model, write_model
from sanitize.passes import Change
from sanitize.passes.rank0 import PASS
from sanitize.target import find_target

# body, output, and how many scalars are promoted; S stands for a scalar's type and becomes int64 or int64[1].
BODIES = {
    "unsqueeze": ("y = Unsqueeze(n, one)", "float[2,1,12] y", 1),
    "squeeze": ("u = Unsqueeze(n, one) y = Squeeze(u, one)", "float[2,12] y", 2),
    "reduce": ("y = ReduceMean(n, one)", "float[2,1] y", 1),
    "reduce max": ("y = ReduceMax<keepdims=0>(n, one)", "float[2] y", 1),
    "slice": ("y = Slice(n, one, four, one, two)", "float[2,2] y", 4),
    "slice of defaults": ("y = Slice(n, one, four)", "float[1,12] y", 2),
    "top k": ("y, i = TopK(n, four)", "float[2,4] y", 1),
    "expand": ("r = ReduceSum<keepdims=0>(n, both) y = Expand(r, four)", "float[4] y", 1),
    "reshape": ("t = Mul(four, six) y = Reshape(n, t)", "float[24] y", 1),
    "computed": ("a = Mul(one, one) y = Unsqueeze(n, a)", "float[?,?,?] y", 1),
    "constant node": ("a = Constant<value = S {1}>() y = Unsqueeze(n, a)", "float[2,1,12] y", 1),
    "constant of an int": ("a = INT y = Unsqueeze(n, a)", "float[2,1,12] y", 1),
    "gathered": ("s = Shape(x) k = Gather(s, zero) y = Slice(n, one, k, zero)", "float[1,12] y", 3),
}


def model(name: str, kind: str) -> onnx.ModelProto:
    body, output, _ = BODIES[name]
    number = "<value_int = 1>" if kind == "int64" else "<value_ints = [1]>"
    body = body.replace("S {", f"{kind} {{").replace("INT", f"Constant{number}()")
    numbers = {"zero": 0, "one": 1, "two": 2, "four": 4, "six": 6}
    scalars = ", ".join(f"{kind} {name} = {{{value}}}" for name, value in numbers.items())
    return parse(f"g (float[2,12] x) => ({output}) <{scalars}, int64[2] both = {{0,1}}> {{ n = Neg(x) {body} }}")


def sanitized(proto: onnx.ModelProto, folder: Path) -> tuple[ir.Model, list[Change]]:
    onnx.save(proto, folder / "a.onnx")
    loaded = read_model(folder / "a.onnx")
    changes = PASS.run(loaded, find_target("qnn-htp"))
    assert PASS.run(loaded, find_target("qnn-htp")) == []
    write_model(loaded, folder / "b.onnx")
    onnx.checker.check_model(str(folder / "b.onnx"))
    return loaded, changes


@pytest.mark.parametrize("name", BODIES)
def test_equals_the_graph_written_right(tmp_path: Path, name: str) -> None:
    right = model(name, "int64[1]")
    feeds = random_feeds(right)
    onnx.save(right, tmp_path / "right.onnx")
    want = run(tmp_path / "right.onnx", feeds)["y"]
    _, changes = sanitized(model(name, "int64"), tmp_path)
    assert len(changes) == BODIES[name][2], changes
    np.testing.assert_array_equal(run(tmp_path / "b.onnx", feeds)["y"], want)
    branch = in_if(model(name, "int64"))
    _, inside = sanitized(branch, tmp_path)
    assert len(inside) == 2 * len(changes)
    np.testing.assert_array_equal(run(tmp_path / "b.onnx", feeds | {"choose_branch": np.array(True)})["y"], want)
    assert sanitized(right, tmp_path)[1] == []


def test_an_attribute_of_one_int(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 11]> g (float[2,12] x) => (float[2] y) {
        m = ReduceMean<axes=1, keepdims=1>(x) y = Squeeze<axes=1>(m) }"""
    loaded, changes = sanitized(parse(text), tmp_path)
    assert [change.what for change in changes] == ["the attribute axes made a list"] * 2
    x = random_feeds(parse(text))
    np.testing.assert_allclose(run(tmp_path / "b.onnx", x)["y"], x["x"].mean(1), rtol=1e-5)
    assert dims(loaded.graph.outputs[0]) == (2,)


def test_who_needs_the_scalar_keeps_it(tmp_path: Path) -> None:
    text = """g (float[3,12] x) => (float[1,12] a, float[12] b, float[3,12] c, int64 one) <int64 one = {1}> {
        n = Neg(x) u = Unsqueeze(n, one) s = Squeeze(u, one) a = Slice(s, one, two) b = Gather(s, one)
        c = CumSum(n, one) two = Add(one, one) }"""
    loaded, changes = sanitized(parse(text), tmp_path)
    assert len(changes) == 4
    x = random_feeds(parse(text))["x"]
    have = run(tmp_path / "b.onnx", {"x": x})
    np.testing.assert_array_equal(have["a"], -x[1:2])
    np.testing.assert_array_equal(have["b"], -x[1])
    np.testing.assert_allclose(have["c"], np.cumsum(-x, 1), rtol=1e-5)
    assert have["one"].shape == ()
    made = [value for value in loaded.graph.initializers.values() if value.shape is not None and len(value.shape) == 1]
    assert len(made) == 2, "one list for all readers, and the Reshape's shape"


def test_shapes_are_known_again(tmp_path: Path) -> None:
    loaded, _ = sanitized(model("slice", "int64"), tmp_path)
    assert all(dims(value) is not None for node in every_node(loaded) for value in node.outputs)
    assert not any(name.startswith("two") and "list" not in name for name in loaded.graph.initializers)


@pytest.mark.parametrize("body", [
    "y = Gather<axis=0>(x, i)", "y = Clip(x, low)", "y = CumSum(x, i)", "y = Mul(x, low)", "y = Trilu(x, i)",
    "c = Greater(x, low) y = Where(c, x, low)", "h = Constant<value_float=2.0>() y = Pow(x, h)",
    "s = Squeeze(low) y = Add(x, s)", "y = ReduceSum<keepdims=0>(x)",
])  # fmt: skip
def test_scalars_that_belong_there_stay(tmp_path: Path, body: str) -> None:
    output = "float[12] y" if "Gather" in body else "float y" if "Reduce" in body else "float[2,12] y"
    text = f"g (float[2,12] x) => ({output}) <int64 i = {{1}}, float low = {{0.5}}> {{ {body} }}"
    check(parse(text), PASS, tmp_path, changes=0)
