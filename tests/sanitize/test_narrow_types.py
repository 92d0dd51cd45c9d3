"""Types the NPU computes with: int32 and float32, bools where it takes them, no cast that changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import check, ops, parse, random_feeds, run
from onnx import TensorProto, helper, numpy_helper

from ringstep.errors import RingstepError
from sanitize.casts import holds
from sanitize.graph import every_node
from sanitize.model_file import read_model, write_model
from sanitize.order import PASSES
from sanitize.passes import Change
from sanitize.passes.narrow_types import PASS
from sanitize.pipeline import sanitize
from sanitize.target import find_target

D = ir.DataType


def types(model: ir.Model) -> dict[str, str]:
    """The dtype of every input and output."""
    return {value.name: value.dtype.name for value in (*model.graph.inputs, *model.graph.outputs)}


def narrowed(proto: onnx.ModelProto, folder: Path, target: str = "qnn-htp") -> tuple[ir.Model, list[Change]]:
    onnx.save(proto, folder / "a.onnx")
    model = read_model(folder / "a.onnx")
    changes = PASS.run(model, find_target(target))
    write_model(model, folder / "b.onnx")
    return model, changes


FREE = {
    "ids": ("int64[2,3] i", "float[2,3,4] y", "y = Gather<axis=0>(w, i)"),
    "an offset": ("int64[2,3] i", "float[2,3,4] y", "j = Add(i, one) y = Gather<axis=0>(w, j)"),
    "moved about": ("int64[2,3] i", "float[6,4] y", "j = Reshape(i, six) k = Identity(j) y = Gather<axis=0>(w, k)"),
    "compared": ("int64[2,3] i", "bool[2,3] y", "y = LessOrEqual(i, one)"),
    "chosen": ("int64[2,3] i, bool[2,3] b", "int64[2,3] y", "y = Where(b, i, one)"),
    "cast to float": ("int64[2,3] i", "float[2,3] y", "y = Cast<to=1>(i)"),
    "cast from int32": ("int32[2,3] i", "float[2,3,4] y", "j = Cast<to=7>(i) y = Gather<axis=0>(w, j)"),
    "cast from float": ("float[2,3] i", "int64[2,3] y", "y = Cast<to=7>(i)"),
    "passed through": ("int64[2,3] i", "int64[2,3] y", "y = Identity(i)"),
    "filled": ("int64[2,3] i", "int64[2,3] y", "f = ConstantOfShape<value = int64[1] {3}>(shape) y = Mul(i, f)"),
    "a constant node": ("int64[2,3] i", "int64[2,3] y", "c = Constant<value_int=2>() y = Mul(i, c)"),
    "summed": ("int64[2,3] i", "int64[2,1] y", "y = ReduceSum(i, one)"),
    "sliced": ("int64[2,3] i", "int64[2,2] y", "y = Slice(i, one, two, one) "),
    "sorted": ("int64[2,3] i", "int64[2,3] y", "y, k = TopK(i, three)"),
    "gathered from": ("int64[2,3] i", "int64[2,1] y", "y = Gather<axis=1>(i, one)"),
}
CONSTANTS = """<float[8,4] w = {0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31},
    int64[1] one = {1}, int64[1] six = {6}, int64[2] shape = {2,3}, int64[1] two = {3}, int64[1] three = {3}>"""


@pytest.mark.parametrize("name", FREE)
def test_free_values_become_int32(tmp_path: Path, name: str) -> None:
    inputs, output, body = FREE[name]
    after = check(parse(f"g ({inputs}) => ({output}) {CONSTANTS} {{ {body} }}"), PASS, tmp_path, min_db=np.inf)
    assert "INT64" not in types(after).values()
    assert after.graph.inputs[0].name == "i" and after.graph.outputs[0].name == "y"
    made = [node.outputs[0].dtype for node in every_node(after)]
    assert D.INT64 not in made
    assert "Cast" not in ops(after) or "cast to" in name or "from float" in name


INSISTING = {
    "scatter": ("float[8,4] x, int64[2,1] i, float[2,4] u", "float[8,4] y", "y = ScatterND(x, i, u)"),
    "gather nd": ("float[8,4] x, int64[2,1] i", "float[2,4] y", "y = GatherND(x, i)"),
    "arg max": ("float[2,3] x", "int64[2,1] y", "y = ArgMax<axis=1>(x)"),
    "top k": ("float[2,3] x", "int64[2,2] y", "v, y = TopK(x, two)"),
    "arg max plus one": ("float[2,3] x", "int64[2,1] y", "a = ArgMax<axis=1>(x) y = Add(a, one)"),
    "both ways": ("float[8,4] x, int64[2,1] i", "float[2,4] y, int64[2,1] j", "j = Add(i, one) y = GatherND(x, j)"),
    "arg max also inside": ("float[2,3] x", "int64[2,1] y, float[2,1] z", "y = ArgMax<axis=1>(x) z = Cast<to=1>(y)"),
}


@pytest.mark.parametrize("name", INSISTING)
def test_casts_stand_where_an_operator_insists(tmp_path: Path, name: str) -> None:
    inputs, output, body = INSISTING[name]
    text = f"g ({inputs}) => ({output}) <int64[1] one = {{1}}, int64[1] two = {{2}}> {{ {body} }}"
    feeds = random_feeds(parse(text))
    if "i" in feeds:
        feeds["i"] = np.array([[0], [2]])
    after = check(parse(text), PASS, tmp_path, feeds=feeds, min_db=np.inf)
    assert "INT64" not in types(after).values()
    assert ops(after).count("Cast") == 1 + ("Cast" in body)


LEFT = {
    "arg max inside": "a = ArgMax<axis=1>(x) y = Gather<axis=0>(w, a)",
    "parameters": "n = Neg(x) y = Slice(n, zero, one, one, one)",
    "shapes": "a = Shape<start=0, end=1>(x) t = Concat<axis=0>(a, minus) y = Reshape(x, t)",
    "int32": "c = Cast<to=6>(x) y = Gather<axis=0>(w, c)",
    "float16 and back": "h = Cast<to=10>(x) y = Cast<to=1>(h)",
    "through int": "h = Cast<to=6>(x) y = Cast<to=1>(h)",
    "through bool": "h = Cast<to=9>(x) y = Cast<to=1>(h)",
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(tmp_path: Path, name: str) -> None:
    text = f"""g (float[2,3] x) => (y) <float[8,4] w = {{{",".join(map(str, range(32)))}}}, int64[1] zero = {{0}},
        int64[1] one = {{1}}, int64[1] minus = {{-1}}> {{ {LEFT[name]} }}"""
    model = parse(text)
    shape = {"arg max inside": [2, 1, 4], "parameters": [2, 1], "int32": [2, 3, 4]}.get(name, [2, 3])
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, shape))
    check(model, PASS, tmp_path, changes=0)


def test_a_shared_constant_keeps_int64_where_it_must(tmp_path: Path) -> None:
    text = """g (int64[1,2] i, float[2] x) => (int64[1,2] y, float[1,2] z) <int64[2] c = {1,2}> {
        y = Mul(i, c) z = Reshape(x, c) }"""
    after = check(parse(text), PASS, tmp_path, min_db=np.inf)
    assert sorted(v.dtype.name for v in after.graph.initializers.values()) == ["INT32", "INT64"]


def test_bodies_of_loops(tmp_path: Path) -> None:
    text = """g (int64[2] i, int64 n) => (int64[2] y, int64[3,2] all) <int64 three = {3}, bool go = {1}> {
        y, all = Loop(three, go, i) <body = body (int64 k, bool c, int64[2] v) => (bool d, int64[2] w, int64[2] s)
        <int64[1] one = {1}> { d = Identity(c) w = Add(v, one) s = Mul(w, w) }> }"""
    model, changes = narrowed(parse(text), tmp_path)
    assert set(types(model).values()) == {"INT32"} and changes
    feeds = {"i": np.array([3, 4]), "n": np.array(0)}
    have, want = run(tmp_path / "b.onnx", feeds), run(tmp_path / "a.onnx", feeds)
    assert have["y"].tolist() == want["y"].tolist() == [6, 7] and have["all"].tolist() == want["all"].tolist()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    big = parse("g (int64[2] i) => (int64[2] y) <int64[2] far = {1,3000000000}> { y = Add(i, far) }")
    with pytest.raises(RingstepError, match=r"'far': 3000000000 does not fit in int32"):
        narrowed(big, tmp_path)
    assert narrowed(big, tmp_path, "xnnpack")[1] == []


def test_float64(tmp_path: Path) -> None:
    text = """g (double[2,3] x) => (double[2,3] y, float[2,3] z) <double[3] c = {1.5,-2.25,1e-3}> {
        h = Constant<value = double {0.5}>() a = Mul(x, c) y = Add(a, h) e = Exp(y) z = Cast<to=1>(e) }"""
    for name in ("qnn-htp", "ort-mobile"):
        after = check(parse(text), PASS, tmp_path / name, target=find_target(name))
        assert set(types(after).values()) == {"FLOAT"} and "Cast" not in ops(after)


def test_float64_that_does_not_fit(tmp_path: Path) -> None:
    def far(number: float) -> onnx.ModelProto:
        model = parse("g (double[2] x) => (double[2] y) { y = Add(x, far) }")
        model.graph.initializer.append(numpy_helper.from_array(np.array([0, number]), "far"))
        return model

    with pytest.raises(RingstepError, match="'far': 1e\\+200 does not fit in float32"):
        narrowed(far(1e200), tmp_path)
    model, _ = narrowed(far(float(np.finfo(np.float64).min)), tmp_path)
    assert model.graph.initializers["far"].const_value.numpy()[1] == np.finfo(np.float32).min


CHAINS = {
    "float16 to float64 to float16": ("float16[2,3] x", "float16[2,3] y", "a = Cast<to=11>(x) y = Cast<to=10>(a)", 0),
    "float16 to float32 to int32": ("float16[2,3] x", "int32[2,3] y", "a = Cast<to=1>(x) y = Cast<to=6>(a)", 1),
    "int32 to int64 to float": ("int32[2,3] x", "float[2,3] y", "a = Cast<to=7>(x) y = Cast<to=1>(a)", 1),
    "bool to int64 to float": ("bool[2,3] x", "float[2,3] y", "a = Cast<to=7>(x) y = Cast<to=1>(a)", 1),
    "three": ("float16[2,3] x", "int32[2,3] y", "a = Cast<to=1>(x) b = Cast<to=11>(a) y = Cast<to=6>(b)", 1),
    "to its own": ("float[2,3] x", "float[2,3] y", "n = Neg(x) y = Cast<to=1>(n)", 0),
    "own input": ("float[2,3] x", "float[2,3] y", "y = Cast<to=1>(x)", 0),
    "middle returned": ("float16[2,3] x", "int32[2,3] y, float[2,3] a", "a = Cast<to=1>(x) y = Cast<to=6>(a)", 2),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains(tmp_path: Path, name: str) -> None:
    inputs, output, body, left = CHAINS[name]
    after = check(parse(f"g ({inputs}) => ({output}) {{ {body} }}"), PASS, tmp_path, min_db=np.inf,
                  target=find_target("xnnpack"))  # fmt: skip
    assert ops(after).count("Cast") == left


def test_exact_casts() -> None:
    """holds() against numpy: the extremes of the narrow type, and its last odd number, survive the round trip."""
    ours = {D.FLOAT16: np.float16, D.FLOAT: np.float32, D.DOUBLE: np.float64, D.INT8: np.int8, D.UINT8: np.uint8,
            D.INT16: np.int16, D.INT32: np.int32, D.INT64: np.int64, D.BOOL: np.bool_, D.UINT32: np.uint32}  # fmt: skip
    for narrow, a in ours.items():
        if narrow == D.BOOL:
            values = np.array([False, True])
        elif np.issubdtype(a, np.integer):
            info = np.iinfo(a)
            values = np.array([info.min, info.max, info.max - 1, 1, 0], a)
        else:
            info = np.finfo(a)
            values = np.array([info.min, info.max, info.smallest_subnormal, 1 + info.eps, -1, 0.5], a)
        for wide, b in ours.items():
            with np.errstate(all="ignore"):
                survives = bool((values.astype(b).astype(a) == values).all())
                same = all(int(v) == int(w) for v, w in zip(values, values.astype(b), strict=True)) \
                    if np.issubdtype(a, np.integer) and np.isfinite(values.astype(b)).all() else survives  # fmt: skip
            assert holds(narrow, wide) == (survives and same), (narrow, wide)


BOOLS = {
    "equal": "y = Equal(a, b)",
    "equal to a constant": "y = Equal(a, no)",
    "where": "y = Where(a, b, no)",
    "pad": "p = Pad(a, pads) s = Not(p) y = Slice(s, zero, three, one)",
    "reduce max": "m = ReduceMax(a, one) y = And(m, b)",
    "reduce min": "m = ReduceMin(a, one) y = Or(m, b)",
    "gather nd": "g = GatherND(a, cells) y = And(g, b)",
    "scatter": "y = ScatterElements(a, rows, b)",
}


@pytest.mark.parametrize("name", BOOLS)
def test_bools_go_through_what_htp_takes(tmp_path: Path, name: str) -> None:
    text = f"""g (bool[2,3] a, bool[2,3] b) => (bool[2,3] y) <bool[1] no = {{0}}, int64[4] pads = {{0,0,0,2}},
        int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] three = {{3}}, int64[2,3] rows = {{0,1,0,1,0,1}},
        int64[2,3,2] cells = {{0,0,0,1,1,2,1,1,1,0,0,2}}> {{ {BOOLS[name]} }}"""
    folder = tmp_path
    if name == "where":  # ONNX Runtime lacks it on bools, so there is nothing to compare with
        model, changes = narrowed(parse(text), folder)
        feeds = random_feeds(parse(text))
        assert changes and run(folder / "b.onnx", feeds)["y"].tolist() == (feeds["a"] & feeds["b"]).tolist()
        assert PASS.run(model, find_target("qnn-htp")) == []
        return
    after = check(parse(text), PASS, folder / "htp", min_db=np.inf)
    assert all(node.inputs[0].dtype == ir.DataType.FLOAT for node in after.graph if node.op_type == "GatherND")
    check(parse(text), PASS, folder / "cpu", changes=0, target=find_target("xnnpack"))


def test_what_is_folded_away_need_not_fit(tmp_path: Path) -> None:
    text = """g (float[2] x) => (int32[2] y) <int64[2] far = {-9223372036854775800, 3}, int64[2] near = {1, 2}>
        { least = Max(far, near) i = Cast<to=7>(x) s = Add(i, least) y = Cast<to=6>(s) }"""
    _, changes = narrowed(parse(text), tmp_path)
    assert "far" not in {change.node for change in changes}
    with pytest.raises(RingstepError, match="does not fit in int32"):
        narrowed(parse(text.replace("Add(i, least)", "Add(i, far)")), tmp_path)


def test_gather_nd_keeps_int64(tmp_path: Path) -> None:
    text = "g (float[4] x, int64[3,1] c) => (int64[3] y) { i = Cast<to=7>(x) y = GatherND(i, c) }"
    after = check(parse(text), PASS, tmp_path, min_db=np.inf)
    assert [n.inputs[0].dtype for n in after.graph if n.op_type == "GatherND"] == [ir.DataType.INT64]


@pytest.mark.parametrize("kind", ["uint8", "int16"])
def test_small_integers_become_float_through_int32_on_htp(tmp_path: Path, kind: str) -> None:
    body = "y = Cast<to=1>(x) i = Cast<to=6>(x) z = Cast<to=1>(i)"
    text = f"g ({kind}[1,4] x) => (float[1,4] y, float[1,4] z) {{ {body} }}"
    feeds = {"x": np.array([[0, 1, 100, 127]], kind)}
    after = check(parse(text), PASS, tmp_path / "htp", feeds=feeds, changes=1, min_db=np.inf)
    assert ops(after).count("Cast") == 4
    model, _ = narrowed(parse(text), tmp_path)
    assert any(done.changes for done in sanitize(model, find_target("qnn-htp"), PASSES))
    assert sum(node.op_type == "Cast" for node in model.graph) == 2  # both outputs; no other pass undoes it
    after = check(parse(text), PASS, tmp_path / "cpu", feeds=feeds, target=find_target("xnnpack"), min_db=np.inf)
    assert ops(after).count("Cast") == 2


def test_bools_that_htp_takes_stay(tmp_path: Path) -> None:
    text = """g (bool[2,3] a, float[2,3] x) => (float[2,3] y, bool[2,3] n) <float zero = {0}> {
        c = Greater(x, zero) d = And(a, c) n = Not(d) y = Where(n, x, zero) }"""
    check(parse(text), PASS, tmp_path, changes=0)


def test_a_constant_that_is_an_output_as_well(tmp_path: Path) -> None:
    model = parse("""g (float[4] x) => (int64[1] a, float[2] y, int64[2] i) <int64[1] a = {2}> {
      y, i = TopK(x, a)
    }""")
    check(model, PASS, tmp_path)
