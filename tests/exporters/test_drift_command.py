"""`ringstep parity --drift`: clean exports pass, planted drifts fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_runs import GEMMA, LLAMA, run, write_checkpoint

import exporters.prove_drift
from exporters.prove import open_reference
from exporters.prove_drift import prove_drift
from ringstep.checkpoint import open_checkpoint
from ringstep.session import DecodeSession

LARGE = {"max_position_embeddings": 512, "hidden_size": 96, "vocab_size": 256}
CONTEXT = 220

Fault = Callable[[DecodeSession, dict[str, np.ndarray], np.random.Generator], None]


def lose_entries(session: DecodeSession, inputs: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """A ring that loses one more entry at each wrap: it reads as if it had never been written."""
    for cache in session.spec.caches:
        if cache.kind == "ring":
            for name in (f"past_key_{cache.layer}", f"past_value_{cache.layer}"):
                inputs[name] = inputs[name].copy()
                inputs[name][:, :, : session.position // cache.length] = 0


def round_again(session: DecodeSession, inputs: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """A cache that is rounded again at every step: errors add up for as long as an entry is kept."""
    for stack in session.stacks.values():
        stack *= (1 + 1e-5 * random.standard_normal(stack.shape)).astype(stack.dtype)


def fade(session: DecodeSession, inputs: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """The same with an error that always has one sign, as truncation has."""
    for stack in session.stacks.values():
        stack *= np.float32(1 - 1e-5)


def turn_too_far(session: DecodeSession, inputs: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """Rotary angles that grow a millionth too fast."""
    for rotary in session.spec.rotary:
        positions = session.position + np.arange(len(inputs[f"cos_{rotary.name}"]))
        angles = positions[:, None] * (1 + 1e-6) * np.asarray(rotary.inv_freq)
        inputs[f"cos_{rotary.name}"] = np.cos(angles).astype(np.float32)
        inputs[f"sin_{rotary.name}"] = np.sin(angles).astype(np.float32)


class Faulty:
    """An engine with a fault before each step."""

    def __init__(self, session: DecodeSession, fault: Fault) -> None:
        self.session, self.engine, self.fault, self.name = session, session.engine, fault, session.engine.name
        self.random = np.random.default_rng(0)

    def run(self, n: int, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        changed = dict(inputs)
        self.fault(self.session, changed, self.random)
        self.engine.run(n, changed, outputs)

    def close(self) -> None:
        self.engine.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama/ and gemma/, whose window of 8 wraps every 7 positions, and their exports in floats."""
    folder = tmp_path_factory.mktemp("drift")
    for name, config in {"llama": LLAMA, "gemma": GEMMA}.items():
        write_checkpoint(folder / name, {**config, **LARGE})
        options = ["--format", "onnx", "--context", CONTEXT, "--chunk", 8, "--no-parity", "-q"]
        assert run("export", folder / name, "--out", folder / f"{name}-out", *options) == 0
    return folder


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_clean_exports_do_not_drift(model: str, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = made / f"{model}-out"
    capsys.readouterr()
    assert run("parity", out, "--drift", "--tokens", 200, "--json", "-q") == 0
    body = json.loads(capsys.readouterr().out)
    assert body == json.loads((out / "drift.json").read_text())
    assert body["passed"] and body["failures"] == [] and not body["simulated"] and body["engine"] == "ort"
    assert body["tokens"] == 215 and body["teacher_forced"]["position"] == list(range(215))
    assert min(body["teacher_forced"]["snr_db"]) > 90 and abs(body["slope_db_per_100"]) < 2
    free = body["free_running"]
    assert (free["verdict"], free["same"], free["tokens"]) == ("equal", 200, 200) and len(free["snr_db"]) == 215


@pytest.mark.parametrize(("model", "fault"), [
    ("gemma", lose_entries), ("llama", round_again), ("llama", fade), ("llama", turn_too_far),
])  # fmt: skip
def test_planted_drifts(model: str, fault: Fault, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: Any) -> DecodeSession:
        session = DecodeSession.open(*args)
        session.engine = Faulty(session, fault)
        return session

    monkeypatch.setattr(exporters.prove_drift, "DecodeSession", type("Opener", (), {"open": staticmethod(opened)}))
    body = prove_drift(made / f"{model}-out", open_reference(open_checkpoint(str(made / model))), "ort", 200)
    print(body["failures"])
    assert not body["passed"] and any("teacher forced" in reason for reason in body["failures"])


def test_tables_and_verdicts(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The context is too short for 300 tokens: fewer, and a warning."""
    capsys.readouterr()
    assert run("parity", made / "llama-out", "--drift", "-q") == 0
    captured = capsys.readouterr()
    assert "the context of 220 has room for 205 tokens of 300" in captured.err
    assert "ort: passed, no drift" in captured.out and "the first 205 of 205 tokens" in captured.out
    assert max(map(len, captured.out.splitlines())) <= 130 and "teacher forced" in captured.out


def test_drift_from_a_golden(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The golden's answer is the generation; the original cannot score the engine's own."""
    golden = tmp_path / "g.safetensors"
    assert run("reference", made / "llama", "-o", golden, "--tokens", 16, "--answer", 100, "-q") == 0
    capsys.readouterr()
    code = run("parity", made / "llama-out", "--drift", "--golden", golden, "--json", "-q")
    body = json.loads(capsys.readouterr().out)
    assert code == 0 and body["passed"] and "snr_db" not in body["free_running"]
    assert body["free_running"]["verdict"] == "equal" and body["free_running"]["tokens"] <= 100


@pytest.mark.parametrize(("args", "message"), [
    (["--tokens", "20"], "a slope takes at least 56 tokens"), (["--stages"], "takes --engine"),
    (["--prompt", "a"], "takes --engine"),
])  # fmt: skip
def test_refusals(args: list[str], message: str, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("parity", made / "llama-out", "--drift", *args, "-q") == 2
    assert message in capsys.readouterr().err


def test_a_golden_too_short_for_a_slope(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = tmp_path / "short.safetensors"
    assert run("reference", made / "llama", "-o", golden, "--tokens", 1, "--answer", 0, "-q") == 0
    assert run("parity", made / "llama-out", "--drift", "--golden", golden, "-q") == 2
    assert "a slope takes 56 tokens, the golden has 1 that fit" in capsys.readouterr().err
