"""Masks: finite for the precision, the same softmax; infinities that mean infinity stay."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import check, ops, parse, random_feeds, run
from onnx import numpy_helper

from sanitize import graph as graphs
from sanitize.model_file import read_model, write_model
from sanitize.passes import infinities, nan_guards
from sanitize.passes.infinities import PASS
from sanitize.target import Target, find_target

LOWEST = float(np.finfo(np.float32).min)
KEEP = np.tril(np.ones((4, 4), bool))


def model(text: str, **constants: np.ndarray | float) -> onnx.ModelProto:
    """A model with these float32 constants."""
    made = parse(text)
    for name, value in constants.items():
        array = value if isinstance(value, np.ndarray) else np.array(value, np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def feeds_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    feeds = random_feeds(proto)
    return {name: KEEP if value.dtype == bool else value for name, value in feeds.items()}


def largest(after: ir.Model) -> float:
    """The largest magnitude in any constant."""
    found = [graphs.array(v) for v in after.graph.initializers.values()]
    found += [n.attributes["value"].as_tensor().numpy() for n in after.graph if "value" in n.attributes]
    return max(float(np.abs(a.astype(np.float64)).max()) for a in found if a is not None and a.dtype.kind == "f")


MASKS = {
    "where": "m = Where(keep, zero, bad) a = Add(x, m) y = Softmax(a)",
    "masked fill": "a = Where(keep, x, bad) y = Softmax(a)",
    "inverse": "n = Not(keep) a = Where(n, bad, x) y = Softmax(a)",
    "log softmax": "a = Where(keep, x, bad) l = LogSoftmax(a) y = Exp(l)",
    "moved": "m = Where(keep, zero, bad) u = Unsqueeze(m, zero_i) s = Squeeze(u, zero_i) a = Add(s, x) y = Softmax(a)",
    "added twice": "m = Where(keep, zero, bad) n = Where(keep, zero, bad) o = Add(m, n) a = Add(x, o) y = Softmax(a)",
    "expanded": "e = Expand(bad, four) m = Where(keep, zero, e) a = Add(x, m) y = Softmax(a)",
    "filled": "e = ConstantOfShape<value = float[1] {FILL}>(four) a = Where(keep, x, e) y = Softmax(a)",
    "triangle": "e = Expand(bad, four) m = Trilu(e, one_i) a = Add(x, m) y = Softmax(a)",
    "written out softmax": """a = Where(keep, x, bad) t = ReduceMax(a, one_l) d = Sub(a, t) e = Exp(d)
        s = ReduceSum(e, one_l) y = Div(e, s)""",
    "written out": "m = Constant<value = float[4,4] {TRI}>() a = Add(x, m) y = Softmax(a)",
    "added": "m = Where(keep, zero, bad) a = Add(x, m) y = Relu(a)",
    "padded": "p = Pad(x, pads, bad) s = Softmax(p) y = Slice(s, start, four, both)",
}
TRIANGLE = ",".join(str(0.0 if keep else -3e38) for keep in KEEP.reshape(-1))
CONSTANTS = """<float zero = {0}, int64[1] zero_i = {0}, int64 one_i = {1}, int64[1] one_l = {1}, int64[2] four = {4,4},
    int64[4] pads = {0,0,0,1}, int64[2] both = {0,1}>"""


def masked(name: str, bad: float) -> onnx.ModelProto:
    body = MASKS[name].replace("FILL", str(-3e38)).replace("TRI", TRIANGLE)
    text = f"g (float[4,4] x, bool[4,4] keep) => (float[4,4] y) {CONSTANTS} {{ {body} }}"
    made = model(text, bad=bad, start=np.array([0, 0]))
    if name in ("written out", "filled"):
        del made.graph.initializer[-2]
        for node in made.graph.node:
            for attribute in node.attribute:
                if attribute.name == "value":
                    values = numpy_helper.to_array(attribute.t)
                    attribute.t.CopyFrom(numpy_helper.from_array(np.where(values < -1e38, np.float32(bad), values)))
    return made


@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, -math.inf) for name in MASKS), ("where", LOWEST), ("where", -65504.0), ("added twice", LOWEST)],
)
def test_masks(tmp_path: Path, name: str, bad: float) -> None:
    proto = masked(name, bad)
    after = check(proto, PASS, tmp_path, feeds=feeds_of(proto), min_db=math.inf)
    assert largest(after) == 10000


@pytest.mark.parametrize("name", ["where", "masked fill", "moved", "triangle"])
def test_other_precisions(tmp_path: Path, name: str) -> None:
    proto = masked(name, -math.inf)
    for size, target in ((1e9, find_target("xnnpack")), (100, find_target("qnn-htp", precision="a16"))):
        after = check(proto, PASS, tmp_path / str(size), feeds=feeds_of(proto), target=target)
        assert largest(after) == size
    proto = masked(name, -65504.0)
    check(proto, PASS, tmp_path / "finite", feeds=feeds_of(proto), target=find_target("xnnpack"), changes=0)


def test_scores_that_calibration_saw_widen_a16(tmp_path: Path) -> None:
    proto = masked("where", -math.inf)
    found = find_target("qnn-htp", precision="a16")
    target = Target(found.name, found.chip, found.precision, {"a": (-1e4, 60.0)})
    assert largest(check(proto, PASS, tmp_path, feeds=feeds_of(proto), target=target)) == 200


def test_attention_mask_of_bert(tmp_path: Path) -> None:
    text = """g (float[2,4] x, float[1,4] keep) => (float[2,4] y) <float one = {1}> {
        i = Sub(one, keep) m = Mul(i, low) a = Add(x, m) y = Softmax(a) }"""
    proto = model(text, low=LOWEST)
    feeds = random_feeds(proto) | {"keep": np.array([[1, 1, 0, 1]], np.float32)}
    assert largest(check(proto, PASS, tmp_path, feeds=feeds, min_db=math.inf)) == 10000


STAY = {
    "compared": "y = Equal(x, bad)",
    "compared below": "b = Where(keep, x, bad) y = Less(x, b)",
    "returned": "y = Where(keep, x, bad)",
    "sum returned": "m = Where(keep, zero, bad) y = Add(x, m)",
    "softmax that also returns its mask": "m = Where(keep, zero, bad) a = Add(x, m) y = Softmax(a)",
    "largest of some": "b = Where(keep, x, bad) y = ReduceMax(b, one_l)",
    "best of some": "b = Where(keep, x, bad) y = ArgMax<axis=1>(b)",
    "pooled": "u = Unsqueeze(x, zero_i) p = Pad(u, pads3, bad) y = MaxPool<kernel_shape=[2]>(p)",
    "is it infinite": "b = Where(keep, x, bad) i = IsInf(b) y = Where(i, zero, x)",
}
SHAPES = {"compared": "bool[4,4] y", "compared below": "bool[4,4] y", "largest of some": "float[4,1] y",
          "best of some": "int64[4,1] y", "pooled": "float[1,4,4] y",
          "softmax that also returns its mask": "float[4,4] y, float[4,4] m"}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_infinities_that_mean_infinity_stay(tmp_path: Path, name: str) -> None:
    output = SHAPES.get(name, "float[4,4] y")
    text = f"g (float[4,4] x, bool[4,4] keep) => ({output}) {CONSTANTS} {{ {STAY[name]} }}"
    proto = model(text, bad=-math.inf, pads3=np.array([0, 0, 0, 0, 0, 1]))
    check(proto, PASS, tmp_path, feeds=feeds_of(proto), changes=0)


def test_a_constant_that_is_also_compared_with_keeps_infinity_there(tmp_path: Path) -> None:
    text = """g (float[4,4] x, bool[4,4] keep) => (float[4,4] y, bool[4,4] e) {
        a = Where(keep, x, bad) y = Softmax(a) e = Equal(x, bad) }"""
    proto = model(text, bad=-math.inf)
    after = check(proto, PASS, tmp_path, feeds=feeds_of(proto), min_db=math.inf, changes=1)
    assert sorted(graphs.array(v).item() for v in after.graph.initializers.values()) == [-math.inf, -10000]


BOUNDS = {
    "clip from below": ("y = Clip(x, low)", []),
    "clip from above": ("y = Clip(x, , high)", []),
    "both": ("y = Clip(x, low, high)", []),
    "one": ("y = Clip(x, low, one)", ["Clip"]),
    "largest of": ("y = Max(x, low)", []),
    "smallest of": ("y = Min(high, x)", []),
    "inside": ("n = Neg(x) c = Clip(n, low, high) y = Neg(c)", ["Neg", "Neg"]),
}


@pytest.mark.parametrize("size", [math.inf, -LOWEST])
@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_that_bound_nothing(tmp_path: Path, name: str, size: float) -> None:
    body, left = BOUNDS[name]
    proto = model(f"g (float[2,3] x) => (float[2,3] y) <float one = {{1}}> {{ {body} }}", low=-size, high=size)
    after = check(proto, PASS, tmp_path, min_db=math.inf)
    assert [op for op in ops(after) if op != "Identity"] == left


@pytest.mark.parametrize("body", ["y = Clip(x, zero)", "y = Clip(x, high, low)", "y = Max(x, high)", "y = Min(x, low)",
                                  "y = Max(x, grid)"])  # fmt: skip
def test_bounds_that_matter_stay(tmp_path: Path, body: str) -> None:
    shape = "float[2,2,3]" if "grid" in body else "float[2,3]"
    proto = model(f"g (float[2,3] x) => ({shape} y) <float zero = {{0}}> {{ {body} }}", low=-math.inf, high=math.inf,
                  grid=np.full((2, 1, 1), -np.inf, np.float32))  # fmt: skip
    check(proto, PASS, tmp_path, changes=0)


@pytest.mark.parametrize("body", ["p = Mul(x, million) y = Add(p, x)", "y = Add(x, million)", "y = Min(x, million)"])
def test_large_numbers_are_no_masks(tmp_path: Path, body: str) -> None:
    proto = model(f"g (float[2,3] x) => (float[2,3] z) {{ {body} z = Tanh(y) }}", million=1e6)
    check(proto, PASS, tmp_path, changes=0)


@pytest.mark.parametrize("bad", [-math.inf, LOWEST])
def test_a_row_without_keys_stays_finite_without_its_guard(tmp_path: Path, bad: float) -> None:
    text = """g (float[4,4] x, bool[4,4] keep) => (float[4,4] y) <float zero = {0}> {
        m = Where(keep, zero, bad) a = Add(x, m) h = Cast<to=10>(a) s = Softmax(h) f = Cast<to=1>(s) n = IsNaN(f)
        y = Where(n, zero, f) }"""
    onnx.save(model(text, bad=bad), tmp_path / "a.onnx")
    loaded = read_model(tmp_path / "a.onnx")
    target = find_target("qnn-htp")
    assert nan_guards.PASS.run(loaded, target) and infinities.PASS.run(loaded, target)
    write_model(loaded, tmp_path / "b.onnx")
    keep = KEEP.copy()
    keep[2] = False
    feeds = {"x": np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32), "keep": keep}
    have, want = run(tmp_path / "b.onnx", feeds)["y"], run(tmp_path / "a.onnx", feeds)["y"]
    assert np.isfinite(have).all()
    np.testing.assert_allclose(have[2].sum(), 1, rtol=1e-3)
    np.testing.assert_array_equal(np.delete(have, 2, 0), np.delete(want, 2, 0))


def test_a_large_mask_is_streamed(tmp_path: Path) -> None:
    size = 2048
    mask = np.triu(np.full((1, 1, size, size), -np.inf, np.float32), 1)
    text = f"g (float[1,1,{size},{size}] x) => (float[1,1,{size},{size}] y) {{ a = Add(x, mask) y = Softmax(a) }}"
    onnx.save(model(text, mask=mask), tmp_path / "a.onnx", save_as_external_data=True, location="a.bin")
    loaded = read_model(tmp_path / "a.onnx")
    tracemalloc.start()
    assert len(PASS.run(loaded, find_target("qnn-htp"))) == 1
    write_model(loaded, tmp_path / "b.onnx")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < mask.nbytes, f"{peak} bytes for a mask of {mask.nbytes}"
    have = read_model(tmp_path / "b.onnx").graph.initializers["mask"].const_value.numpy()
    np.testing.assert_array_equal(have, np.triu(np.full((1, 1, size, size), -10000, np.float32), 1))
    assert PASS.run(read_model(tmp_path / "b.onnx"), find_target("qnn-htp")) == []
