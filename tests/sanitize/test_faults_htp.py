"""What the real compiler and the simulator say about the faults that passes mend: sm8750, fp16, simulated."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import Feeds, parse, random_feeds, run

from ringstep.engines.qnn_sim import open_graph
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db
from sanitize.model_file import read_model, write_model
from sanitize.passes import Pass, infinities, nan_guards, narrow_types, rank0
from sanitize.target import find_target

pytest.importorskip("onnxruntime_qnn")
SOC = 69


def simulate(path: Path, feeds: Feeds) -> Feeds:
    """Compile and run; a scalar is fed as the compiled graph shapes it."""
    with open_graph(path, soc_model=SOC, fp16=True) as graph:
        given = {name: feeds[name].astype(kind).reshape(shape) for name, (shape, kind) in graph.inputs.items()}
        return graph.run(given)


def sanitized(proto: onnx.ModelProto, folder: Path, *passes: Pass) -> Path:
    onnx.save(proto, folder / "a.onnx")
    model = read_model(folder / "a.onnx")
    for one in passes:
        assert one.run(model, find_target("qnn-htp")), one.name
    write_model(model, folder / "b.onnx")
    return folder / "b.onnx"


BOOLS = {
    "Equal": "y = Equal(a, b)",
    "Where": "y = Where(a, b, no)",
    "Pad": "p = Pad(a, pads) s = Slice(p, zero, three, one) y = And(s, b)",
    "ReduceMax": "m = ReduceMax(a, one) y = And(m, b)",
    "ReduceMin": "m = ReduceMin(a, one) y = Or(m, b)",
    "GatherND": "g = GatherND(a, cells) y = And(g, b)",
    "ScatterElements": "y = ScatterElements(a, rows, b)",
}


@pytest.mark.parametrize("op", BOOLS)
def test_bools_that_htp_refuses(tmp_path: Path, op: str) -> None:
    text = f"""g (bool[4,3] a, bool[4,3] b, int64[4,3,2] cells) => (bool[4,3] y) <bool[1] no = {{0}},
        int64[4] pads = {{0,0,0,2}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] three = {{3}},
        int64[4,3] rows = {{0,1,3,1,0,1,2,2,2,3,3,0}}> {{ {BOOLS[op]} }}"""
    path = sanitized(parse(text), tmp_path, narrow_types.PASS)
    with pytest.raises(RingstepError, match=op):
        simulate(tmp_path / "a.onnx", random_feeds(parse(text)))
    feeds = random_feeds(parse(text))
    np.testing.assert_array_equal(simulate(path, feeds)["y"], run(path, feeds)["y"])


def test_uint8_is_cast_right(tmp_path: Path) -> None:
    text = "g (uint8[1,6] x) => (float[1,6] y) { y = Cast<to=1>(x) }"
    feeds = {"x": np.array([[0, 1, 2, 100, 200, 255]], np.uint8)}
    path = sanitized(parse(text), tmp_path, narrow_types.PASS)
    np.testing.assert_allclose(simulate(tmp_path / "a.onnx", feeds)["y"], feeds["x"] > 0, atol=1e-6)
    np.testing.assert_allclose(simulate(path, feeds)["y"], feeds["x"], atol=1e-6)


def test_types_that_htp_refuses_are_narrowed(tmp_path: Path) -> None:
    text = """g (double[2,3] x, int64[2] i) => (double[2,3] y, int64[2,1] best, int64[2,3] rounded) {
        n = Neg(x) y = Gather(n, i) best = ArgMax<axis=1>(y) rounded = Cast<to=7>(x) }"""
    feeds = random_feeds(parse(text)) | {"i": np.array([1, 0])}
    path = sanitized(parse(text), tmp_path, narrow_types.PASS)
    with pytest.raises(RingstepError):
        simulate(tmp_path / "a.onnx", feeds)
    want, have = run(path, feeds), simulate(path, feeds)
    assert {have[name].dtype.name for name in have} == {"float32", "int32"}
    assert snr_db(want["y"].reshape(-1), have["y"].reshape(-1)) > 60
    np.testing.assert_array_equal(have["best"], want["best"])
    np.testing.assert_array_equal(have["rounded"], want["rounded"])


def test_scalars_are_taken_and_lists_are_lists(tmp_path: Path) -> None:
    text = """g (float[2,12] x, float s, int64 i, bool c) => (float y, float[12] z, float[2,6] w)
        <float half = {0.5}, int64 one = {1}, int64 six = {6}, int64 zero = {0}, float low = {-1}, float high = {1}> {
        m = Mul(x, s) t = ReduceSum<keepdims=0>(m) q = Sqrt(half) u = Mul(t, q) d = Where(c, u, half) y = Neg(d)
        p = Clip(m, low, high) z = Gather<axis=0>(p, i) w = Slice(p, zero, six, one) }"""
    path = sanitized(parse(text), tmp_path, rank0.PASS)
    feeds = random_feeds(parse(text.replace("bool c", "bool[1] c")))
    feeds |= {"i": np.array(1), "s": np.array(0.7, np.float32)}
    want = run(path, feeds | {"c": np.array(True)})
    for name, have in simulate(path, feeds | {"c": np.array([True])}).items():
        assert snr_db(want[name].reshape(-1), have.reshape(-1)) > 50, name


@pytest.mark.parametrize("bad", [-math.inf, float(np.finfo(np.float32).min)])
def test_rows_without_keys_are_uniform(tmp_path: Path, bad: float) -> None:
    text = """g (float[4,8] x, bool[4,8] keep) => (float[4,8] y) <float zero = {0}> {
        m = Where(keep, zero, bad) a = Add(x, m) b = Add(a, m) s = Softmax(b) n = IsNaN(s) y = Where(n, zero, s) }"""
    proto = parse(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(bad, np.float32), "bad"))
    path = sanitized(proto, tmp_path, nan_guards.PASS, infinities.PASS)
    keep = np.tril(np.ones((4, 8), bool))
    keep[2] = False
    feeds = {"x": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32), "keep": keep}
    have, want = simulate(path, feeds)["y"], run(tmp_path / "a.onnx", feeds)["y"]
    np.testing.assert_allclose(have[2], 1 / 8, atol=1e-3)
    rest = [0, 1, 3]
    assert snr_db(want[rest].reshape(-1), have[rest].reshape(-1)) > 50
    assert (have[rest][~keep[rest]] == 0).all()


def test_nan_is_no_nan_on_htp(tmp_path: Path) -> None:
    """Why guards are worth less than nothing there: infinities and large values test as NaN, 0/0 does not."""
    text = "g (float[1,6] x) => (bool[1,6] n, bool[1,6] q) { n = IsNaN(x) z = Sub(x, x) d = Div(z, z) q = IsNaN(d) }"
    onnx.save(parse(text), tmp_path / "a.onnx")
    have = simulate(tmp_path / "a.onnx", {"x": np.array([[1, 0, math.nan, math.inf, 7e4, 6e4]], np.float32)})
    assert have["n"].tolist() == [[False, False, True, True, True, False]]
    assert have["q"][0, [0, 1, 5]].tolist() == [False, False, False]
