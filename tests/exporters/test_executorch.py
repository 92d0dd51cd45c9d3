"""ExecuTorch: one .pte with decode and prefill, held against ONNX Runtime, and what its inspection says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from export_runs import GEMMA, LLAMA, run, write_checkpoint

from exporters.line import Job, Line
from exporters.tiny import tiny_ids, write_tiny
from ringstep import pte
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db
from ringstep.session import DecodeSession

installed = importlib.util.find_spec("executorch") is not None
needs_executorch = pytest.mark.skipif(not installed, reason="ExecuTorch is not installed")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 (rings, full layers, sandwich and query norms) with a chunk."""
    folder = tmp_path_factory.mktemp("gemma3")
    model = write_checkpoint(folder / "model", GEMMA)
    job = Job(model=str(model), out=folder / "out", format="executorch", context=32, chunk=8, parity=False)
    Line(job).run()
    return folder / "out"


@needs_executorch
def test_equals_onnx_runtime(out: Path) -> None:
    """Chunks, a padded chunk and single tokens, past the second wrap of a ring of 7."""
    ids = tiny_ids(StepSpec.load(out).vocab, 30)
    with DecodeSession.open(out, "executorch") as own, DecodeSession.open(out, "ort") as other:
        for start, stop in ((0, 20), (20, 21), (21, 30)):
            have, want = own.step(ids[start:stop]), other.step(ids[start:stop])
            assert snr_db(want, have) > 110
        for layer in range(len(own.spec.caches)):
            for one, two in zip(own.entries(layer), other.entries(layer), strict=True):
                np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


@needs_executorch
def test_inspect(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Methods and names of the contract, weights held once, one delegate a method."""
    spec, file = StepSpec.load(out), out / "executorch/model.pte"
    body = pte.describe(file)
    for graph, name in zip(spec.graphs, ("decode", "prefill"), strict=True):
        method = body["methods"][name]
        for side in ("inputs", "outputs"):
            assert [(t["name"], tuple(t["shape"]), t["dtype"]) for t in method[side]] == \
                   [(t.name, t.shape, t.dtype) for t in getattr(graph, side)]  # fmt: skip
        assert method["delegates"] == {"XnnpackBackend": 1} and not method["cpu_kernels"]
    assert body["constants"]["get_vocab_size"] == spec.vocab and body["constants"]["get_chunk"] == 8
    assert body["constants"]["get_eos_ids"] == [2] and body["constants"]["get_layer_kinds"] == ["ring 7", "append 31"]
    assert not body["warnings"]
    weights = (out / "onnx/weights.bin").stat().st_size + (out / "onnx/embedding.bin").stat().st_size
    assert body["bytes"] < 1.6 * weights  # two copies would be more
    assert run("inspect", file) == 0
    assert "prefill: delegates: 1 XnnpackBackend" in capsys.readouterr().out
    assert run("inspect", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["methods"].keys() == {"decode", "prefill"}


@needs_executorch
def test_damaged_files(out: Path, tmp_path: Path) -> None:
    """Truncated, foreign and other-version files are refused in one line by inspect and by the engine."""
    whole = (out / "executorch/model.pte").read_bytes()
    bad = {
        "truncated": (whole[: len(whole) // 2], "truncated"), "short": (whole[:6], "no .pte"),
        "foreign": (b"PK\3\4" + bytes(60), "no .pte"),
        "newer": (whole[:4] + b"ET99" + whole[8:], "another version"), "empty": (b"", "empty"),
        "torn": (whole[:100] + bytes(len(whole) - 100), "cannot read"),
    }  # fmt: skip
    for name, (data, words) in bad.items():
        file = tmp_path / f"{name}.pte"
        file.write_bytes(data)
        with pytest.raises(RingstepError, match=words) as caught:
            pte.describe(file)
        assert "\n" not in str(caught.value) and str(caught.value).startswith(str(file))


@needs_executorch
def test_any_byte_of_the_program_may_be_wrong(out: Path, tmp_path: Path) -> None:
    """Numbers that lead nowhere are damage, told in one line: 300 files with one byte changed, seeded."""
    whole = bytearray((out / "executorch/model.pte").read_bytes())
    program_bytes = pte.header(out, bytes(whole[: pte.HEAD_BYTES]), len(whole))[0]
    random, refused = np.random.default_rng(0), 0
    for i in range(300):
        at, file = int(random.integers(40, program_bytes)), tmp_path / f"{i}.pte"
        damaged = bytearray(whole)
        damaged[at] = int(random.choice([0, 127, 255]))
        file.write_bytes(damaged)
        try:
            pte.describe(file)
        except RingstepError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 5


def test_without_executorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = lambda name, *rest: None if name == "executorch" else find(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    model = write_tiny(tmp_path / "model", "llama")
    with pytest.raises(RingstepError, match="pip install"):
        Line(Job(model=str(model), out=tmp_path / "out", format="executorch", context=16, parity=False)).run()


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--format", "executorch", "--precision", "w4a16"), "xnnpack has fp32, 8da4w"),
     (("--format", "onnx", "--backend", "xnnpack"), "--backend xnnpack: goes with --format executorch"),
     (("--format", "executorch", "--precision", "w8a16"), "for the NPU give --device"),
     (("--format", "executorch", "--scheme", "x.toml"), "precisions of its own")],
)  # fmt: skip
def test_refusals(options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny(tmp_path / "model", "llama")
    assert run("export", model, "--out", tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def rounded(weight: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Nearest symmetric integers of `bits`, a scale for each `group` inputs of a row, as floats."""
    most = 2 ** (bits - 1)
    blocks = weight.reshape(len(weight), -1, group)
    scale = np.abs(blocks).max(-1, keepdims=True) / (most - 0.5)
    return (np.clip(np.round(blocks / scale), -most, most - 1) * scale).reshape(weight.shape).astype(np.float32)


@needs_executorch
def test_8da4w(tmp_path: Path) -> None:
    """Against ONNX Runtime on weights rounded here: what is left are the 8-bit activations."""
    from safetensors.numpy import load_file, save_file

    config = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
              "tie_word_embeddings": False}  # fmt: skip
    model = write_checkpoint(tmp_path / "model", config)
    twin = write_checkpoint(tmp_path / "twin", config)
    tensors = load_file(model / "model.safetensors")
    for name, weight in tensors.items():
        if weight.ndim == 2 and "embed" not in name:
            tensors[name] = rounded(weight, 8, 64) if "lm_head" in name else rounded(weight, 4, 32)
    save_file(tensors, twin / "model.safetensors")
    common = {"context": 16, "parity": False}
    Line(Job(model=str(model), out=tmp_path / "pte", format="executorch", precision="8da4w", **common)).run()
    Line(Job(model=str(twin), out=tmp_path / "twin-out", format="onnx", **common)).run()
    Line(Job(model=str(model), out=tmp_path / "float-out", format="onnx", **common)).run()
    ids = tiny_ids(config["vocab_size"], 12)
    with DecodeSession.open(tmp_path / "pte", "executorch") as own, DecodeSession.open(tmp_path / "twin-out") as other:
        have = own.step(ids)
        assert snr_db(other.step(ids), have) > 24
    with DecodeSession.open(tmp_path / "float-out") as exact:
        assert 8 < snr_db(exact.step(ids), have) < 20  # it was quantised
    (found,) = pte.describe(tmp_path / "pte/executorch/model.pte")["methods"].values()
    assert found["delegates"] == {"XnnpackBackend": 1} and not found["cpu_kernels"]


@needs_executorch
def test_8da4w_needs_whole_groups(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", LLAMA)
    job = Job(model=str(model), out=tmp_path / "out", format="executorch", precision="8da4w", context=16, parity=False)
    with pytest.raises(RingstepError, match=r"layers\.0\.attn\.q_proj has 48 inputs, no multiple of the group of 32"):
        Line(job).run()
    assert not (tmp_path / "out/executorch").exists()
