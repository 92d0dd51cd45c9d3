"""Names become unique and plain, and stay so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from graphs import in_if, parse, run
from onnx import helper

from sanitize import graph as graphs
from sanitize.model_file import read_model, write_model
from sanitize.passes.names import ODD, PASS
from sanitize.target import find_target

TARGET = find_target("qnn-htp")


def odd() -> onnx.ModelProto:
    info = lambda name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2])
    nodes = [
        helper.make_node("Neg", ["in put"], ["a b"], ""),
        helper.make_node("Neg", ["a b"], ["a_b"], "twice"),
        helper.make_node("Neg", ["a_b"], ["c\n'\"é"], "twice"),
        helper.make_node("Neg", ["c\n'\"é"], ["/../../etc"], "../x"),
        helper.make_node("Add", ["/../../etc", 'w"w'], ["out:put 0"], "/model/layers.0/q-proj:1"),
    ]
    tensor = helper.make_tensor('w"w', onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    graph = helper.make_graph(nodes, "g", [info("in put")], [info("out:put 0")], [tensor])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def names(model: object) -> list[str]:
    loaded = model
    values = [v.name for g in graphs.every_graph(loaded) for v in (*g.inputs, *g.initializers.values())]  # type: ignore[arg-type]
    return values + [v.name for node in graphs.every_node(loaded) for v in node.outputs]  # type: ignore[arg-type]


def test_odd_names_are_plain_and_unique(tmp_path: Path) -> None:
    for case, model in (("plain", odd()), ("if", in_if(odd()))):
        path = tmp_path / f"{case}.onnx"
        onnx.save(model, path)
        loaded = read_model(path)
        assert PASS.run(loaded, TARGET) and PASS.run(loaded, TARGET) == []
        found = names(loaded)
        assert len(set(found)) == len(found)
        assert [name for name in found if ODD.search(name)] == ["in put", "out:put 0"]
        nodes = [node.name for node in graphs.every_node(loaded)]
        assert len(set(nodes)) == len(nodes) and not any(ODD.search(name) for name in nodes)
        write_model(loaded, tmp_path / "after.onnx")
        onnx.checker.check_model(str(tmp_path / "after.onnx"))
        again = read_model(tmp_path / "after.onnx")
        assert PASS.run(again, TARGET) == []
        feeds = {"in put": np.array([1, 2], np.float32), "choose_branch": np.array(True)}
        assert run(tmp_path / "after.onnx", feeds)["out:put 0"].tolist() == [2, 4]


def test_good_names_stay(tmp_path: Path) -> None:
    model = parse("g (float[2] x) => (float[2] y) { a = Neg(x) y = Neg(a) }")
    for index, node in enumerate(model.graph.node):
        node.name = f"/model/layers.{index}/Neg"
    onnx.save(model, tmp_path / "a.onnx")
    assert PASS.run(read_model(tmp_path / "a.onnx"), TARGET) == []
