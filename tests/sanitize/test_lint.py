"""Every rule of the lint: a model that breaks it, a look-alike that does not, through the API and the command."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from lint_models import EYE, F32, GELU, PAIRS, Pair, Text, quantised, save, unary
from onnx import TensorProto, helper

from ringstep import console
from ringstep.errors import RingstepError
from sanitize import lint_docs
from sanitize.lint import Finding, lint, lint_file
from sanitize.lint_command import lint as command
from sanitize.model_file import read_model
from sanitize.rules import RULES, weights
from sanitize.support import load_support
from sanitize.target import find_target

ANY = Pair(("", {}), ("", {}))


def findings(text: Text, folder: Path, pair: Pair = ANY) -> list[Finding]:
    return lint_file(save(text, folder), find_target(pair.target, pair.chip, pair.precision))


@pytest.fixture(params=PAIRS)
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "inline-weights":
        monkeypatch.setattr(weights, "PROTOBUF_BYTES", 300)
    return str(request.param)


def test_rule(rule: str, tmp_path: Path) -> None:
    pair = PAIRS[rule]
    found = [f for f in findings(pair.bad, tmp_path, pair) if f.rule == rule]
    assert found
    assert all(f.why and f.fix and f.what for f in found)
    assert rule not in {f.rule for f in findings(pair.good, tmp_path, pair)}


def test_command(rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = PAIRS[rule]
    options = ["--target", pair.target, *(["--chip", pair.chip] if pair.chip else [])]
    for text, expected in ((pair.bad, True), (pair.good, False)):
        path = save(text, tmp_path)
        code = console.run(command, [str(path), *options, "--json"])
        body = json.loads(capsys.readouterr().out)
        assert (rule in {f["rule"] for f in body["findings"]}) == expected
        assert code == (1 if body["counts"]["error"] else 0)
        console.run(command, [str(path), *options, "-v"])
        shown = capsys.readouterr().out
        assert (rule in shown) == expected
        assert shown.splitlines()[-1].startswith("model.onnx for ")


def test_every_rule_has_a_pair() -> None:
    assert {rule.id for rule in RULES} == {*PAIRS, "graph-memory"}
    assert len({rule.id for rule in RULES}) == len(RULES)


def sparse_model(folder: Path, gib: float) -> Path:
    """A MatMul with weights of that size in a file of holes."""
    columns = int(gib * 2**30) // 4 // 4096
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4096, columns])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(4096 * columns * 4))):
        tensor.external_data.add(key=key, value=value)
    with (folder / "w.bin").open("wb") as stream:
        stream.truncate(4096 * columns * 4)
    value = lambda name, size: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [value("x", 4096)], [value("y", columns)], [tensor])
    path = folder / "large.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), str(path))
    return path


@pytest.mark.parametrize(
    ("gib", "chip", "parts"),
    [(3.7, "sm8450", None), (4.1, "sm8450", 2), (8.5, "sm8450", 3), (6.8, "sm8650", None), (7.2, "sm8650", 2)],
)
def test_graph_memory_counts_halves(tmp_path: Path, gib: float, chip: str, parts: int | None) -> None:
    found = lint_file(sparse_model(tmp_path, gib), find_target("qnn-htp", chip))
    said = [f"cut it into {parts} parts" in f.what for f in found if f.rule == "graph-memory"]
    assert said == ([True] if parts else [])


def test_bodies_are_linted(tmp_path: Path) -> None:
    text = """(bool c, float[2,8] x) => (float[2,8] y) { y = If(c) <
        then_branch = a () => (float[2,8] t) { n = IsNaN(x) t = Where(n, x, x) },
        else_branch = b () => (float[2,8] e) { z = Constant<value = int64 {3}>()
            e = Loop(z, , x) <body = l (int64 i, bool k, float[2,8] v) => (bool o, float[2,8] w)
                { o = Identity(k) w = Acosh(v) }> }> }"""
    found = findings((text, {}), tmp_path)
    guard = next(f for f in found if f.rule == "nan-guard")
    assert guard.where == "If/then_branch"
    refused = {f.what.split()[0]: f.where for f in found if f.rule == "unsupported-operator"}
    assert refused == {"Loop": "If/else_branch", "Acosh": "If/else_branch/Loop/body"}


def test_what_folds_is_not_linted(tmp_path: Path) -> None:
    text = """(float[4,8] x) => (float[4,8] y)
        { s = Shape(x) n = ReduceProd(s) f = Cast<to = 1>(n) g = Acosh(f) y = Add(x, g) }"""
    assert not findings((text, {}), tmp_path)


def test_int64_where_int32_is_taken_names_the_pass(tmp_path: Path) -> None:
    text = "(int32[4,8] x) => (int32[8,4] y) { a = Cast<to = 7>(x) b = Transpose(a) y = Cast<to = 6>(b) }"
    found = findings((text, {}), tmp_path)
    assert [(f.rule, f.fixed_by) for f in found] == [("unsupported-operator", "narrow-types")]


def test_a_cache_that_grows_is_a_warning(tmp_path: Path) -> None:
    text = (
        "(float[1,2,1,8] x, float[1,2,4,8] past_key_values__0__key) => (float[1,2,5,8] present__0__key)"
        " { present__0__key = Concat<axis = 2>(past_key_values__0__key, x) }"
    )
    found = findings((text, {}), tmp_path)
    assert [(f.rule, f.severity) for f in found] == [("cache-shape", "warning")]
    # ringstep's own append caches return the new entries alone.
    text = "(float[1,2,1,8] x, float[1,2,4,8] past_key_0) => (float[1,2,1,8] new_key_0, float[1,2,5,8] y)" \
           " { new_key_0 = Neg(x) y = Concat<axis = 2>(past_key_0, x) }"  # fmt: skip
    assert not findings((text, {}), tmp_path)


def test_float_models_for_a_chip_without_floats(tmp_path: Path) -> None:
    text = "(float[4,8] x) => (float[4,8] y) { y = Tanh(x) }"
    found = findings((text, {}), tmp_path, dataclasses.replace(ANY, chip="qcs6490"))
    assert [(f.rule, f.node) for f in found] == [("floats", "")]


def test_equal_bytes_stored_once_are_no_duplicate(tmp_path: Path) -> None:
    weight = np.arange(4096, dtype=F32).reshape(8, 512)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[1,8] x) => (float[1,512] y, float[1,512] z)'
        " { y = MatMul(x, a) z = MatMul(x, b) }"
    )
    (tmp_path / "w.bin").write_bytes(weight.tobytes())
    for name in "ab":
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=weight.shape)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
        model.graph.initializer.append(tensor)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert not lint_file(path, find_target("qnn-htp", "sm8750"))


@pytest.mark.parametrize("target", ["qnn-htp", "ort-mobile", "xnnpack"])
def test_a_clean_layer_is_clean(target: str, tmp_path: Path) -> None:
    text = """(float[4,8] x, float[1,1,4,4] m) => (float[4,8] y) { n = RMSNormalization(x, s) q = MatMul(n, w)
        h = Reshape(q, d) k = Transpose<perm = [0, 1, 3, 2]>(h) a = MatMul(h, k) b = Add(a, m) p = Softmax(b)
        v = MatMul(p, h) r = Reshape(v, e) g = Sigmoid(r) u = Mul(r, g) y = Add(x, u) }"""
    constants = {"s": np.ones(8, F32), "w": EYE, "d": np.array([1, 1, 4, 8]), "e": np.array([4, 8])}
    found = findings((text, constants), tmp_path, dataclasses.replace(ANY, target=target, chip=None))
    # Most of a model runs beside XNNPACK, which is worth a note and no more.
    assert {f.rule for f in found if f.severity != "note"} <= ({"beside-xnnpack"} if target == "xnnpack" else set())


def chain(count: int) -> onnx.ModelProto:
    ops = ("Add", "Mul", "IsNaN", "Where")
    nodes, last = [], "x"
    for index in range(count):
        op, out = ops[index % 4], f"v{index}"
        inputs = {"Add": [last, last], "Mul": [last, "c"], "IsNaN": [last]}.get(op, [last, "c", "c"])
        nodes.append(helper.make_node(op, inputs, [out], f"n{index}"))
        last = out
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4])
    constant = helper.make_tensor("c", TensorProto.FLOAT, [2, 4], [1.0] * 8)
    graph = helper.make_graph(nodes, "g", [value("x")], [value(last)], [constant])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_time_is_linear(tmp_path: Path) -> None:
    seconds = []
    for count in (4000, 16000):
        path = tmp_path / f"{count}.onnx"
        path.write_bytes(chain(count).SerializeToString())
        # The least is what other processes disturb least.
        seconds.append(min(lint_seconds(path, count) for _ in range(3)))
    assert seconds[1] < 8 * seconds[0] + 0.1


def lint_seconds(path: Path, count: int) -> float:
    model = read_model(path)
    start = time.process_time()
    found = lint(model, find_target("qnn-htp", "sm8750"), path)
    seconds = time.process_time() - start
    assert sum(f.rule == "nan-guard" for f in found) == count // 4
    return seconds


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(PAIRS["norm-rows"].bad, tmp_path)
    assert console.run(command, [str(path), "--chip", "galaxy-s24"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "model.onnx for qnn-htp sm8650 fp16: 1 error"
    assert "norm-rows: reshape to [rows, size] around it" in out
    assert console.run(command, [str(save(PAIRS["nan-guard"].bad, tmp_path))]) == 0
    assert "`ringstep sanitize` does it (pass nan-guards)" in capsys.readouterr().out
    assert console.run(command, [str(tmp_path / "none.onnx")]) == 2
    assert console.run(command, [str(path), "--target", "qnn"]) == 2
    assert console.run(command, [str(path), "--target", "xnnpack", "--chip", "sm8750"]) == 2
    assert "ringstep: error:" in capsys.readouterr().err


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match=r"none\.onnx"):
        lint_file(tmp_path / "none.onnx", find_target("qnn-htp"))


def test_docs_are_current() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "lint.md").read_text("utf-8")
    assert text == lint_docs.text(), "run python -m sanitize.lint_docs > docs/lint.md"


def test_the_data_names_its_versions() -> None:
    versions = load_support("qnn-htp").versions
    assert set(versions) == {"v68", "v69", "v73", "v75", "v79", "v81"}
    assert all("QAIRT" in text for text in versions.values())
    assert dataclasses.asdict(load_support("ort-mobile"))["versions"]


def test_erf_is_taken_in_a_gelu_alone(tmp_path: Path) -> None:
    constants = {"r": F32(2**0.5), "o": F32(1), "h": F32(0.5)}
    assert {f.rule for f in findings((GELU, constants), tmp_path)} == {"inaccurate-operator"}
    assert "unsupported-operator" in {f.rule for f in findings((GELU, constants | {"o": F32(2)}), tmp_path)}


@pytest.mark.parametrize(("scale", "found"), [(1 / 16384, True), (1 / 8192, False)])
def test_log_needs_a_coarse_output_scale(scale: float, found: bool, tmp_path: Path) -> None:
    text, constants = quantised("g = Log(f)")
    text = text.replace("QuantizeLinear(g, s, z)", "QuantizeLinear(g, t, z)")
    rules = {f.rule for f in findings((text, constants | {"t": F32(scale)}), tmp_path)}
    assert ("output-encoding" in rules) == found


@pytest.mark.parametrize(("shape", "kind", "severity"), [
    ("1,9,2,64", "float", "error"), ("1,16,2,64", "float", "warning"), ("1,16,2,32", "float", "error"),
    ("1,16,2,64", "float16", "error"),
])  # fmt: skip
def test_norm_rows_are_as_bad_as_they_were_seen(shape: str, kind: str, severity: str, tmp_path: Path) -> None:
    size = int(shape.rsplit(",", 1)[1])
    constants = {"w": np.ones(size, np.float16 if kind == "float16" else F32)}
    text = f"({kind}[{shape}] x) => ({kind}[{shape}] y) {{ y = RMSNormalization(x, w) }}"
    assert [(f.rule, f.severity) for f in findings((text, constants), tmp_path)] == [("norm-rows", severity)]


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_norms_are_judged_by_their_weights(op: str, tmp_path: Path) -> None:
    asked = dataclasses.replace(ANY, chip="sm8650", precision="a16")
    text = f"(float[4,8] x) => (float[4,8] y) {{ y = {op}(x, w) }}"
    assert not findings((text, {"w": np.ones(8, F32)}), tmp_path, asked)  # how they will be quantised is open
    body = f"w = DequantizeLinear(k, s) g = {op}(f, w)"
    assert not findings(quantised(body, k=np.ones(8, np.uint8)), tmp_path, asked)
    (found,) = findings(quantised(body, k=np.ones(8, np.int8)), tmp_path, asked)
    assert found.rule == "unsupported-operator" and "uint8" in found.fix and found.fixed_by is None


def test_fp32_is_not_judged_by_fp16(tmp_path: Path) -> None:
    assert not findings(unary("Softplus"), tmp_path, dataclasses.replace(ANY, precision="fp32"))
    assert findings(unary("Softplus"), tmp_path)


def test_what_no_pass_fixes_names_none(tmp_path: Path) -> None:
    for text in (quantised("g = Softplus(f)"), quantised("g = Gelu(f)")):
        assert all(f.fixed_by is None for f in findings(text, tmp_path) if f.rule == "inaccurate-operator")
    text = "(int64[4] i, int64[3,1] c) => (int64[3] y) { y = GatherND(i, c) }"
    assert {f.fixed_by for f in findings((text, {}), tmp_path) if f.rule == "unsupported-operator"} == {None}


def test_types_are_known_behind_com_microsoft_conversions(tmp_path: Path) -> None:
    text, constants = quantised("g = Neg(f)")
    text = text.replace(" QuantizeLinear", " com.microsoft.QuantizeLinear")
    text = text.replace(" DequantizeLinear", " com.microsoft.DequantizeLinear")
    model = read_model(save((text, constants), tmp_path))
    assert [(n.domain, str(n.outputs[0].dtype), n.outputs[0].shape) for n in model.graph][1] == ("", "FLOAT", (4, 8))
    assert model.graph[0].domain == "com.microsoft"
