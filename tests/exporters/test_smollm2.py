"""SmolLM2 with its real weights: what ONNX Runtime computes is what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from export_runs import run

from exporters.line import Job, Line
from exporters.prove import prove
from ringstep.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "out"
    Line(Job(model="smollm2-135m", out=out, format="onnx", context=256, parity=False)).run()
    return out


def test_parity_with_transformers(smollm2: Path) -> None:
    (report,) = prove(smollm2, open_checkpoint("smollm2-135m"), {"ort": None}, tokens=200)
    summary = report["summary"]
    found = [p["snr_db"] for p in report["positions"]]
    print(f"{min(found):.1f} to {max(found):.1f} dB over {len(found)} tokens, {summary['caches_db']}")
    assert summary["reference"].startswith("transformers ") and len(found) == 200
    assert min(found) >= 100
    assert {p["top1"] for p in report["positions"]} == {"equal"}
    assert summary["passed"] and summary["caches_db"]["min"] >= 100


def test_generate(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["--prompt", "What is the capital of France?", "--max-tokens", 16]
    assert run("generate", smollm2, *prompt, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["text"] == "The capital of France is Paris." and body["ids"][-1] == 2
    assert run("generate", smollm2, *prompt) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
