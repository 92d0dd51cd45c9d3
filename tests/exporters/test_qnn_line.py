"""The whole line to QNN on the tiny Spark: compiled for a phone, run on the HTP simulator, against the golden."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_runs import SPARK

from exporters.line import Job, Line
from exporters.qnn import check_context
from ringstep.contract import StepSpec
from ringstep.manifest import Manifest
from ringstep.parity.metrics import agreement, snr_db
from ringstep.session import DecodeSession

pytest.importorskip("onnxruntime_qnn")

TOKENS = 40  # the window is 16: two wraps and a half
PART_BYTES = 400_000


def export(out: Path, **options: Any) -> Manifest:
    job: dict[str, Any] = {
        "format": "qnn",
        "device": "galaxy-s25",
        "context": 64,
        "chunk": 8,
        "parity": False,
    } | options
    return Line(Job(model=str(SPARK), out=out, **job)).run()


def simulate(folder: Path, ids: np.ndarray, n: int = 1) -> np.ndarray:
    """Logits of `ids` fed n at a time on the simulator."""
    with DecodeSession.open(folder, "qnn-sim") as session:
        return np.concatenate([session.step(ids[at : at + n]) for at in range(0, len(ids), n)])


def decibels(want: np.ndarray, have: np.ndarray) -> np.ndarray:
    return np.array([snr_db(w, h) for w, h in zip(want, have, strict=True)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("qnn") / "whole"
    export(out)
    return out


@pytest.fixture(scope="module")
def simulated(whole: Path, golden: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of the golden's first 40 tokens, one by one."""
    return simulate(whole, golden["input_ids"][:TOKENS].astype(int))


def test_contexts_and_no_operation_on_the_cpu(whole: Path) -> None:
    manifest = Manifest.load(whole)
    first, second = ["tokenizer", "weights", "onnx", "sanitize"], ["qnn-decode", "qnn-prefill_8", "contract"]
    assert list(manifest.stages) == first + second
    for name in ("decode", "prefill_8"):
        # One EPContext node is all there is: nothing is left for the CPU.
        binary = check_context(whole / f"qnn/{name}_ctx.onnx")
        facts = manifest.stages[f"qnn-{name}"].facts
        assert facts["binary_bytes"] == binary.stat().st_size > 900_000
        assert facts["chip"] == "sm8750" and "QAIRT" in facts["version"]
        assert facts["npu_ops"]["Gemm"] == facts["source_ops"]["Gemm"] == 65
    spec = StepSpec.load(whole)
    assert spec.target == {"device": "galaxy-s25", "chip": "sm8750"}
    assert (spec.dtype, spec.activations) == ("float16", "accurate")
    assert [[p.file for p in g.parts["qnn"]] for g in spec.graphs] == [
        ["qnn/decode_ctx.onnx"], ["qnn/prefill_8_ctx.onnx"],
    ]  # fmt: skip


def test_simulator_holds_the_golden(simulated: np.ndarray, golden: dict[str, np.ndarray]) -> None:
    want = golden["logits"][:TOKENS]
    found = decibels(want, simulated)
    print(f"accurate, simulated: {found.min():.1f} dB at worst, {np.median(found):.1f} dB in the middle")
    assert found.min() >= 35
    verdicts = [agreement(w, h) for w, h in zip(want, simulated, strict=True)]
    assert "different" not in verdicts and verdicts.count("equal") >= TOKENS - 2


def test_prefill_on_the_simulator(whole: Path, golden: dict[str, np.ndarray]) -> None:
    """Chunks of 8, the last one padded, then the rest one by one over the window's edge."""
    ids = golden["input_ids"][:21].astype(int)
    assert decibels(golden["logits"][:21], simulate(whole, ids, n=8)).min() >= 35


def test_split_step_is_the_whole(
    whole: Path, simulated: np.ndarray, golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "split"))
    manifest = export(out, part_bytes=PART_BYTES)
    spec = StepSpec.load(out)
    for graph in spec.graphs:
        parts = [p.file for p in graph.parts["qnn"]]
        assert len(parts) >= 3 and all(check_context(out / file) for file in parts)
    assert not (out / "qnn/decode_ctx.onnx").exists() and "qnn-decode" not in manifest.stages
    assert manifest.stages["weights"] == Manifest.load(whole).stages["weights"]
    assert manifest.stages["onnx"] == Manifest.load(whole).stages["onnx"]
    ids = golden["input_ids"][:20].astype(int)
    found = decibels(simulated[:20], simulate(out, ids))
    print(f"split in {len(spec.graph(1).parts['qnn'])} against whole: {found.min():.1f} dB at worst")
    assert found.min() >= 50
    assert decibels(golden["logits"][:16], simulate(out, ids[:16], n=8)).min() >= 35


def test_native_activations_are_no_better(simulated: np.ndarray, golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    export(tmp_path / "native", activations="native", chunk=1)
    have = simulate(tmp_path / "native", golden["input_ids"][:TOKENS].astype(int))
    native, accurate = (decibels(golden["logits"][:TOKENS], logits) for logits in (have, simulated))
    print(f"native {np.median(native):.1f} dB, accurate {np.median(accurate):.1f} dB in the middle, simulated")
    assert np.median(native) <= np.median(accurate)
