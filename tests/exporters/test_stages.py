"""All stages side by side: what each holds, which one a planted fault is laid to, and what the command writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from export_runs import LLAMA, SPARK, run, write_checkpoint

from exporters.artifact import Artifact
from exporters.opening import NAMES, STAGES
from exporters.parity_command import STAGES as OFFERED
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import StepSpec
from ringstep.parity.metrics import snr_db
from ringstep.parity.runs import record

KEYS = {"reference", "tokens", "against", "stages"}
STAGE_KEYS = {"stage", "engine", "simulated", "summary", "snr_db", "caches"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all/: spark in floats with a chunk, llama in w8a16, its weights rotated."""
    folder = tmp_path_factory.mktemp("stages")
    write_checkpoint(folder / "llama", LLAMA)
    options = ["--format", "onnx", "--no-parity", "-q", "--calibration-tokens", 1024]
    assert run("export", SPARK, "--out", folder / "all/spark", "--context", 48, "--chunk", 8, *options) == 0
    quantised = [folder / "llama", "--precision", "w4a16", "--out", folder / "all/llama", "--context", 40]
    assert run("export", *quantised, *options) == 0
    return folder


def stages(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> Any:
    """The JSON of `ringstep parity --stages`."""
    capsys.readouterr()
    assert run("parity", *args, "--stages", "--json", "-q") == code
    return json.loads(capsys.readouterr().out)


def test_the_command_offers_every_stage() -> None:
    assert OFFERED == NAMES and len({stage.name for stage in STAGES}) == len(STAGES)


def test_float_stages(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = stages(capsys, made / "all/spark")
    written = json.loads((made / "all/spark/parity_stages.json").read_text())
    assert written | {"artifact": body["artifact"]} == body
    assert body.keys() >= KEYS and all(s.keys() >= STAGE_KEYS for s in body["stages"])
    assert [s["stage"] for s in body["stages"]] == ["recipe", "onnx", "sanitised"]
    assert [s["before"]["stage"] for s in body["stages"]] == ["original", "recipe", "onnx"]
    assert body["absent"].keys() == {"quantised", "compiled", "executorch"} and body["against"] == "original"
    assert body["tokens"] == 48 and body["passed"]
    for stage in body["stages"]:
        assert stage["summary"]["snr_db"]["min"] >= 90 and len(stage["snr_db"]) == 48
        assert len(stage["caches"]) == 8 and min(c["key_db"] for c in stage["caches"]) >= 90
        assert stage["greedy"] == {"tokens": 16, "same": 16, "verdict": "equal"} and not stage["simulated"]
        assert 0 < stage["summary"]["max_rel"] < 1e-4


def test_quantised_stages(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Float stages of rotated weights hold the original's values rotated; the loss is the quantised stage's."""
    body = stages(capsys, made / "all/llama")
    found = {s["stage"]: s for s in body["stages"]}
    assert list(found) == ["recipe", "onnx", "sanitised", "quantised"]
    for name in ("recipe", "onnx", "sanitised"):
        assert found[name]["summary"]["passed"] and found[name]["summary"]["caches_db"]["min"] > 90, name
    last = found["quantised"]
    assert last["summary"]["scheme"] == "w4a16" and last["before"]["stage"] == "sanitised"
    assert last["summary"]["snr_db"]["pooled"] < 40 and last["before"]["summary"]["snr_db"]["pooled"] < 40
    # The artifact's graphs by themselves, without any of this.
    with Artifact(made / "all/llama", open_checkpoint(str(made / "llama"))) as artifact:
        assert artifact.rotated
        home = artifact.float_files
        assert sorted(p.name for p in home.glob("*.onnx")) == ["decode.float.onnx", "decode.traced.onnx"]
    assert not home.exists()  # 4 bytes a parameter do not stay behind


@pytest.mark.parametrize("stage", ["onnx", "sanitised", "quantised"])
def test_a_fault_is_laid_to_its_stage(stage: str, made: Path, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """One constant of one graph is another one: the stages before agree, this one loses."""
    source = "llama" if stage == "quantised" else "spark"
    out = Path(shutil.copytree(made / "all" / source, tmp_path / "out"))
    file = out / "onnx" / {"onnx": "decode.traced.onnx"}.get(stage, "decode.onnx")
    if source == "spark":
        # Only decode graphs have the fault, so only they are to run.
        body = json.loads((out / "step.json").read_text())
        body["graphs"] = [g for g in body["graphs"] if g["n"] == 1]
        (out / "step.json").write_text(json.dumps(body))
    model = ir.load(file)
    norm = next(n for n in model.graph if n.op_type == "RMSNormalization" and "/layers.1/" in (n.name or ""))
    wrong = ir.tensor(np.full(norm.inputs[1].shape.numpy(), 0.3, norm.inputs[1].dtype.numpy()), name="planted")
    if stage == "quantised":
        scale = next(iter(model.graph.initializers.values()))
        mul = next(n for n in model.graph if n.op_type == "QuantizeLinear" and n.inputs[0] is norm.outputs[0])
        scale = mul.inputs[1]
        wrong = ir.tensor(scale.const_value.numpy() * np.float32(8), name="planted")
        value = ir.Value(name="planted", const_value=wrong, shape=wrong.shape, type=ir.TensorType(wrong.dtype))
        model.graph.initializers["planted"] = value
        mul.replace_input_with(1, value)
    else:
        value = ir.Value(name="planted", const_value=wrong, shape=wrong.shape, type=ir.TensorType(wrong.dtype))
        model.graph.initializers["planted"] = value
        norm.replace_input_with(1, value)
    ir.save(model, file)
    body = stages(capsys, out, "--model", SPARK if source == "spark" else made / "llama", code=1)
    names = [s["stage"] for s in body["stages"]]
    loss = {s["stage"]: s["before"]["summary"]["snr_db"]["pooled"] for s in body["stages"]}
    at = names.index(stage)
    assert all(loss[name] > 90 for name in names[:at]) and loss[stage] < 20, loss
    layers = {c["layer"]: c["key_db"] for c in body["stages"][at]["before"]["caches"]}
    assert stage == "quantised" or (layers[0] > 90 and layers[1 if layers[1] < 60 else 2] < 60), layers


def test_against_a_stage(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = stages(capsys, made / "all/llama", "--against", "sanitised")
    assert (body["reference"], body["against"]) == ("sanitised", "sanitised")
    assert [s["stage"] for s in body["stages"]] == ["quantised"]
    (only,) = body["stages"]
    assert only["snr_db"] == pytest.approx(only["before"]["snr_db"])


def test_a_folder_of_artifacts(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = stages(capsys, made / "all", "--tokens", 24)
    assert [Path(b["artifact"]).name for b in bodies] == ["llama", "spark"]
    assert [len(b["stages"]) for b in bodies] == [4, 3] and {b["tokens"] for b in bodies} == {24}
    assert run("parity", made / "all", "--stages", "--tokens", 12, "--positions", "--layers", "-q") == 0
    out = capsys.readouterr().out
    assert "llama" in out and "spark" in out and "step" in out
    assert "positions" not in out or "AMBIGUOUS first token" in out


def test_recorded_entries_are_the_contracts(made: Path) -> None:
    """The recipe at the artifact's own layouts: rings, chunks and context are those of step.json."""
    spec = StepSpec.load(made / "all/spark")
    with Artifact(made / "all/spark", open_checkpoint(str(SPARK))) as artifact:
        sessions = {stage.name: stage.open(artifact) for stage in STAGES[:3]}
    ids = list(range(3, 45))
    runs = {name: record(session, ids, name) for name, session in sessions.items()}
    for session in sessions.values():
        assert [(c.kind, c.length) for c in session.spec.caches] == [(c.kind, c.length) for c in spec.caches]
        assert [g.n for g in session.spec.graphs] == [g.n for g in spec.graphs] and session.spec.context == 48
    assert snr_db(runs["recipe"].logits, runs["sanitised"].logits) > 90


BAD: dict[str, tuple[list[Any], str]] = {
    "no such stage": (["all/spark", "--against", "sanitized"], "did you mean sanitised"),
    "not in this artifact": (["all/spark", "--against", "quantised"], "has no such stage: nothing is quantised"),
    "nothing after it": (["all/spark", "--against", "sanitised"], "no stage after it"),
    "with a prompt": (["all/spark", "--stages", "--prompt", "a"], "leave out --prompt"),
    "too long": (["all/spark", "--stages", "--tokens", 49], "must lie in 1..48"),
    "no artifact": ([".", "--stages"], "step.json: no such file"),
    "layers alone": (["all/spark", "--layers"], "goes with --stages"),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(case: str, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(made)
    args, message = BAD[case]
    assert run("parity", *args) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("ringstep: error") == 1


def test_an_older_artifact_without_traced_graphs(made: Path, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    out = Path(shutil.copytree(made / "all/spark", tmp_path / "out"))
    for file in out.glob("onnx/*.traced.onnx"):
        file.unlink()
    body = stages(capsys, out)
    assert [s["stage"] for s in body["stages"]] == ["recipe", "sanitised"]
    assert "no onnx/decode.traced.onnx" in body["absent"]["onnx"]
