"""Equal nodes become one, where the first is computed in every case."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import check, ops, parse, run
from onnx import helper

from sanitize.model_file import read_model, write_model
from sanitize.passes.common_subexpressions import PASS
from sanitize.target import find_target

TARGET = find_target("qnn-htp")


def test_chains_of_equals(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y) { a = Exp(x) b = Exp(x) c = Neg(a) d = Neg(b) y = Add(c, d) }"
    assert ops(check(parse(text), PASS, tmp_path, changes=2)) == ["Exp", "Neg", "Add"]


def test_order_of_a_sum_is_no_matter(tmp_path: Path) -> None:
    text = "g (float[2] x, float[2] z) => (float[2] y) { a = Add(x, z) b = Add(z, x) y = Mul(a, b) }"
    assert ops(check(parse(text), PASS, tmp_path, changes=1)) == ["Add", "Mul"]


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2] x, float[2] z) => (float[2] y) { a = Sub(x, z) b = Sub(z, x) y = Mul(a, b) }",
        "g (float[2] x) => (float[2] y) { a = LeakyRelu<alpha=0.1>(x) b = LeakyRelu<alpha=0.2>(x) y = Mul(a, b) }",
        "g (float[2] x) => (double[2] y) { a = Cast<to=11>(x) b = Cast<to=10>(x) c = Cast<to=11>(b) y = Mul(a, c) }",
    ],
)
def test_look_alikes_stay(tmp_path: Path, text: str) -> None:
    check(parse(text), PASS, tmp_path, changes=0)


def test_chance_stays(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y) { a = RandomNormalLike(x) b = RandomNormalLike(x) y = Sub(a, b) }"
    onnx.save(parse(text), tmp_path / "a.onnx")
    assert PASS.run(read_model(tmp_path / "a.onnx"), TARGET) == []


def test_two_outputs_stay_two(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y, float[2] z) { y = Exp(x) z = Exp(x) }"
    assert ops(check(parse(text), PASS, tmp_path, changes=1)) == ["Exp", "Identity"]


def test_bodies_use_what_is_outside_but_not_each_other(tmp_path: Path) -> None:
    def body(name: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_o", onnx.TensorProto.FLOAT, [2])
        nodes = [
            helper.make_node("Exp", ["x"], [f"{name}_e"], f"{name}_exp"),
            helper.make_node("Sin", ["x"], [f"{name}_s"], f"{name}_sin"),
            helper.make_node("Add", [f"{name}_e", f"{name}_s"], [f"{name}_o"], f"{name}_add"),
        ]
        return helper.make_graph(nodes, name, [], [out])

    model = parse("g (float[2] x, bool b) => (float[2] e) { e = Exp(x) }")
    model.graph.node.append(helper.make_node("If", ["b"], ["z"], "if", then_branch=body("t"), else_branch=body("f")))
    model.graph.node.append(helper.make_node("Sin", ["x"], ["late"], "late"))
    for name in ("z", "late"):
        model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]))
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert {change.node for change in PASS.run(loaded, TARGET)} == {"t_exp", "f_exp"}
    write_model(loaded, tmp_path / "b.onnx")
    for flag in (True, False):
        feeds = {"x": np.array([1, -2], np.float32), "b": np.array(flag)}
        before, after = run(tmp_path / "a.onnx", feeds), run(tmp_path / "b.onnx", feeds)
        assert all((before[name] == after[name]).all() for name in before)


def test_a_body_that_returns_what_is_outside(tmp_path: Path) -> None:
    out = helper.make_tensor_value_info("o", onnx.TensorProto.FLOAT, [2])
    bodies = [helper.make_graph([helper.make_node(op, ["x"], ["o"], op)], op, [], [out]) for op in ("Exp", "Sin")]
    model = parse("g (float[2] x, bool b) => (float[2] e) { e = Exp(x) }")
    model.graph.node.append(helper.make_node("If", ["b"], ["z"], "if", then_branch=bodies[0], else_branch=bodies[1]))
    model.graph.output.append(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2]))
    onnx.save(model, tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    assert len(PASS.run(loaded, TARGET)) == 1 and PASS.run(loaded, TARGET) == []
    write_model(loaded, tmp_path / "b.onnx")
    feeds = {"x": np.array([1, -2], np.float32), "b": np.array(True)}
    assert (run(tmp_path / "a.onnx", feeds)["z"] == run(tmp_path / "b.onnx", feeds)["z"]).all()


def test_attributes_are_compared_by_content() -> None:
    from sanitize.passes.common_subexpressions import _key

    x = ir.Value(name="x")
    make = lambda fill: ir.node("ConstantOfShape", [x], {"value": ir.tensor(np.array([fill], np.float32))})
    assert _key(make(1.0)) == _key(make(1.0)) != _key(make(-1.0))
    assert _key(make(0.0)) != _key(make(-0.0))
