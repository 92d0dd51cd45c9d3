"""Graph surgery: cut, joined and disturbed graphs against numpy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from exporters.surgery import expose, groups, in_memory, meeting, perturb, piece, unchain, values


def silu() -> ir.Model:
    """y = a * sigmoid(a) + x, a = 2 x; sums read x again."""
    make = lambda name: ir.Value(name=name, shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT))
    x, two = make("x"), np.full((2, 3), 2, np.float32)
    weight = ir.Value(name="two", shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT),
                      const_value=ir.tensor(two, name="two"))  # fmt: skip
    a, s, m, y = (make(name) for name in "asmy")
    nodes = [ir.Node("", op, inputs, outputs=[out], name=f"/{op}_{out.name}") for op, inputs, out in (
        ("Mul", [x, weight], a), ("Sigmoid", [a], s), ("Mul", [a, s], m), ("Add", [m, x], y))]  # fmt: skip
    graph = ir.Graph([x], [y], nodes=nodes, initializers=[weight], opset_imports={"": 23}, name="silu")
    return ir.Model(graph, ir_version=11)


X = np.linspace(-3, 3, 6, dtype=np.float32).reshape(2, 3)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def test_exposed() -> None:
    model = silu()
    assert expose(model, ["s", "nothing"]) == ["s"]
    made = in_memory(model).run({"x": X})
    np.testing.assert_allclose(made["s"], sigmoid(2 * X), rtol=1e-5)
    np.testing.assert_allclose(made["y"], 2 * X * sigmoid(2 * X) + X, rtol=1e-5)


def test_unchained_pieces_read_what_they_are_fed() -> None:
    model = silu()
    unchain(model, ["a", "s"])
    made = in_memory(model).run({"x": X, "a.in": X + 1, "s.in": X + 5})
    np.testing.assert_allclose(made["a"], 2 * X)
    np.testing.assert_allclose(made["s"], sigmoid(X + 1), rtol=1e-5)
    np.testing.assert_allclose(made["y"], (X + 1) * (X + 5) + X, rtol=1e-5)


def test_a_sibling_goes_on_reading_the_tensor_itself() -> None:
    model = silu()
    unchain(model, ["a"], {"a": "s"})  # s is made of a within the piece; only the product is fed anew
    made = in_memory(model).run({"x": X, "a.in": X + 1})
    np.testing.assert_allclose(made["y"], (X + 1) * sigmoid(2 * X) + X, rtol=1e-5)


def test_groups_reach_to_where_ways_meet() -> None:
    model = silu()
    names = unchain(model, ["a", "s", "m", "y"])
    made = groups(model, names, 10)
    assert sorted(made.values()) == [("a", "s", "m"), ("m", "y"), ("s", "m")]
    outputs = {inside: name for name, inside in made.items()}
    found = in_memory(model).run({"x": X, "a.in": X + 1, "s.in": X + 5, "m.in": X + 7})
    # Inside a group nothing is fed; what it reads from outside is.
    np.testing.assert_allclose(found[outputs["a", "s", "m"]], 2 * X * sigmoid(2 * X), rtol=1e-5)
    np.testing.assert_allclose(found[outputs["s", "m"]], (X + 1) * sigmoid(X + 1), rtol=1e-5)
    np.testing.assert_allclose(found[outputs["m", "y"]], (X + 1) * (X + 5) + X, rtol=1e-5)


def test_perturbed() -> None:
    model = silu()
    perturb(model, ["a", "y"])
    delta = np.full_like(X, 0.5)
    made = in_memory(model).run({"x": X, "a.delta": delta, "y.delta": np.zeros_like(X)})
    np.testing.assert_allclose(made["a"], 2 * X)
    np.testing.assert_allclose(made["a.sum"], 2 * X + 0.5)
    np.testing.assert_allclose(made["y.sum"], (2 * X + 0.5) * sigmoid(2 * X + 0.5) + X, rtol=1e-5)


def test_ways_meet() -> None:
    readers = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": ["e"], "e": []}
    assert meeting(readers) == {"a": "d", "b": "d", "c": "d", "d": "e"}
    model = silu()
    assert [node.op_type for node in piece(values(model.graph)["m"])] == ["Mul", "Sigmoid", "Mul"]
