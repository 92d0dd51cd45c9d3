"""Folding is exact, never grows the file, never touches weights or chance."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import check, ops, parse, run
from onnx import helper, numpy_helper

from sanitize.evaluate import FOLDABLE, LIMIT, evaluate
from sanitize.model_file import read_model, write_model
from sanitize.passes import dead, fold
from sanitize.target import find_target

TARGET = find_target("qnn-htp")
PASS = dataclasses.replace(fold.PASS, min_db=math.inf)  # every value is exact; see fold.PASS for why it promises less


def left(model: ir.Model) -> list[str]:
    """Operators that remain once dead ones are gone."""
    dead.PASS.run(model, TARGET)
    return ops(model)


def test_shape_arithmetic_of_static_dims(tmp_path: Path) -> None:
    model = parse(
        """g (float[2,3,4] x) => (float[6,4] y)
        <int64 i0 = {0}, int64 i1 = {1}, int64[1] zero = {0}, int64[1] m = {-1}> {
        s = Shape(x) a = Gather(s, i0) b = Gather(s, i1) c = Mul(a, b) d = Unsqueeze(c, zero)
        e = Concat<axis=0>(d, m) y = Reshape(x, e) }"""
    )
    assert left(check(model, PASS, tmp_path)) == ["Reshape"]


def test_only_the_needed_dims_are_static(tmp_path: Path) -> None:
    model = parse(
        """g (float[batch,seq,8] x) => (float[batch,seq,2,4] y)
        <int64 i0 = {0}, int64 i1 = {1}, int64[1] zero = {0}, int64[2] heads = {2, 4}> {
        s = Shape(x) a = Gather(s, i0) b = Gather(s, i1) c = Unsqueeze(a, zero) d = Unsqueeze(b, zero)
        e = Concat<axis=0>(c, d, heads) y = Reshape<allowzero=1>(x, e) }"""
    )
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)}
    after = check(model, PASS, tmp_path, feeds=feeds)
    assert left(after) == ["Reshape"]
    assert after.graph[0].inputs[1].const_value.numpy().tolist() == [0, 0, 2, 4]


def test_a_product_of_open_dims(tmp_path: Path) -> None:
    model = parse(
        """g (float[batch,seq,8] x) => (float[rows,8] y)
        <int64 i0 = {0}, int64 i1 = {1}, int64[1] zero = {0}, int64[1] eight = {8}> {
        s = Shape(x) a = Gather(s, i0) b = Gather(s, i1) c = Mul(a, b) d = Unsqueeze(c, zero)
        e = Concat<axis=0>(d, eight) y = Reshape<allowzero=1>(x, e) }"""
    )
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)}
    after = check(model, PASS, tmp_path, feeds=feeds)
    assert left(after) == ["Reshape"] and after.graph[0].inputs[1].const_value.numpy().tolist() == [-1, 8]


def test_two_open_dims_stay(tmp_path: Path) -> None:
    model = parse(
        """g (float[batch,seq,8] x) => (float[a,b,c] y) <int64[1] i0 = {0}, int64[1] i1 = {1}, int64[1] eight = {8}> {
        s = Shape(x) a = Gather(s, i1) b = Gather(s, i0) e = Concat<axis=0>(a, b, eight) y = Reshape(x, e) }"""
    )
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)}
    check(model, PASS, tmp_path, feeds=feeds, changes=0)


def test_a_dim_is_never_negative(tmp_path: Path) -> None:
    model = parse(
        """g (float[b,1] x) => (float[b,4] y)
        <int64[1] i0 = {0}, int64[1] four = {4}, int64[1] m = {-1}, int64[2] ones = {1, 1}> {
        s = Shape(x) a = Gather(s, i0) e = Concat<axis=0>(a, four) q = Equal(e, m)
        w = Where(q, ones, e) y = Expand(x, w) }"""
    )
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 1)).astype(np.float32)}
    assert left(check(model, PASS, tmp_path, feeds=feeds)) == ["Shape", "Gather", "Concat", "Where", "Expand"]


def test_floats_are_those_of_onnx_runtime(tmp_path: Path) -> None:
    model = parse(
        """g (float[8] x) => (float[8] y, float[8] z) <float[8] c = {0.1, 0.7, 1.3, 2.9, -3.3, 4.1, 5.5, 100.25}> {
        a = Sin(c) b = Exp(a) d = Tanh(b) e = Erf(d) f = Softmax(e) h = Sigmoid(f) k = Pow(h, h) m = Log(k)
        y = Add(x, m) z = Sqrt(c) }"""
    )
    assert left(check(model, PASS, tmp_path)) == ["Add", "Identity"]


def test_large_results_are_not_stored(tmp_path: Path) -> None:
    text = """g (float[1000] x) => (float[1000] y) <int64[1] n = {1000}, float one = {1}> {
        r = Expand(one, n) y = Add(x, r) }"""
    assert ops(check(parse(text), PASS, tmp_path, changes=0)) == ["Expand", "Add"]
    # A small result of it is.
    text = """g (float[1] x) => (float[1] y) <int64[1] n = {1000}, float one = {1}, int64[1] ax = {0}> {
        r = Expand(one, n) s = ReduceSum(r, ax) y = Add(x, s) }"""
    assert left(check(parse(text), PASS, tmp_path / "b")) == ["Add"]


def test_the_file_never_grows(tmp_path: Path) -> None:
    lines = [f"r{i} = Expand(one, n) y{i} = Add(x, r{i})" for i in range(50)]
    outputs = ", ".join(f"float[200] y{i}" for i in range(50))
    model = parse(f"g (float[200] x) => ({outputs}) <int64[1] n = {{200}}, float one = {{1}}> {{ {' '.join(lines)} }}")
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    PASS.run(loaded, TARGET)
    write_model(loaded, tmp_path / "b.onnx")
    grown = sum(p.stat().st_size for p in tmp_path.glob("b.onnx*")) - (tmp_path / "a.onnx").stat().st_size
    value_infos = 50 * 40
    assert grown <= 1024 + value_infos


def test_a_constant_that_goes_makes_room(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.random.default_rng(0).normal(size=(32, 48)).astype(np.float32), "w")
    model = parse("g (float[1,32] x) => (float[1,48] y) { t = Add(w, w) y = MatMul(x, t) }")
    model.graph.initializer.append(weights)
    # A MatMul whose weight is constant runs another kernel: its last bit differs, that of the weight does not.
    assert left(check(model, PASS, tmp_path, min_db=120)) == ["MatMul"]
    shared = parse(
        "g (float[1,32] x) => (float[1,48] y, float[1,48] z) { t = Add(w, w) y = MatMul(x, t) z = MatMul(x, w) }"
    )
    shared.graph.initializer.append(weights)
    check(shared, PASS, tmp_path / "shared", changes=0)


def test_weights_are_not_read(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.zeros((LIMIT // 64 + 1, 64), np.float32), "w")
    model = parse(f"g (float[1,{LIMIT // 64 + 1}] x) => (float[1,64] y) {{ t = Neg(w) y = MatMul(x, t) }}")
    model.graph.initializer.append(weights)
    check(model, PASS, tmp_path, changes=0)


def test_chance_and_quantised_weights_stay(tmp_path: Path) -> None:
    model = parse(
        "g (float[3] x) => (float[3] y) { r = RandomNormal<shape=[3]>() m = Mul(r, x) z = Sub(m, m) y = Add(z, x) }"
    )
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert PASS.run(loaded, TARGET) == []
    quantised = parse(
        """g (float[4] x) => (float[4] y) <int8[4] q = {1, 2, 3, 4}, float s = {0.5}, int8 z = {0}> {
        w = DequantizeLinear(q, s, z) y = Mul(x, w) }"""
    )
    check(quantised, PASS, tmp_path / "q", changes=0)


def test_constant_nodes_become_initializers(tmp_path: Path) -> None:
    model = parse(
        "g (float[2] x) => (float[2] y, int64[2] z) { a = Constant<value_floats=[1.0, 2.0]>() y = Add(x, a)"
        " z = Constant<value_ints=[3, 4]>() }"
    )
    after = check(model, PASS, tmp_path, changes=1)
    assert ops(after) == ["Add", "Constant"] and list(after.graph.initializers) == ["a"]


def test_an_overridable_initializer_is_no_constant(tmp_path: Path) -> None:
    model = parse("g (float[2] x, float[2] c) => (float[2] y) <float[2] c = {1, 2}> { a = Neg(c) y = Add(x, a) }")
    onnx.save(model, tmp_path / "a.onnx")
    assert PASS.run(read_model(tmp_path / "a.onnx"), TARGET) == []


@pytest.mark.parametrize("flag", [0, 1])
def test_an_if_of_a_constant_is_inlined(tmp_path: Path, flag: int) -> None:
    def branch(op: str) -> onnx.GraphProto:
        weight = numpy_helper.from_array(np.array([1, 2], np.float32), "w")
        nodes = [helper.make_node(op, ["x", "w"], ["t"], "n"), helper.make_node("Neg", ["t"], ["out"], "m")]
        out = helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [2])
        return helper.make_graph(nodes, op, [], [out], [weight])

    model = parse(f"g (float[2] x) => (float[2] y, float[2] z) <bool b = {{{flag}}}> {{ z = Neg(x) y = Neg(z) }}")
    for name in ("p", "q"):
        node = helper.make_node("If", ["b"], [name], f"if_{name}", then_branch=branch("Add"), else_branch=branch("Mul"))
        model.graph.node.append(node)
        model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]))
    onnx.save(model, tmp_path / "a.onnx")
    feeds = {"x": np.array([3, -5], np.float32)}
    loaded = read_model(tmp_path / "a.onnx")
    assert len(PASS.run(loaded, TARGET)) == 2 and PASS.run(loaded, TARGET) == []
    assert ops(loaded) == ["Neg", "Neg", *(["Add" if flag else "Mul", "Neg"] * 2)]
    write_model(loaded, tmp_path / "b.onnx")
    onnx.checker.check_model(str(tmp_path / "b.onnx"))
    before, after = run(tmp_path / "a.onnx", feeds), run(tmp_path / "b.onnx", feeds)
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize(
    "text",
    [
        "y = ConstantOfShape(big)", "y = Expand(one, big)", "y = Tile(ten, big)", "y = Range(zero, far, step)",
        "y = OneHot(ten, depth, pair)", "y = Div(ten, zero)", "y = Mod(ten, zero)", "y = Div(ten, minus)",
        "y = Pad(ten, pads)", "a = Unsqueeze(many, axis0) b = Unsqueeze(many, axis1) y = Mul(a, b)",
        "a = Unsqueeze(many, axis0) b = Unsqueeze(many, axis1) y = MatMul(b, a)", "y = Gather(ten, far)",
        "a = Unsqueeze(many, axis0) i = Mul(many, zero) y = Gather<axis=0>(a, i)", "y = Reshape(ten, big)",
        "y = Range(zero, far, zero)", "y = Squeeze(ten, big)",
    ],
)  # fmt: skip
def test_hostile_sizes_and_traps_are_left_alone(tmp_path: Path, text: str) -> None:
    model = parse(
        f"""g (float[1] x) => (float[1] x2, int64[unknown] y) <int64[1] big = {{100000000000}}, int64 one = {{1}},
        int64[1] ten = {{10}}, int64 zero = {{0}}, int64 far = {{9000000000000000000}}, int64 step = {{1}},
        int64 depth = {{1000000000}}, int64[2] pair = {{0, 1}}, int64 minus = {{-1}}, int64[2] pads = {{0, 5000000000}},
        int64[1] axis0 = {{0}}, int64[1] axis1 = {{1}}> {{ x2 = Neg(x) {text} }}"""
    )
    model.graph.output[1].type.tensor_type.ClearField("shape")
    model.graph.initializer.append(numpy_helper.from_array(np.arange(30000), "many"))
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    PASS.run(loaded, TARGET)
    assert text.split("y = ")[1].split("(")[0].split("<")[0] in ops(loaded)


def test_every_operator_of_the_list_exists() -> None:
    for op in FOLDABLE:
        assert onnx.defs.has(op), op


def test_bits_of_a_whole_model() -> None:
    node = ir.node("Softmax", [ir.Value(name="a")], {"axis": -1})
    given = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
    found = evaluate(node, [given], 21)
    assert found is not None and found[0].shape == (4, 7) and abs(found[0].sum(-1) - 1).max() < 1e-6


def test_an_if_in_a_dropped_branch_and_one_in_a_kept_one(tmp_path: Path) -> None:
    info = lambda name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2])

    def nested(name: str) -> onnx.GraphProto:
        leaves = [
            helper.make_graph([helper.make_node(op, ["x"], [f"{name}_{op}"], op)], op, [], [info(f"{name}_{op}")])
            for op in ("Neg", "Abs")
        ]
        node = helper.make_node("If", ["b"], [f"{name}_o"], name, then_branch=leaves[0], else_branch=leaves[1])
        return helper.make_graph([node], name, [], [info(f"{name}_o")])

    model = parse("g (float[2] x) => (float[2] z) <bool b = {1}> { z = Exp(x) }")
    model.graph.node.append(
        helper.make_node("If", ["b"], ["y"], "if", then_branch=nested("t"), else_branch=nested("e"))
    )
    model.graph.output.append(info("y"))
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert PASS.run(loaded, TARGET) and PASS.run(loaded, TARGET) == []
    assert ops(loaded) == ["Exp", "Neg"]


def test_a_loop_body_is_folded_where_it_is_constant(tmp_path: Path) -> None:
    number = lambda name, kind: helper.make_tensor_value_info(name, kind, [])
    nodes = [
        helper.make_node("Add", ["two", "two"], ["four"], "const"),
        helper.make_node("Mul", ["v", "four"], ["w"], "mul"),
        helper.make_node("Identity", ["c"], ["c2"], "keep"),
    ]
    body = helper.make_graph(nodes, "body", [number("i", 7), number("c", 9), number("v", 1)],
                             [number("c2", 9), number("w", 1)])  # fmt: skip
    model = parse("g (float x) => (float z) <int64 n = {3}, bool go = {1}, float two = {2}> { z = Neg(x) }")
    model.graph.node.append(helper.make_node("Loop", ["n", "go", "x"], ["y"], "loop", body=body))
    model.graph.output.append(number("y", 1))
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert [change.node for change in PASS.run(loaded, TARGET)] == ["const"] and PASS.run(loaded, TARGET) == []
    write_model(loaded, tmp_path / "b.onnx")
    feeds = {"x": np.array(1.5, np.float32)}
    assert run(tmp_path / "b.onnx", feeds)["y"] == run(tmp_path / "a.onnx", feeds)["y"] == 96
