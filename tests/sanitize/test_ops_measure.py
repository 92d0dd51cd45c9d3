"""Forms compute what they claim, and the measuring itself is right: against torch and ONNX Runtime's CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from ringstep.devices import find_device
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db
from sanitize.ops import measure as measuring
from sanitize.ops.catalog import all_forms
from sanitize.ops.command import ops
from sanitize.ops.forms import Case, Form, Ops, elementwise
from sanitize.ops.measure import Grid, compare, dequantise, grid_of, measure, quantise
from sanitize.ops.table import load, read

FORMS = {form.name: form for form in all_forms()}
SM8750 = find_device("sm8750").chip
# Approximations, in dB on -8..8; everything else is an identity.
FITS = {"Gelu/newton": 80, "Gelu/abs": 80, "Gelu/tanh": 80, "Gelu/relu": 86, "Gelu/relu5": 105, "GeluTanh/relu": 85,
        "Softplus/fit": 93, "Mish/fit": 99, "Erf/tanh": 70, "RMSNorm/scaled": 35}  # fmt: skip
# onnx's reference evaluator has none of these, or another idea of them.
NOT_EVALUATED = {"RMSNorm/LpNormalization"}

TRUTH = {
    "Sigmoid": torch.sigmoid, "SiLU": F.silu, "Gelu": F.gelu, "Tanh": torch.tanh, "Erf": torch.erf,
    "GeluTanh": lambda x: F.gelu(x, approximate="tanh"), "QuickGelu": lambda x: x * torch.sigmoid(1.702 * x),
    "HardSigmoid": F.hardsigmoid, "HardSwish": F.hardswish, "Softplus": F.softplus, "Elu": F.elu, "Mish": F.mish,
    "Exp": torch.exp, "Sin": torch.sin, "Cos": torch.cos, "Log": torch.log, "Sqrt": torch.sqrt, "Square": torch.square,
    "Rsqrt": torch.rsqrt, "Reciprocal": torch.reciprocal, "LeakyRelu": F.leaky_relu, "Relu": F.relu, "Abs": torch.abs,
    "Softmax": lambda x: torch.softmax(x, -1), "LogSoftmax": lambda x: torch.log_softmax(x, -1),
    "RMSNorm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5),
    "LayerNorm": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-5),
    "ReduceMean": lambda x: x.mean(-1, keepdim=True), "ReduceSum": lambda x: x.sum(-1, keepdim=True),
    "ReduceMax": lambda x: x.amax(-1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(name for name in FORMS if name.split("/")[0] in TRUTH))
def test_the_truth_is_torchs(name: str) -> None:
    form = FORMS[name]
    for case in form.cases:
        truth = TRUTH[name.split("/")[0]](torch.from_numpy(case.inputs[0])).numpy()
        if name.split("/") == ["Square", "scaled"]:
            truth = truth / 65536.0
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(form.exact(*case.inputs), truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_form_computes_its_function(name: str) -> None:
    form = FORMS[name]
    if name in NOT_EVALUATED:
        pytest.skip("the reference evaluator lacks it")
    for case in form.a16_cases:
        if max(abs(case.low), abs(case.high)) > 8.0:
            continue
        nodes, names = measuring._nodes(form, case.size, len(case.inputs))
        got = measuring._evaluate(nodes, dict(zip(names, case.inputs, strict=True)))["y"]
        assert snr_db(form.exact(*case.inputs), got) > FITS.get(name, 90), case


def test_names_are_unique_and_fit_the_pattern() -> None:
    assert len(FORMS) == len(all_forms())
    assert all(name.count("/") <= 1 for name in FORMS)


def test_compare_on_fp16() -> None:
    case = Case(0.0, 1.0, 1, ())
    truth = np.array([1.0, 2.0, 1e-9, 70000.0, 4.0, 1e-5, 2e-5])
    row = compare("f", case, truth, np.array([1.0, 2.002, 0.0, np.nan, np.nan, 0.0, 0.0]))
    assert row is not None
    assert (row.count, row.nonfinite, row.flushed, row.snr_db) == (6, 1, 2, -300.0)
    assert row.max_abs == 0.002 and row.max_rel == 0.001 and row.max_steps == 0.0
    clean = compare("f", case, truth[:3], np.array([1.0, 2.0, 0.0]))
    assert clean is not None and clean.snr_db == clean.ideal_db == 300.0  # 1e-9 is zero in fp16
    garbage = compare("f", case, np.array([1e-9]), np.array([3.0]))
    assert garbage is not None and garbage.snr_db == -300.0 and garbage.ideal_db == 300.0
    assert compare("f", case, np.array([1e9]), np.array([1.0])) is None
    thirds = compare("f", case, np.array([1.0 / 3.0]), np.array([np.float64(np.float16(1.0 / 3.0))]))
    assert thirds is not None and thirds.snr_db == thirds.ideal_db == pytest.approx(72.2, abs=0.1)


def test_grids_hold_zero_and_both_ends() -> None:
    for low, high in ((-3.0, 5.0), (0.5, 2.0), (-7.0, -1.0), (0.0, 1e-20)):
        grid = grid_of(np.array([low, high]))
        back = dequantise(quantise(np.array([low, 0.0, high]), grid), grid)
        assert grid.zero.dtype == np.uint16 and back[1] == 0.0
        np.testing.assert_allclose(back[[0, 2]], [low, high], atol=grid.scale)
    grid = grid_of(np.array([-3.0, 5.0]), signed=True)
    assert grid == Grid(float(np.float32(5.0 / 32767.0)), np.array(0, np.int16))
    assert quantise(np.array([-5.0, 5.0]), grid).tolist() == [-32767, 32767]


def on_cpu(model: bytes, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, int]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0], 3


ON_CPU = ("Sigmoid/native", "SiLU/abs", "Softmax/explicit", "MatMul", "Div/native", "ReduceMean")


@pytest.mark.parametrize("name", ON_CPU)
def test_the_quantised_graph_is_right_on_a_cpu(name: str) -> None:
    for row in measuring._a16(FORMS[name], on_cpu).rows:
        assert row.max_steps < 30 and row.snr_db > 60 and row.count > 0, row


def test_an_error_of_one_bit_is_seen() -> None:
    def half_wrong(model: bytes, feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, int]:
        (x,) = feeds.values()
        return np.where(np.arange(x.shape[1]) % 2, x, np.nextafter(x, np.float16(np.inf))), 1

    form = Form("Same", lambda op, x: op.Identity(x), lambda x: x, elementwise(((1.0, 1.5),)), ())
    (row,) = measuring._fp16(form, half_wrong).rows
    assert row.max_abs == float(f"{2.0**-10:.3g}") and row.snr_db == pytest.approx(65.0, abs=1.5)


def test_constants_and_names_of_a_graph() -> None:
    op = Ops(8)
    y = op.Add(op.Mul("x", 2.0), np.ones(3))
    assert y == "Add_1" and list(op.constants) == ["constant_0", "constant_1"]
    assert [list(node.input) for node in op.nodes] == [["x", "constant_0"], ["Mul_0", "constant_1"]]


def test_the_simulator_gives_the_committed_figures() -> None:
    pytest.importorskip("onnxruntime_qnn")
    chosen = ["Neg", "Sigmoid/native", "SiLU/abs", "Erf/native", "Softmax/native"]
    table = measure(SM8750, "fp16", [FORMS[name] for name in chosen])
    assert table.forms == {name: load("sm8750", "fp16").forms[name] for name in chosen}
    assert table.version == load("sm8750", "fp16").version
    assert table.forms["Erf/native"].refused == "the plugin leaves it to the CPU"
    a16 = measure(SM8750, "a16", [FORMS["Tanh"], FORMS["MatMul/dynamic-int16"], FORMS["Mish/native"]])
    assert a16.forms == {name: load("sm8750", "a16").forms[name] for name in a16.forms}


def test_a_chip_without_fp16_is_refused() -> None:
    pytest.importorskip("onnxruntime_qnn")
    with pytest.raises(RingstepError, match="qcs6490 has no fp16"):
        measure(find_device("qcs6490").chip, "fp16", [])


def test_the_command_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(chip, precision, forms, done):
        table = load(chip.name, precision)
        return dataclasses.replace(table, forms={form.name: table.forms[form.name] for form in forms})

    monkeypatch.setattr(measuring, "measure", fake)
    run = lambda *args: CliRunner().invoke(ops, ["--chip", "galaxy-s25", *map(str, args)])
    done = run("--op", "silu", "--op", "erf/n", "--out", tmp_path / "t.json")
    assert done.exit_code == 0 and "simulated" in done.output and "SiLU/abs" in done.output, done.output
    assert "Erf/native: refused: the plugin leaves it to the CPU" in done.output
    assert set(read(tmp_path / "t.json").forms) == {name for name in FORMS if "SiLU" in name} | {"Erf/native"}
    body = json.loads(run("--op", "Neg", "--json").output)
    assert body["chip"] == "sm8750" and body["simulated"] is True and body["forms"][0]["rows"][0]["snr_db"] == 300.0
    missing = run("--op", "Sigmiod")
    assert isinstance(missing.exception, RingstepError) and "--op Sigmiod" in str(missing.exception)
    astray = run("--op", "Neg", "--out", tmp_path / "none" / "t.json")
    assert isinstance(astray.exception, RingstepError) and "its folder does not exist" in str(astray.exception)
    wrong = run("--op", "Neg", "--plot", tmp_path / "p.pdf")
    assert isinstance(wrong.exception, RingstepError) and ".svg or .png" in str(wrong.exception)


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from sanitize.ops.plot import draw

    for precision in ("fp16", "a16"):
        draw(load("sm8750", precision), tmp_path / "p.svg", ["SiLU", "Softmax"])
        text = (tmp_path / "p.svg").read_text()
        assert "simulated" in text and "native (2)" in text and "Softmax" in text
    with pytest.raises(RingstepError, match="no figures of Nothing"):
        draw(load("sm8750", "fp16"), tmp_path / "p.svg", ["Nothing"])
