"""What a quantised export prints of the linears that `auto` raised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from export_runs import LLAMA, run, write_checkpoint, write_tokenizer

from exporters.quantize_report import print_auto
from quantize.store import load_index

MODEL = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 96}
SCHEME = "[weights]\nbits = 4\n[auto]\ntarget_db = 24\nsteps = ['4 -> 8']\n"


def test_an_export_with_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    write_tokenizer(write_checkpoint(tmp_path / "model", MODEL), MODEL["vocab_size"])
    (tmp_path / "own.toml").write_text(SCHEME)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 90 + 4}" for i in range(7, 7000, 7)))
    args = ["quantize", "model", "--scheme", "own.toml", "--out", "out", "--calibration", "text.txt", "--context", 32,
            "--calibration-tokens", 96]  # fmt: skip
    capsys.readouterr()
    assert run(*args) == 0
    out = capsys.readouterr().out
    assert run(*args, "--json") == 0
    body = json.loads(capsys.readouterr().out)["quantised"]["auto"]
    assert body == json.loads((tmp_path / "out/quantize/auto.json").read_text())
    index = load_index(tmp_path / "out/onnx/quantised.json")
    assert len(body["raised"]) == sum(w.grid.bits == 8 for w in index.values()) - 1 > 0  # the head's 8 are its own
    assert body["start_db"] < body["measured_db"] and max(map(len, out.splitlines())) <= 80
    assert "raised by auto" in out and all(p["path"] in out for p in body["raised"])
    assert f"auto: {body['start_db']:.1f} dB at the scheme's own bits, {body['measured_db']:.1f} dB with" in out


RAISED: dict[str, Any] = {"path": "layers.3.mlp.down_proj", "low": 4, "high": 8, "noise": 0.254, "extra_bytes": 2048,
                          "db": 13.04}  # fmt: skip


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    more = RAISED | {"path": "layers.11.attn.o_proj", "noise": 0.1, "db": 15.01, "measured_db": 14.36}
    body = {"start_db": 12.0, "measured_db": 14.36, "target_db": None, "max_bytes": 1 << 20, "bytes": 1 << 19,
            "raised": [RAISED, more]}  # fmt: skip
    print_auto(body)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layers.3.mlp.down_proj", "4", "->", "8", "25.4", "2.0", "KiB", "13.0"] in lines
    assert ["layers.11.attn.o_proj", "4", "->", "8", "10.0", "2.0", "KiB", "15.0", "14.4"] in lines
    text = "\n".join(" ".join(line) for line in lines)
    assert "auto: 12.0 dB at the scheme's own bits, 14.4 dB with 2 linears raised (4.0 KiB more)" in text
    assert "wanted: at most 1.0 MiB" in text


def test_nothing_raised(capsys: pytest.CaptureFixture[str]) -> None:
    print_auto({"start_db": 25.0, "measured_db": 25.0, "target_db": 24.0, "max_bytes": None, "raised": []})
    out = capsys.readouterr().out
    assert "raised by auto" not in out and "25.0 dB with 0 linears raised" in out and "wanted: 24.0 dB" in out
