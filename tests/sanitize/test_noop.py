"""Nodes that change no bit go; those that look alike stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import check, ops, parse

from sanitize.model_file import read_model
from sanitize.order import PASSES
from sanitize.passes import dead
from sanitize.passes.noop import PASS
from sanitize.pipeline import sanitize
from sanitize.target import find_target

GOES = {
    "identity": "a = Identity(n) y = Exp(a)",
    "reshape": "a = Reshape(n, s34) y = Exp(a)",
    "reshape copies": "a = Reshape(n, s00) y = Exp(a)",
    "reshape one open": "a = Reshape(n, s0m) y = Exp(a)",
    "transpose": "a = Transpose<perm=[0,1]>(n) y = Exp(a)",
    "slice": "a = Slice(n, i0, imax, i1) y = Exp(a)",
    "slice to dim": "a = Slice(n, i0, i4, i1) y = Exp(a)",
    "expand": "a = Expand(n, s34) y = Exp(a)",
    "expand of ones": "a = Expand(n, i1) y = Exp(a)",
    "concat": "a = Concat<axis=0>(n) y = Exp(a)",
    "dropout": "a = Dropout(n) y = Exp(a)",
    "dropout not training": "a = Dropout(n, half, no) y = Exp(a)",
    "add -0": "a = Add(n, nzero) y = Exp(a)",
    "sub 0": "a = Sub(n, zero) y = Exp(a)",
    "mul 1": "a = Mul(one, n) y = Exp(a)",
    "div 1": "a = Div(n, one) y = Exp(a)",
    "pow 1": "a = Pow(n, one) y = Exp(a)",
    "transposes": "a = Transpose<perm=[1,0]>(n) b = Transpose<perm=[1,0]>(a) y = Exp(b)",
    "plain transposes": "a = Transpose(n) b = Transpose(a) y = Exp(b)",
    "unsqueeze squeeze": "a = Unsqueeze(n, i1) b = Squeeze(a, i1) y = Exp(b)",
    "reshapes": "a = Reshape(n, s12) b = Reshape(a, s34) y = Exp(b)",
    "flatten": "a = Flatten(n) y = Exp(a)",
    "tile": "a = Tile(n, s11) y = Exp(a)",
    "pad": "a = Pad(n, pads) y = Exp(a)",
    "sum of one": "a = Sum(n) y = Exp(a)",
    "where": "a = Where(yes, n, e) y = Exp(a)",
    "and": "a = Cast<to=9>(n) b = And(yes, a) c = Or(b, no) y = Cast<to=1>(c)",
    "as output": "y = Identity(n)",
}
STAYS = {
    "add 0": "a = Add(n, zero) y = Exp(a)",
    "sub -0": "a = Sub(n, nzero) y = Exp(a)",
    "mul 2": "a = Mul(n, half) y = Exp(a)",
    "one by": "a = Div(one, n) y = Exp(a)",
    "transpose": "a = Transpose<perm=[1,0]>(n) b = Exp(a) y = Transpose<perm=[1,0]>(b)",
    "slice off": "a = Slice(n, i1, imax, i1) b = Exp(a) y = Concat<axis=1>(b, col)",
    "reverse": "a = Slice(n, im, imin, i1, im) y = Exp(a)",
    "dropout": "a = Dropout(n, zero_ratio, yes) y = Exp(a)",
    "where": "a = Where(mixed, n, e) y = Exp(a)",
}
HEAD = """<ir_version: 10, opset_import: ["" : 21]> g (float[3,4] x) => (float[3,4] y) <int64[2] s34 = {3, 4},
 int64[2] s00 = {0, 0}, int64[2] s0m = {0, -1}, int64[1] i0 = {0}, int64[1] i1 = {1}, int64[1] i4 = {4},
 int64[1] im = {-1}, int64[1] imin = {-9223372036854775807}, int64[1] imax = {9223372036854775807},
 int64[1] s12 = {12}, int64[2] s11 = {1, 1}, int64[4] pads = {0, 0, 0, 0}, float half = {0.5}, float zero = {0},
 float zero_ratio = {0.5}, bool no = {0}, bool yes = {1}, bool[1,4] mixed = {1, 0, 1, 0},
 float nzero = {-0.0}, float one = {1}, float[3,4] e = {1,1,1,1,1,1,1,1,1,1,1,1}, float[3,1] col = {1,1,1}> {
 n = Neg(x) """


@pytest.mark.parametrize("body", GOES.values(), ids=GOES.keys())
def test_goes(tmp_path: Path, body: str) -> None:
    after = check(parse(HEAD + body + "}"), PASS, tmp_path)
    dead.PASS.run(after, find_target("qnn-htp"))
    assert ops(after) == (["Neg", "Exp"] if "Exp" in body else ["Neg", *["Cast"] * body.count("Cast")])


@pytest.mark.parametrize("body", [b for n, b in STAYS.items() if n != "dropout"])
def test_stays(tmp_path: Path, body: str) -> None:
    check(parse(HEAD + body + "}"), PASS, tmp_path, changes=0)


def test_minus_zero_survives(tmp_path: Path) -> None:
    feeds = {"x": np.zeros((3, 4), np.float32)}
    after = check(parse(HEAD + "a = Add(n, nzero) b = Sub(a, zero) y = Div(one, b) }"), PASS, tmp_path, feeds=feeds)
    assert ops(after) == ["Neg", "Div"]


def test_chains_are_merged(tmp_path: Path) -> None:
    text = (
        "g (float[2,3,4] x) => (float[4,2,3] y) { "
        "a = Transpose<perm=[1,0,2]>(x) b = Transpose<perm=[2,1,0]>(a) y = Exp(b) }"
    )
    assert ops(check(parse(text), PASS, tmp_path / "t")) == ["Transpose", "Exp"]
    text = (
        "g (float[2,3,4] x) => (float[4,6] y) <int64[2] s = {6, 4}, int64[2] r = {4, 6}> { "
        "a = Reshape(x, s) b = Reshape(a, r) y = Exp(b) }"
    )
    assert ops(check(parse(text), PASS, tmp_path / "r")) == ["Reshape", "Exp"]
    text = (
        "g (float[b,4] x) => (float[1,b,1,1,4] y) <int64[1] i = {1}, int64[2] j = {0, 2}> { "
        "a = Unsqueeze(x, i) b = Unsqueeze(a, j) y = Exp(b) }"
    )
    after = check(parse(text), PASS, tmp_path / "u")
    assert ops(after) == ["Unsqueeze", "Exp"]
    text = (
        "g (float[1,b,1,1,4] x) => (float[b,4] y) <int64[2] i = {0, 2}, int64[1] j = {1}> { "
        "a = Squeeze(x, i) b = Squeeze(a, j) y = Exp(b) }"
    )
    assert ops(check(parse(text), PASS, tmp_path / "q")) == ["Squeeze", "Exp"]
    text = (
        "g (float[2,1,4] x) => (float[1,2,4] y) <int64[1] i = {1}, int64[1] z = {0}> { "
        "a = Squeeze(x, i) b = Unsqueeze(a, z) y = Exp(b) }"
    )
    assert ops(check(parse(text), PASS, tmp_path / "s")) == ["Reshape", "Exp"]


def test_input_as_output_stays_a_copy(tmp_path: Path) -> None:
    check(parse("g (float[2] x) => (float[2] y) { y = Identity(x) }"), PASS, tmp_path / "a", changes=0)
    after = check(parse("g (float[2] x) => (float[2] y) { y = Concat<axis=0>(x) }"), PASS, tmp_path / "b", changes=1)
    assert ops(after) == ["Identity"]
    after = check(parse("g (float[2] x) => (float[2] y, float[2] z) { y = Exp(x) z = Identity(y) }"), PASS,
                  tmp_path / "c", changes=0)  # fmt: skip


def test_a_broadcast_is_no_no_op(tmp_path: Path) -> None:
    text = "g (float[4] x) => (float[3,4] y) <float[3,4] c = {1,1,1,1,1,1,1,1,1,1,1,1}> { y = Mul(x, c) }"
    check(parse(text), PASS, tmp_path / "a", changes=0)
    text = "g (float[4] x) => (float[3,4] y) <int64[2] s = {3, 1}> { y = Expand(x, s) }"
    check(parse(text), PASS, tmp_path / "b", changes=0)
    text = "g (float[4] x) => (float[1,4] y) <float[1,1] c = {1}> { y = Mul(x, c) }"
    check(parse(text), PASS, tmp_path / "c", changes=0)


def test_dropout_in_training_stays(tmp_path: Path) -> None:
    onnx.save(parse(HEAD + STAYS["dropout"] + "}"), tmp_path / "a.onnx")
    assert PASS.run(read_model(tmp_path / "a.onnx"), find_target("qnn-htp")) == []


def test_what_is_empty_along_another_axis_is_joined(tmp_path: Path) -> None:
    """[0, K] and [0, 3] along axis 1: the second is empty, and still as wide as it is."""
    model = parse("g (float[N, K] x) => (float[N, M] y) <float[0, 3] e = {}> { y = Concat <axis = 1> (x, e) }")
    check(model, PASS, tmp_path, feeds={"x": np.zeros((0, 2), np.float32)}, changes=0)
    model = parse("g (float[2, K] x) => (float[2, M] y) <float[2, 0] e = {}> { y = Concat <axis = -1> (x, e) }")
    check(model, PASS, tmp_path / "b", feeds={"x": np.ones((2, 2), np.float32)}, changes=1)


@pytest.mark.parametrize("kind", ["uint8", "int16"])
def test_casts_of_small_integers_settle(tmp_path: Path, kind: str) -> None:
    """narrow-types takes them through int32 for HTP; merged here, the two would undo each other without end."""
    model = parse(f"g ({kind}[4] x) => (float[4] y, float[4] z) {{ y = Cast <to = 1> (x) z = Neg(y) }}")
    onnx.save(model, tmp_path / "a.onnx")
    read = read_model(tmp_path / "a.onnx")
    sanitize(read, find_target("qnn-htp"), PASSES)
    assert [node.op_type for node in read.graph] == ["Cast", "Cast", "Neg"]
    sanitize(on_cpu := read_model(tmp_path / "a.onnx"), find_target("xnnpack"), PASSES)
    assert [node.op_type for node in on_cpu.graph] == ["Cast", "Neg"]
