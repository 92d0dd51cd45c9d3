"""Goldens from the command, and proofs from them where neither transformers nor torch nor the checkpoint is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_runs import LLAMA, SPARK, run, write_checkpoint, write_tokenizer

import ringstep.parity.golden
from exporters.prove import RecipeReference
from ringstep.checkpoint import open_checkpoint
from ringstep.parity.golden import load_golden
from ringstep.parity.metrics import snr_db
from ringstep.parity.reference import TransformersReference

BLOCKED = """
import sys
for name in ("transformers", "torch", "onnx", "onnxscript"):
    sys.modules[name] = None  # an import of it fails
from exporters.cli import main
main()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama/, which speaks, its export out/, its goldens text.safetensors and answer.safetensors; spark.safetensors."""
    folder = tmp_path_factory.mktemp("golden")
    write_tokenizer(write_checkpoint(folder / "llama", LLAMA), LLAMA["vocab_size"])
    export = ["export", folder / "llama", "--format", "onnx", "--context", 40, "--chunk", 8, "--no-parity", "-q"]
    assert run(*export, "--out", folder / "out") == 0
    (folder / "prompt.txt").write_text("w5 w9 w11 user w20 w21 w7")
    reference = ["reference", folder / "llama", "-q", "-o"]
    assert run(*reference, folder / "g.safetensors", "--prompt-file", folder / "prompt.txt") == 0
    assert run(*reference, folder / "long.safetensors", "--tokens", 60, "--answer", 0) == 0
    return folder


def blocked(folder: Path, *args: object) -> tuple[int, str, str]:
    """Run the command where transformers, torch and onnx cannot be imported."""
    command = [sys.executable, "-c", BLOCKED, *map(str, args)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_what_a_golden_holds(made: Path) -> None:
    """Against transformers in float32, asked here: all entries, the greedy answer, and what made it."""
    golden = load_golden(made / "g.safetensors")
    assert golden.truth.ids[:8] == [3, 5, 9, 11, 3, 20, 21, 7] and golden.prompt == 8  # it begins as chats do
    truth = TransformersReference(open_checkpoint(str(made / "llama"))).truth(golden.fed)
    assert snr_db(truth.logits, golden.truth.logits) > 100
    for want, have in zip(truth.caches, golden.truth.caches, strict=True):
        assert have[0].tolist() == list(range(len(golden.fed)))
        assert min(snr_db(want[1], have[1]), snr_db(want[2], have[2])) > 100
    answer = golden.truth.ids[golden.prompt :]
    assert answer == truth.logits[golden.prompt - 1 :].argmax(1).tolist() and 1 <= len(answer) <= 16
    assert golden.facts["source"].startswith("transformers ") and "float64" in golden.facts["source"]
    assert golden.facts["checkpoint"] == open_checkpoint(str(made / "llama")).fingerprint()
    assert all(golden.facts[name] not in ("", "none") for name in ("model", "ringstep", "transformers", "torch"))


def test_parity_without_transformers_and_checkpoint(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "out")  # its manifest names a checkpoint elsewhere
    shutil.copy(made / "g.safetensors", tmp_path)
    body = json.loads((tmp_path / "out/manifest.json").read_text())
    body["model"] = "./gone"
    (tmp_path / "out/manifest.json").write_text(json.dumps(body))
    code, out, err = blocked(tmp_path, "parity", "out", "--golden", "g.safetensors", "--json")
    assert code == 0, err
    (report,) = json.loads(out)
    assert report["summary"]["snr_db"]["min"] > 90 and report["summary"]["reference"].startswith("transformers ")
    assert len(report["caches"]) == 2 and report["answer"]["verdict"] == "equal"
    assert report["answer"]["ids"] == report["answer"]["reference_ids"] and report["golden"]["checkpoint"]
    code, out, err = blocked(tmp_path, "parity", "out", "--golden", "g.safetensors")
    assert code == 0 and "ort: passed" in out and "original" in out, err
    code, out, err = blocked(tmp_path, "parity", "out")  # without one there is nothing to compare with
    assert code == 2 and "gone" in err
    code, out, err = blocked(tmp_path, "parity", "out", "--golden", "g.safetensors", "--min-db", "200")
    assert code == 1 and "FAILED" in out


def test_stages_from_a_golden(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("parity", made / "out", "--stages", "--golden", made / "g.safetensors", "--json", "-q") == 0
    body = json.loads(capsys.readouterr().out)
    assert [s["stage"] for s in body["stages"]] == ["onnx", "sanitised"] and "recipe" in body["absent"]
    assert all(s["greedy"]["verdict"] == "equal" and s["summary"]["passed"] for s in body["stages"])


def test_a_golden_longer_than_the_context(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("parity", made / "out", "--golden", made / "long.safetensors", "--json", "-q") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["summary"]["tokens"] == 40
    assert "has 60 tokens, the context holds 40: only those are compared" in captured.err
    assert run("parity", made / "out", "--golden", made / "long.safetensors", "--tokens", 9, "--json", "-q") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["summary"]["tokens"] == 9 and captured.err == ""


def test_a_wrong_engine_fails(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of the artifact changed after the golden was made."""
    out = Path(shutil.copytree(made / "out", tmp_path / "out"))
    weights = np.fromfile(out / "onnx/weights.bin", np.float32)
    weights[:64] *= 1.5
    weights.tofile(out / "onnx/weights.bin")
    assert run("parity", out, "--golden", made / "g.safetensors", "-q") == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_model_unknown_to_transformers(tmp_path: Path) -> None:
    out = tmp_path / "s.safetensors"
    assert run("reference", SPARK, "-o", out, "--tokens", 20, "--answer", 4, "-q") == 0
    golden = load_golden(out)
    assert golden.truth.source == RecipeReference.source and golden.prompt == 20 and len(golden.truth.ids) <= 24


BAD: dict[str, tuple[list[Any], str]] = {
    "no file": (["parity", "out", "--golden", "nowhere"], "no such file; make it with ringstep reference"),
    "not a golden": (["parity", "out", "--golden", "llama/model.safetensors"], "no golden of this ringstep"),
    "another checkpoint": (["parity", "out", "--golden", "spark.safetensors"], "another checkpoint"),
    "with a prompt": (["parity", "out", "--golden", "g.safetensors", "--prompt", "a"], "has its own text"),
    "text and file": (["reference", "llama", "-o", "x", "--text", "a", "--prompt-file", "prompt.txt"], "give one of"),
    "no such prompt": (["reference", "llama", "-o", "x", "--prompt-file", "nowhere"], "nowhere cannot be read"),
    "empty": (["reference", "llama", "-o", "x", "--text", "", "--begin", ""], "nothing in the text"),
    "out is a folder": (["reference", "llama", "-o", "."], "is a folder"),
    "out nowhere": (["reference", "llama", "-o", "no/where"], "no such folder"),
    "beyond the model": (["reference", "llama", "-o", "x", "--tokens", 120], "the model takes 128"),
    "begin no ids": (["reference", "llama", "-o", "x", "--begin", "a"], "no list of token ids"),
    "begin beyond": (["reference", "llama", "-o", "x", "--begin", "64"], "token id 64 lies outside 0..63"),
    "chat of nothing": (["reference", "llama", "-o", "x", "--chat"], "needs --text"),
    "no tokenizer": (["reference", SPARK, "-o", "x", "--text", "a"], "has no tokenizer to read a text with"),
    "float64 of a recipe": (["reference", SPARK, "-o", "x", "--dtype", "float64"], "the recipe that stands in for it"),
    "a golden of 100 GB": (["reference", SPARK, "-o", "x", "--tokens", 1_000_000], "at most 4.29 GB"),
}


def test_sizes(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A large golden is announced, one beyond the limit refused before anything is computed."""
    args = ["reference", made / "llama", "-o", tmp_path / "x", "--tokens", 30, "--answer", 0, "-q"]
    size = 4 * 30 * (64 + 2 * (2 * 2 * 16 + 1))
    monkeypatch.setattr(ringstep.parity.golden, "WARN_BYTES", size)
    assert run(*args) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr(ringstep.parity.golden, "WARN_BYTES", size - 1)
    assert run(*args) == 0 and "--tokens makes it shorter" in capsys.readouterr().err
    (tmp_path / "x").unlink()
    monkeypatch.setattr(ringstep.parity.golden, "LIMIT_BYTES", size - 1)
    assert run(*args) == 2 and "logits [30, 64] in float32" in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("case", BAD)
def test_refusals(case: str, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(made)
    if case == "another checkpoint":
        assert run("reference", SPARK, "-o", "spark.safetensors", "--tokens", 8, "--answer", 0, "-q") == 0
    capsys.readouterr()
    args, message = BAD[case]
    assert run(*args) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not (made / "x").exists(), captured.err
