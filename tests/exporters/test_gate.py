"""The gate: what fails it, what the baseline takes, the command, and one model through it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from export_runs import run

import exporters.gate
from exporters.gate import (
    FORMAT,
    Row,
    against,
    differences,
    has_simulator,
    load_baseline,
    lost,
    measure,
    run_gate,
    save_baseline,
)
from exporters.tiny import GATED, MODELS
from recipes import MODEL_TYPES, SUMMARIES
from ringstep.errors import RingstepError


def row(**db: float) -> Row:
    return Row("llama", "w8a16", "ort", False, db, 35.0)


def test_every_recipe_is_in_it() -> None:
    assert {MODEL_TYPES[MODELS[name]["model_type"]] for name in GATED} == set(SUMMARIES)
    assert len(MODELS) == 10


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [({"logits": 60.0}, {"logits": 59.0}, ""), ({"logits": 60.0}, {"logits": 58.9}, "logits 58.9 dB, 60.0 dB in"),
     ({"logits": 60.0}, {"logits": 70.0}, ""), ({"logits": 120.0}, {"logits": 101.0}, ""),
     ({"logits": 120.0}, {"logits": 98.9}, "logits 98.9 dB, 120.0"), ({"weights": 30.0}, {"weights": 28.0}, "weights"),
     ({"caches": 60.0}, {"caches": 50.0}, ""), ({"weights": 30.0}, {}, "weights: in the baseline, but not measured")],
)  # fmt: skip
def test_drops(before: dict[str, float], now: dict[str, float], words: str) -> None:
    made = row(**now)
    against([made], {made.key: before})
    assert len(made.failures) == bool(words) and words in "".join(made.failures)


def test_what_the_baseline_lacks() -> None:
    made = row(logits=60.0)
    against([made], {})
    assert "ringstep parity --update-baseline" in made.failures[0]
    assert lost(130.0, 99.5) == 0.5 and lost(50.0, 60.0) == -10


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    assert load_baseline(path) == {}
    save_baseline([row(logits=60.123, weights=30.0)], {"old": {"logits": 1.0}}, path)
    found = load_baseline(path)
    assert found == {"old": {"logits": 1.0}, "llama / w8a16 / ort": {"logits": 60.12, "weights": 30.0}}
    assert [p.name for p in tmp_path.iterdir()] == ["parity.json"]
    assert differences([row(logits=60.14, weights=28.0)], found) == [
        ("old", "logits", 1.0, None), ("llama / w8a16 / ort", "weights", 30.0, 28.0)]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"format": FORMAT, "rows": 5}),
             json.dumps({"format": FORMAT, "rows": {"a": 5}}),
             json.dumps({"format": FORMAT, "rows": {"a": {"logit": 5}}}),
             json.dumps({"format": FORMAT, "rows": {"a": {"logits": True}}}),
             json.dumps({"format": FORMAT, "rows": {"a": {"logits": float("nan")}}})],
)  # fmt: skip
def test_a_bad_baseline(text: str, tmp_path: Path) -> None:
    (tmp_path / "parity.json").write_text(text)
    with pytest.raises(RingstepError) as caught:
        load_baseline(tmp_path / "parity.json")
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_the_committed_baseline_is_of_the_gate() -> None:
    rows = load_baseline()
    assert {key.split(" / ")[0] for key in rows} == set(GATED) and len(rows) == 6 * len(GATED)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Row]:
    """The command with rows that are given, and a baseline of its own."""
    rows = [row(logits=60.0, weights=30.0)]
    path = tmp_path / "parity.json"
    monkeypatch.setattr(exporters.gate, "run_gate", lambda *args, **options: [dataclasses.replace(
        r, failures=list(r.failures)) for r in rows])  # fmt: skip
    monkeypatch.setattr(exporters.gate, "BASELINE", path)
    monkeypatch.setattr(load_baseline, "__defaults__", (path,))
    monkeypatch.setattr(save_baseline, "__defaults__", (path,))
    return rows


def test_the_command(faked: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("parity") == 1 and "not in the baseline" in capsys.readouterr().out.replace("\n", " ")
    assert run("parity", "--update-baseline") == 0
    assert "60.0 new" in capsys.readouterr().out
    assert run("parity") == 0 and capsys.readouterr().out
    faked[0].db["weights"] = 28.5
    assert run("parity", "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert body["passed"] is False and body["rows"][0]["failures"] == ["weights 28.5 dB, 30.0 dB in the baseline"]
    before = (tmp_path / "parity.json").read_bytes()
    faked[0].failures.append("logits 10.0 dB, below 35 dB")
    assert run("parity", "--update-baseline") == 1  # a threshold is no matter of the baseline
    assert "30.0 > 28.5" in capsys.readouterr().out and (tmp_path / "parity.json").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "words"),
    [(["parity", "--tokens", 5], "--tokens: is about an artifact"), (["parity", "--windows", "full"], "--windows"),
     (["parity", ".", "--update-baseline"], "leave the artifact out"), (["parity", "--only", "lama"], "no tiny model")],
)  # fmt: skip
def test_misuse(args: list[Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    assert words in capsys.readouterr().err


def test_unknown_models() -> None:
    with pytest.raises(RingstepError, match="did you mean llama"):
        run_gate(["lama"])


def test_one_model_and_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ONNX Runtime alone: floats and both schemes pass; a host loop with a wide mask fails every one."""
    import torch

    import ringstep.session
    from ringstep.slots import visible

    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = measure("gemma3", tmp_path, simulate=False)
    assert [(r.precision, r.engine) for r in rows] == [("fp32", "ort"), ("w8a16", "ort"), ("w4a16", "ort")]
    assert not any(r.failures for r in rows), rows
    assert all(r.db["windows"] > 50 for r in rows) and "weights" not in rows[0].db
    monkeypatch.setattr(ringstep.session, "visible", lambda h, p, n, w: visible(h, p, n, w and w + 1))
    assert all(r.failures for r in measure("gemma3", tmp_path, simulate=False))


@pytest.mark.skipif(not has_simulator(), reason="the simulator runs on Linux x86-64")
def test_the_simulators_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [r for r in measure("llama", tmp_path, simulate=True) if r.engine == "qnn-sim"]
    assert [r.precision for r in rows] == ["fp16", "w8a16", "w4a16"] and all(r.simulated for r in rows)
    assert not any(r.failures for r in rows), rows
