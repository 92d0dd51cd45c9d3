"""The line of stages: what a repeated export redoes, and what a kill, Ctrl-C or a full disk leaves behind."""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from export_runs import SPARK, run

import exporters.prove
import exporters.stages
import exporters.weights
from exporters.line import Job, Line
from ringstep import console
from ringstep.contract import StepSpec
from ringstep.manifest import Manifest, open_folder

STAGES = ["tokenizer", "weights", "onnx", "sanitize", "contract"]
QNN_STAGES = ["tokenizer", "weights", "onnx", "sanitize", "qnn-decode", "contract"]


@pytest.fixture(scope="module", autouse=True)
def same_sources() -> Iterator[None]:
    """Sources as they were when the first test began: an edit meanwhile would redo stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporters.stages, "source_hash", functools.cache(exporters.stages.source_hash))
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished float32 export of the tiny Spark, unproven."""
    out = tmp_path_factory.mktemp("base") / "out"
    assert built(out) == STAGES
    return out


@pytest.fixture
def out(base: Path, tmp_path: Path) -> Path:
    """A copy of that export."""
    return Path(shutil.copytree(base, tmp_path / "out"))


@pytest.fixture
def quick_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof that takes no time: the line only keeps it."""
    summary = {"passed": True, "failures": []}
    report = {"summary": summary, "positions": list[Any](), "caches": list[Any](), "answer": None}
    monkeypatch.setattr(exporters.prove, "prove", lambda *args, **options: [report])


def built(out: Path, **options: Any) -> list[str]:
    """Run the line; returns the stages that ran, in order."""
    ran: list[str] = []

    class Noted(Line):
        def stage(self, name: str, *args: Any, **kwargs: Any) -> Any:
            record = super().stage(name, *args, **kwargs)
            if not record.skipped:
                ran.append(name)
            return record

    job: dict[str, Any] = {"model": str(SPARK), "format": "onnx", "context": 48, "parity": False} | options
    Noted(Job(out=out, **job)).run()
    whole(out)
    return ran


def whole(out: Path) -> None:
    """Every recorded file is there as recorded, and nothing else."""
    manifest = Manifest.load(out)
    recorded = {name for record in manifest.stages.values() for name in record.outputs}
    present = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert present == recorded | {"manifest.json", ".ringstep.lock"}
    StepSpec.load(out)


def flip(path: Path) -> bytes:
    """Flip a bit in the middle of a file; returns what it was."""
    before = path.read_bytes()
    at = len(before) // 2
    path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
    return before


def test_nothing_changed(out: Path) -> None:
    times = {p: p.stat().st_mtime_ns for p in (out / "onnx").iterdir()}
    assert built(out) == []
    assert {p: p.stat().st_mtime_ns for p in (out / "onnx").iterdir()} == times


def test_context_redoes_graphs_alone(out: Path) -> None:
    assert built(out, context=40) == ["onnx", "sanitize", "contract"]
    assert StepSpec.load(out).context == 40


def test_chunk_comes_and_goes(out: Path) -> None:
    assert built(out, chunk=4) == ["onnx", "sanitize", "contract"]
    assert (out / "onnx/prefill_4.onnx").is_file()
    assert built(out) == ["onnx", "sanitize", "contract"]
    assert not (out / "onnx/prefill_4.onnx").exists()


def test_precision_redoes_weights(out: Path) -> None:
    size = (out / "onnx/weights.bin").stat().st_size
    assert built(out, precision="fp16") == ["weights", "onnx", "sanitize", "contract"]
    assert (out / "onnx/weights.bin").stat().st_size < 0.6 * size


@pytest.mark.parametrize(
    ("file", "stages"),
    [("onnx/weights.bin", ["weights"]), ("onnx/decode.traced.onnx", ["onnx"]), ("onnx/decode.onnx", ["sanitize"]),
     ("step.json", ["contract"])],
)
def test_corrupted_file_is_rebuilt(out: Path, file: str, stages: list[str]) -> None:
    before = flip(out / file)
    assert built(out) == stages
    assert (out / file).read_bytes() == before


def test_removed_file_is_rebuilt(out: Path) -> None:
    before = (out / "onnx/embedding.bin").read_bytes()
    (out / "onnx/embedding.bin").unlink()
    (out / "step.json").unlink()
    assert built(out) == ["weights", "contract"]
    assert (out / "onnx/embedding.bin").read_bytes() == before


def test_proof_is_kept_while_it_holds(out: Path, quick_proof: None) -> None:
    assert built(out, parity=True) == ["parity"]
    assert built(out, parity=True) == []
    assert built(out) == [] and (out / "parity.json").is_file()
    # A flipped bit in a weight is mended, so the proof holds again.
    flip(out / "onnx/weights.bin")
    assert built(out) == ["weights"] and (out / "parity.json").is_file()


def test_proof_of_another_state_is_dropped(out: Path, quick_proof: None) -> None:
    assert built(out, parity=True) == ["parity"]
    assert built(out, embedding="inside") == ["onnx", "sanitize", "contract"]
    assert not (out / "parity.json").exists() and "parity" not in Manifest.load(out).stages
    assert built(out, embedding="inside", parity=True) == ["parity"]


def test_failed_proof_leaves_with_1_and_again(
    out: Path, quick_proof: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {
        "engine": "ort", "simulated": False, "reference": "r", "dtype": "float32", "activations": "native",
        "tokens": 1, "snr_db": {"min": 1.0, "median": 1.0, "max": 1.0}, "top1": 0.0, "ambiguous": 0, "different": 1,
        "top5": 0.0, "kl": {"mean": 1.0, "max": 1.0}, "caches_db": None, "threshold_db": 90.0, "passed": False,
        "scheme": "", "failures": ["logits 1.0 dB at position 0, below 90 dB"],
    }  # fmt: skip
    report = {"summary": summary, "positions": list[Any](), "caches": list[Any](), "answer": None}
    monkeypatch.setattr(exporters.prove, "prove", lambda *args, **options: [report])
    for _ in range(2):
        assert run("export", SPARK, "--format", "onnx", "--context", 48, "--out", out) == 1
        assert "FAILED: logits 1.0 dB at position 0" in capsys.readouterr().out


def command(out: Path) -> subprocess.Popen[str]:
    """An export to QNN in a process of its own."""
    args = ["export", str(SPARK), "--device", "galaxy-s25", "--context", "48", "--no-parity", "--out", str(out)]
    code = "import sys; from exporters.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2], env={**os.environ, "TMPDIR": str(out.parent)},
    )  # fmt: skip


def wait_for_stage(out: Path, process: subprocess.Popen[str], stage: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (out / f".{stage}.tmp-{process.pid}").exists():
            return
        time.sleep(0.005)
    raise AssertionError(f"{stage} was not seen: {process.communicate(timeout=10)}")


def temporaries(out: Path) -> list[str]:
    return [p.name for p in out.rglob("*") if ".tmp" in p.name]


def test_killed_then_interrupted_then_finished(tmp_path: Path) -> None:
    """SIGKILL in the compiler's stage, Ctrl-C in the next run's, then a run to the end: weights are written once."""
    pytest.importorskip("onnxruntime_qnn")
    out = tmp_path / "out"
    with command(out) as process:
        wait_for_stage(out, process, "qnn-decode")
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    assert list(Manifest.load(out).stages) == QNN_STAGES[:4]
    assert not (out / "step.json").exists()
    times = {p: p.stat().st_mtime_ns for p in (out / "onnx").iterdir()}

    with command(out) as process:
        # What the dead run left is gone before this one's stage begins.
        wait_for_stage(out, process, "qnn-decode")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 2 and stdout == ""
    # click begins a new line after the terminal's ^C.
    assert stderr.lstrip() == "ringstep: error: interrupted; nothing is half-written, the same command resumes\n"
    assert temporaries(out) == []
    assert list(Manifest.load(out).stages) == QNN_STAGES[:4]

    assert built(out, format="qnn", device="galaxy-s25") == QNN_STAGES[4:]
    assert {p: p.stat().st_mtime_ns for p in (out / "onnx").iterdir()} == times


def test_interrupt_in_the_first_stage_of_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half_then_stop(checkpoint: Any, plan: Any, dtype: Any, folder: Path, tick: Any = None) -> int:
        (folder / "weights.bin").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("the signal was lost")

    with monkeypatch.context() as patch:
        patch.setattr(exporters.weights, "write_weights", half_then_stop)
        assert run("export", SPARK, "--format", "onnx", "--out", tmp_path / "out") == 2
    assert re.fullmatch(r"\n?ringstep: error: interrupted; .*\n", capsys.readouterr().err)
    assert temporaries(tmp_path) == []
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".ringstep.lock", "manifest.json"]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that holds the weights' bare size, not their alignment: a tmpfs, or failing writes without root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1900k", "tmpfs", str(disk)]
    if shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0:
        yield disk
        subprocess.run(["umount", "-l", str(disk)], check=True)
        return
    write, count = exporters.weights._write, [0]

    def fail_late(file: Any, *args: Any) -> int:
        count[0] += 1
        if count[0] > 40:
            raise OSError(errno.ENOSPC, "No space left on device", file.name)
        return write(file, *args)

    monkeypatch.setattr(exporters.weights, "_write", fail_late)
    yield disk


def test_full_disk(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = small_disk / "out"
    assert run("export", SPARK, "--format", "onnx", "--context", 48, "--no-parity", "--out", out) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "the disk is full, stage weights was undone, it needs" in captured.err
    assert temporaries(out) == [] and not (out / "onnx").exists()
    assert list(Manifest.load(out).stages) == ["tokenizer"]


def test_disk_too_small_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert run("export", SPARK, "--format", "onnx", "--out", tmp_path / "out") == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "stage weights needs" in line and "1000 are free" in line


def test_one_export_at_a_time(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_folder(out):
        assert run("export", SPARK, "--format", "onnx", "--context", 48, "--no-parity", "--out", out) == 2
        assert capsys.readouterr().err == (
            f"ringstep: error: {out} is being written by another export; wait or use another\n"
        )
    assert built(out) == []


def test_another_model_in_the_same_folder(out: Path, tmp_path: Path) -> None:
    """Other weights in the same places redo the weights alone; their contract names the model."""
    other = Path(shutil.copytree(SPARK, tmp_path / "other"))
    flip(other / "model.safetensors")
    assert built(out, model=str(other)) == ["tokenizer", "weights", "sanitize", "contract"]
    assert StepSpec.load(out).model == "other"
    assert console.settings.quiet is False
