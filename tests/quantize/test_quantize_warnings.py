"""What is told of a calibration: constant tensors, and shares of values that an encoding cuts off."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from quantize.activations import Activation
from quantize.observe import BINS, Seen
from quantize.report import clipped, outside, warnings
from ringstep.contract import Encoding


def seen_of(values: np.ndarray) -> Seen:
    made = Seen()
    made.add(torch.from_numpy(values.astype(np.float32)))
    return made


def test_the_share_outside_is_the_counted_one() -> None:
    values = np.random.default_rng(0).standard_normal(8000)
    own = Activation("uint8", Encoding(2 / 255, 128))
    low, high = -128 * 2 / 255, 127 * 2 / 255
    want = np.mean((values < low) | (values > high))
    # A bin at either end may be counted the other way.
    slack = 2 * 8000 / BINS / 8000 * 4
    assert outside(seen_of(values), own) == pytest.approx(want, abs=slack)
    assert want > 0.3


def test_nothing_is_outside_a_range_that_holds_everything() -> None:
    values = np.linspace(-1, 1, 4001)
    assert outside(seen_of(values), Activation("int16", Encoding(1 / 32767, 0))) == 0
    assert outside(Seen(-1, 1), Activation("int16", Encoding(1 / 32767, 0))) == 0  # a range given, not counted


def graph() -> ir.Graph:
    """scores + mask -> softmax input, and x -> y."""
    value = lambda name: ir.Value(name=name, shape=ir.Shape([4]), type=ir.TensorType(ir.DataType.FLOAT))
    scores, mask, x = value("scores"), value("mask_full"), value("x")
    add = ir.Node("", "Add", [scores, mask], outputs=[value("masked")])
    nodes = [add, ir.Node("", "Neg", [x], outputs=[value("y")])]
    return ir.Graph([scores, mask, x], [n.outputs[0] for n in nodes], nodes=nodes, opset_imports={"": 23})


def test_masked_scores_are_meant_to_be_cut() -> None:
    wide, narrow = np.linspace(-100, 0, 1000), Activation("uint8", Encoding(1 / 255, 255))
    seen = {name: seen_of(wide) for name in ("masked", "y", "kept")}
    keeps = Activation("uint8", Encoding(100 / 255, 255))
    found = clipped(graph(), seen, {"masked": narrow, "y": narrow, "kept": keeps, "unseen": narrow})
    assert list(found) == ["y"] and found["y"] == pytest.approx(0.99, abs=0.01)


def test_one_line_for_each_kind() -> None:
    seen = {"a": seen_of(np.zeros(9)), "b": seen_of(np.full(9, 2.5)), "c": seen_of(np.arange(9.0))}
    lines = warnings(seen, {"y": 0.02, "z": 0.25})
    assert len(lines) == 2
    assert lines[0].startswith("2 tensors had one value throughout calibration (a: 0)")
    assert "2 tensors lose more than 1 %" in lines[1] and "(z: 25.0 %)" in lines[1]
    assert warnings({"c": seen["c"]}, {}) == []
    assert warnings({"b": seen["b"]}, {})[0].startswith("1 tensor had one value throughout calibration (b: 2.5)")
