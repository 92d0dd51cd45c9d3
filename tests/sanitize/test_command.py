"""`ringstep sanitize` as a user calls it: what is written, refused, told, and what options change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import parse, run

import sanitize.order
from exporters.cli import cli
from ringstep import console
from ringstep.errors import RingstepError
from sanitize import graph as graphs
from sanitize.command import choose_passes, sanitize_file
from sanitize.passes import Change, Pass
from sanitize.pipeline import Applied, promised
from sanitize.target import Target

TEXT = """g (float[2,8] x, int64[3] i) => (float[3,8] y) <float half = {0.5}> {
  s = Sigmoid(x)
  m = Mul(x, s)
  k = Identity(m)
  y = Gather(k, i)
}"""


def invoke(*args: object) -> int:
    return console.run(cli, ["-q", "sanitize", *map(str, args)])


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "settings", console.Settings())  # those of a test before were for its process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(parse(TEXT), tmp_path / "a.onnx")
    return tmp_path / "a.onnx"


def wrong(model: ir.Model, target: Target) -> list[Change]:
    """A pass that breaks: x * sigmoid(x) becomes x + sigmoid(x)."""
    for node in graphs.every_node(model):
        if node.op_type == "Mul":
            graphs.replace(node.outputs[0], graphs.insert(node, "Add", node.inputs, name="wrong", like=node.outputs[0]))
            graphs.remove(node)
            return [Change(node.name or "", "broken")]
    return []


@pytest.mark.parametrize("min_db", [float("inf"), 60.0])
def test_verify_refuses_a_pass_that_breaks(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], min_db: float
) -> None:
    broken = Pass("broken", "breaks", wrong, min_db=min_db)
    monkeypatch.setattr(sanitize.order, "PASSES", (broken,))
    out = model.parent / "out.onnx"
    assert invoke(model, "-o", out, "--verify") == 2
    assert not out.exists() and sorted(p.name for p in model.parent.iterdir()) == ["a.onnx"]
    error = capsys.readouterr().err
    assert "output 'y' is" in error and "nothing was written" in error and error.count("\n") == 1
    before = model.read_bytes()
    assert invoke(model, "--in-place", "--verify") == 2 and model.read_bytes() == before
    assert invoke(model, "-o", out) == 0 and out.exists()


def test_without_out_it_only_tells(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert invoke(model) == 0
    out = capsys.readouterr().out
    assert "accurate-sigmoid" in out and "nothing written" in out
    assert [p.name for p in model.parent.iterdir()] == ["a.onnx"] and model.read_bytes() == before


def test_in_place_and_again(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feeds = {"x": np.linspace(-8, 8, 16, dtype=np.float32).reshape(2, 8), "i": np.array([1, 0, 1])}
    want = run(model, feeds)["y"]
    assert invoke(model, "--in-place", "--verify", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["verified"][0]["snr_db"] >= 100 and body["written"] == str(model)
    np.testing.assert_allclose(run(model, feeds)["y"], want, rtol=1e-5, atol=1e-6)
    assert invoke(model, "--in-place") == 0
    assert "already clean" in capsys.readouterr().out


def test_inputs_decide_what_is_rewritten(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = np.array([0, 1, 0])
    for name, x in (("near", np.linspace(2, 3, 16).reshape(2, 8)), ("far", np.linspace(-8, 8, 16).reshape(2, 8))):
        np.savez(tmp_path / f"{name}.npz", x=x.astype(np.float32), i=index)
    rewritten = {}
    for name in ("near", "far"):
        # The range of a graph input counts as well as that of a value inside.
        assert invoke(model, "--inputs", tmp_path / f"{name}.npz", "--json") == 0
        body = json.loads(capsys.readouterr().out)
        rewritten[name] = {p["name"] for p in body["passes"] if p["changes"]}
    assert "accurate-sigmoid" in rewritten["far"]
    assert "accurate-sigmoid" not in rewritten["near"]


def test_skip_and_with(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(model, "--skip", "accurate-*", "--json") == 0
    names = [p["name"] for p in json.loads(capsys.readouterr().out)["passes"]]
    assert names and not any(name.startswith("accurate") for name in names)
    assert choose_passes(extra=["linear-as-conv"])[-1].name == "linear-as-conv"
    for bad in ({"skip": ["acurate-gelu"]}, {"extra": ["linear-as-con"]}):
        with pytest.raises(RingstepError, match="did you mean"):
            choose_passes(**bad)


def test_other_targets_keep_native_operators(model: Path) -> None:
    for target in ("ort-mobile", "xnnpack"):
        report = sanitize_file(model, None, target=target)
        assert not any(p["changes"] for p in report["passes"] if p["name"].startswith("accurate"))
    a16 = sanitize_file(model, None, target="qnn-htp", precision="a16")
    assert not any(p["changes"] for p in a16["passes"] if p["name"].startswith("accurate"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "qnn-htb"], "did you mean qnn-htp"),
        (["--chip", "sm8751"], "did you mean sm8750"),
        (["--target", "xnnpack", "--chip", "sm8750"], "takes no chip"),
        (["--chip", "qcs6490", "--precision", "fp16"], "computes no floats"),
        (["--verify"], "give -o"),
        (["-o", "x.onnx", "--in-place"], "one of them"),
        (["--inputs", "missing.npz"], "missing.npz"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    monkeypatch.chdir(model.parent)
    assert invoke(model, *args) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_inputs_are_never_unpickled(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "evil.npz", x=np.array([{"a": 1}], object), i=np.array([0, 1, 0]))
    assert invoke(model, "--inputs", tmp_path / "evil.npz") == 2
    assert "evil.npz" in capsys.readouterr().err


def test_patterns_name_passes_and_layouts() -> None:
    names = {p.name for p in choose_passes(["accurate-*"], ["split-h*"])}
    assert "split-heads" in names and not any(name.startswith("accurate") for name in names)
    for skip, extra in ((["acurate-*"], []), ([], ["fold*"])):
        with pytest.raises(RingstepError, match="unknown pass"):
            choose_passes(skip, extra)
    with pytest.raises(RingstepError, match="undo each other"):
        choose_passes([], ["*-projections"])


def test_the_inputs_of_the_original_fit_the_result(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "in.npz", tmp_path / "b.onnx"
    np.savez(path, x=np.ones((2, 8), np.float64), i=np.array([0, 1, 1]))
    assert invoke(model, "-o", out, "--inputs", path, "--verify") == 0
    assert invoke(out, "--inputs", path) == 0  # its i is int32 now
    np.savez(path, x=np.ones((2, 8), np.float32), i=np.array([0, 1, 1 << 40]))
    capsys.readouterr()
    assert invoke(out, "--inputs", path) == 2
    assert "'i' is int64 and does not fit in int32" in capsys.readouterr().err


def test_the_noise_of_changes_adds_up() -> None:
    one = Change("n", "changed")
    gelus = Applied("accurate-gelu", (one,) * 10, 0.0, 95.0)
    exact = Applied("dead-nodes", (one,), 0.0, math.inf)
    assert promised([gelus, exact]) == pytest.approx(85.0)
    assert promised([exact, Applied("fold", (), 0.0, math.inf)]) == math.inf
