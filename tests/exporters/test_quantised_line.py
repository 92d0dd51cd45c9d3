"""Quantised exports by the line: what they are worth, what a repeated one redoes, caches of the user, refusals."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_runs import LLAMA, SPARK, run, write_checkpoint, write_tokenizer
from safetensors.numpy import load_file, save_file

import exporters.stages
from exporters import calibration
from exporters.job import find_scheme
from exporters.line import Job, Line
from exporters.own_weights import OwnWeights
from exporters.prove import RecipeReference
from exporters.quantised import Quantised
from quantize.calibrate import Calibration, save
from quantize.observe import Seen
from ringstep import console
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.manifest import Manifest
from ringstep.parity.metrics import snr_db
from ringstep.parity.reference import TransformersReference
from ringstep.session import DecodeSession

MODEL = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "tie_word_embeddings": False}
NEAREST = "[weights]\nbits = 8\n[head]\nbits = 8\n"
TOKENS = 48
FIRST = 3  # "user", with which every chat begins
QUANTISED = ["tokenizer", "graphs", "calibrate", "round", "qdq", "contract", "report"]


@pytest.fixture(scope="module", autouse=True)
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sources as they were when the first test began, and a cache of calibrations that is nobody's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporters.stages, "source_hash", functools.cache(exporters.stages.source_hash))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Schemes, a text, and a llama with a tokenizer, without one, and with a sink at the token all chats begin with."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "nearest.toml").write_text(NEAREST)
    for seed, name in enumerate(("text.txt", "other.txt")):
        words = np.random.default_rng(seed).integers(4, MODEL["vocab_size"], 2000)
        (folder / name).write_text(" ".join(f"w{i}" for i in words))
    write_tokenizer(write_checkpoint(folder / "llama", MODEL), MODEL["vocab_size"])
    write_checkpoint(folder / "mute", MODEL)
    plant(Path(shutil.copytree(folder / "llama", folder / "sink")))
    (folder / "wide.toml").write_text("[weights]\nbits = 16\n[head]\nbits = 16\n[embedding]\nbits = 16\n")
    return folder


def plant(folder: Path) -> None:
    """As in SmolLM2: an MLP answers the token that all chats begin with by massive activations, and no other."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][FIRST] = 3 * np.eye(64)[5]
    for name, factor in (("gate_proj", 10), ("up_proj", 10)):
        tensors[f"model.layers.0.mlp.{name}.weight"][:, 5] *= factor
    tensors["model.layers.0.self_attn.o_proj.weight"] *= np.float32(0.05)  # so that the token's row is not drowned
    save_file(tensors, folder / "model.safetensors")


def built(model: Path, out: Path, files: Path, **options: Any) -> list[str]:
    """Run the line; returns the stages that ran."""
    job: dict[str, Any] = {"format": "onnx", "context": 64, "calibration_tokens": 320, "parity": False}
    if "precision" not in options:
        job["scheme"] = files / "nearest.toml"
    if model.name in ("llama", "sink"):
        job["calibration"] = files / "text.txt"
    line = Line(Job(model=str(model), out=out, **job | options))
    line.run()
    manifest = Manifest.load(out)
    recorded = {name for record in manifest.stages.values() for name in record.outputs}
    present = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert present == recorded | {"manifest.json", ".ringstep.lock"}
    return line.redone


def decoded(out: Path, ids: list[int], each: int = 1) -> np.ndarray:
    """Logits on ONNX Runtime, `each` tokens at a time."""
    with DecodeSession.open(out, threads=1) as session:
        return np.concatenate([session.step(ids[at : at + each]) for at in range(0, len(ids), each)])


def ids_of(vocab: int) -> list[int]:
    return [FIRST, *(int(i) for i in np.random.default_rng(11).integers(4, vocab, TOKENS - 1))]


def rounded(model: Path, out: Path, ids: list[int]) -> np.ndarray:
    """Logits of an artifact's rounded weights and table in floats: the recipe in eager torch."""
    return OwnWeights(out, open_checkpoint(str(model))).truth(ids).logits


def judged(original: np.ndarray, weights: np.ndarray, have: np.ndarray, floor: float) -> None:
    """An artifact against the original and against its own weights in floats, at the end as at the beginning.

    Random models are chaotic: 8-bit weights alone leave 24 to 33 dB of them, and up to 4 dB between any two stretches.
    What activations, caches and windows add on top must be little, and no more at the end.
    """
    whole, alone = snr_db(original, have), snr_db(original, weights)
    parts = [snr_db(weights[at : at + 16], have[at : at + 16]) for at in range(0, TOKENS, 16)]
    print(f"{whole:.1f} dB, weights alone {alone:.1f}; activations by 16 positions {[round(p, 1) for p in parts]}")
    assert original.shape == weights.shape == have.shape == (TOKENS, original.shape[1])
    assert abs(whole - alone) <= 1
    assert min(parts) >= floor and parts[-1] >= parts[0] - 3


@pytest.fixture(scope="module")
def spark(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Spark by the preset w8a16, with a prefill graph."""
    out = tmp_path_factory.mktemp("spark") / "out"
    assert built(SPARK, out, files, precision="w8a16", chunk=8) == QUANTISED
    return out


def test_spark_does_not_drift(spark: Path, golden: dict[str, np.ndarray]) -> None:
    """48 positions over rings of 15, in decode and in prefill."""
    ids = golden["input_ids"].tolist()
    weights = rounded(SPARK, spark, ids)
    for each in (1, 8):
        judged(golden["logits"], weights, decoded(spark, ids, each), 50)
    assert snr_db(golden["logits"], weights) >= 22
    spec = StepSpec.load(spark)
    assert {c.kind for c in spec.caches} == {"ring", "append"} and {c.dtype for c in spec.caches} == {"int16"}
    assert spec.dtype == "uint16" and spec.scheme == "w8a16" and spec.prefix is None


def test_spark_does_not_drift_on_other_texts(spark: Path) -> None:
    """Against floats over twelve texts: rings overwritten a second time lose no more than the first time.

    The first eight positions are better by 2 to 3 dB whatever rounds the weights, since little is mixed in yet.
    """
    original, generator = RecipeReference(open_checkpoint(str(SPARK))), np.random.default_rng(5)
    truth, have = [], []
    for _ in range(12):
        ids = [1, *(int(i) for i in generator.integers(4, original.plan.vocab, TOKENS - 1))]
        truth.append(original.truth(ids).logits)
        have.append(decoded(spark, ids))
    parts = [snr_db(np.array(truth)[:, at : at + 16], np.array(have)[:, at : at + 16]) for at in (0, 16, 32)]
    print([round(p, 1) for p in parts])
    assert abs(parts[2] - parts[1]) <= 1.5 and parts[2] >= 22


@pytest.mark.parametrize("model", ["llama", "mute"])
def test_llama_with_and_without_a_tokenizer(model: str, base: Path, files: Path, tmp_path: Path) -> None:
    out = base if model == "llama" else tmp_path / "out"
    assert model == "llama" or built(files / model, out, files) == QUANTISED
    ids = ids_of(MODEL["vocab_size"])
    truth = TransformersReference(open_checkpoint(str(files / model))).truth(ids)
    judged(truth.logits, rounded(files / model, out, ids), decoded(out, ids), 55)
    assert snr_db(truth.logits, decoded(out, ids)) >= 25


@pytest.mark.parametrize("layout", ["ring", "roll"])
def test_8_bit_caches(layout: str, files: Path, tmp_path: Path, golden: dict[str, np.ndarray]) -> None:
    """uint8 keys and values from scheme to session; `roll` has the encodings that calibration saw in rings."""
    (tmp_path / "kv8.toml").write_text(NEAREST + "[cache]\nbits = 8\n")
    ids, out = golden["input_ids"].tolist(), tmp_path / "out"
    built(SPARK, out, files, scheme=tmp_path / "kv8.toml", layout={"sliding": layout})
    spec = StepSpec.load(out)
    assert {c.dtype for c in spec.caches} == {"uint8"} and {c.kind for c in spec.caches} == {layout, "append"}
    for graph in spec.graphs:
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.layer is not None:
                assert tensor.dtype == "uint8" and tensor.encoding and tensor.encoding.zero == 128
    weights, have = rounded(SPARK, out, ids), decoded(out, ids)
    assert min(snr_db(weights[at : at + 16], have[at : at + 16]) for at in (0, 16, 32)) >= 22
    with DecodeSession.open(out, threads=1) as session:
        session.step(ids[:20])
        assert all(array.dtype == np.uint8 for array in session.caches.values())
        keys = session.entries(0)[1]
        assert keys.dtype == np.float32 and 0.1 < np.abs(keys).max() < 100


def test_a_planted_sink_becomes_the_prefix(files: Path, tmp_path: Path) -> None:
    """Found, computed in float, shipped and begun with; without it the text costs more or stays partly in float."""
    out, ids = tmp_path / "with", ids_of(MODEL["vocab_size"])
    built(files / "sink", out, files, scheme=files / "wide.toml", chunk=8)
    spec, facts = StepSpec.load(out), Manifest.load(out).stages["calibrate"].facts
    assert facts["prefix"] == [FIRST] and [(s["position"], s["token"]) for s in facts["sinks"]] == [(0, FIRST)]
    assert facts["sinks"][0]["ratio"] > 20 and facts["sinks"][0]["layer"] == 0
    assert spec.prefix is not None and spec.prefix.ids == (FIRST,) and (out / spec.prefix.file).is_file()
    body = json.loads((out / "quantize/report.json").read_text())
    assert body["sinks"][0]["token"] == FIRST and body["prefix"]["ids"] == [FIRST]
    truth = TransformersReference(open_checkpoint(str(files / "sink"))).truth(ids)
    for each in (1, 8, TOKENS):
        have = decoded(out, ids, each)
        assert snr_db(truth.logits[:1], have[:1]) >= 80  # in float, copied
        assert snr_db(truth.logits[1:], have[1:]) >= 45
    with DecodeSession.open(out, threads=1) as session, pytest.raises(RingstepError, match="begin every text with it"):
        session.step([FIRST + 1, 5])
    built(files / "sink", tmp_path / "off", files, scheme=files / "wide.toml", sink_prefix="off")
    assert StepSpec.load(tmp_path / "off").prefix is None and not (tmp_path / "off/sink.bin").exists()
    off = decoded(tmp_path / "off", ids)
    print(f"with {snr_db(truth.logits[1:], have[1:]):.1f} dB, off {snr_db(truth.logits[1:], off[1:]):.1f} dB")
    assert snr_db(truth.logits[1:], off[1:]) >= 20
    decoded(tmp_path / "off", ids[1:])  # any text


@pytest.fixture(scope="module")
def base(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "out"
    built(files / "llama", out, files)
    return out


@pytest.fixture
def out(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "out"))


def test_a_second_run_redoes_nothing(out: Path, files: Path) -> None:
    times = {p: p.stat().st_mtime_ns for p in out.rglob("*.bin")}
    assert built(files / "llama", out, files) == []
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.bin")} == times and times


def test_other_activations_redo_the_graphs_alone(out: Path, files: Path, tmp_path: Path) -> None:
    tighter = "[activations]\npercentile = 90\n[activations.ranges]\nlogits = 'percentile'\n"
    (tmp_path / "nearest.toml").write_text(NEAREST + tighter)
    weights = (out / "onnx/quantised.bin").stat().st_mtime_ns
    assert built(files / "llama", out, files, scheme=tmp_path / "nearest.toml") == ["qdq", "contract", "report"]
    assert (out / "onnx/quantised.bin").stat().st_mtime_ns == weights


def test_another_text_redoes_calibration(out: Path, files: Path) -> None:
    redone = built(files / "llama", out, files, calibration=files / "other.txt")
    assert redone == ["calibrate", "round", "qdq", "contract", "report"]


def test_the_same_text_elsewhere_redoes_nothing(out: Path, files: Path, tmp_path: Path) -> None:
    """Results are kept by content: neither the file's name nor its time matter."""
    shutil.copyfile(files / "text.txt", tmp_path / "moved.txt")
    assert built(files / "llama", out, files, calibration=tmp_path / "moved.txt") == []


def test_the_same_scheme_by_another_name(out: Path, files: Path, tmp_path: Path) -> None:
    (tmp_path / "renamed.toml").write_text("description = 'the same'\n" + NEAREST)
    redone = built(files / "llama", out, files, scheme=tmp_path / "renamed.toml")
    assert not {"calibrate", "round"} & set(redone)
    assert StepSpec.load(out).scheme == "renamed"


@pytest.mark.parametrize(
    ("name", "place"),
    [("calibrate", "quantize.calibrate.calibrate"), ("round", "quantize.rounding.walk.round_weights"),
     ("qdq", "quantize.qdq.to_qdq"), ("contract", "exporters.step_file.save")],
)  # fmt: skip
def test_an_interrupted_export_resumes(
    name: str, place: str, out: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a stage: what was before it stands, nothing of it is left, and the next run goes on from there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changed = ["calibrate", "round", "qdq", "contract", "report"]

    def stop(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, stop)
        with pytest.raises(KeyboardInterrupt):
            built(files / "llama", out, files, calibration=files / "other.txt")
    assert not [p for p in out.rglob("*") if ".tmp" in p.name]
    again = built(files / "llama", out, files, calibration=files / "other.txt")
    assert again == changed[changed.index(name) :]


def test_a_calibration_is_kept_for_the_user(
    out: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By content, for other exports: used, and done again where the kept file is damaged or there can be no cache."""
    cache, own = tmp_path / "home/ringstep/calibration", out / "quantize/calibration.npz"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    ran: list[int] = []
    calibrate, before = Quantised.calibrate, own.read_bytes()
    monkeypatch.setattr(Quantised, "calibrate", lambda own, path: (ran.append(1), calibrate(own, path))[1])

    def again() -> int:
        own.unlink()
        assert built(files / "llama", out, files) == ["calibrate"]
        assert own.read_bytes() == before
        return len(ran)

    assert again() == 1
    (kept,) = cache.iterdir()
    assert kept.read_bytes() == before
    assert again() == 1  # from the cache
    kept.write_bytes(before[:5000])
    assert again() == 2 and kept.read_bytes() == before
    shutil.rmtree(cache)
    cache.write_text("a file where a folder should be")
    assert again() == 3


def test_the_cache_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibrations used longest ago go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save(tmp_path / "c.npz", Calibration(1, {"x": Seen(-1, 1, 1.0)}))
    for i in range(calibration.CACHED + 5):
        calibration.to_cache(f"k{i}", tmp_path / "c.npz")
        os.utime(calibration.cache_folder() / f"k{i}.npz", (1000 + i, 1000 + i))
        if i == calibration.CACHED - 1:
            assert calibration.from_cache("k0", tmp_path / "d.npz")  # used again: it stays
    left = {p.stem for p in calibration.cache_folder().iterdir()}
    assert len(left) <= calibration.CACHED + 1 and "k0" in left and "k1" not in left
    assert not calibration.from_cache("never", tmp_path / "e.npz")


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line that an export leaves with."""
    capsys.readouterr()
    assert run("-q", "export", *args) == console.FAILURE
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("ringstep: warning: ")]
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith("ringstep: error: "), captured.err
    assert "internal error" not in captured.err
    return lines[0]


TEXTS: dict[str, tuple[bytes, str]] = {
    "short.txt": (b"w4 w5 w6 w7", "has 4 tokens, needs at least 99"),
    "empty.txt": (b"", "holds no text"),
    "blank.txt": (b" \n\n \n", "holds no text"),
    "utf16.txt": ("w4 w5".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "latin.txt": (b"w4 \xe9t\xe9", "is not UTF-8"),
    "binary.txt": (b"w4\0w5", "is no text"),
    "broken.jsonl": (b'{"text": "w4"}\n{"text": 5}\n', "line 2"),
    "text.md": (b"w4 w5", "neither .txt nor .jsonl"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_calibration_text(name: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = TEXTS[name]
    (tmp_path / name).write_bytes(content)
    line = refused(capsys, files / "llama", "--format", "onnx", "--scheme", files / "nearest.toml", "--calibration",
                   tmp_path / name, "--calibration-tokens", 96, "--context", 64, "--out", tmp_path / "out")  # fmt: skip
    assert words in line, line
    assert not (tmp_path / "out/onnx").exists()  # before anything was traced


def test_text_without_a_tokenizer(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, files / "mute", "--format", "onnx", "--scheme", files / "nearest.toml", "--calibration",
                   files / "text.txt", "--out", tmp_path / "out")  # fmt: skip
    assert "no tokenizer to read text with" in line
    line = refused(capsys, files / "mute", "--format", "onnx", "--scheme", files / "nearest.toml",
                   "--calibration-tokens", 9, "--context", 16, "--out", tmp_path / "out")  # fmt: skip
    assert "--calibration-tokens" in line and "at least 64" in line


LPBQ = "[weights]\nbits = 4\nblock = 32\ntwo_level = true\n"
BAD: dict[str, tuple[str, list[Any], list[str]]] = {
    "LPBQ before v69": (LPBQ, ["--device", "qcs6490"], ["v68", "need v69"]),
    "16 bits before v73": ("[weights]\nbits = 16\n", ["--device", "sm8450"], ["v69", "need v73"]),
    "floats before v69": ("[exceptions]\nnorms = 0\n", ["--device", "qcs6490"], ["v68", "float16"]),
    "a table inside": (NEAREST, ["--format", "onnx", "--embedding", "inside"], ["--embedding inside", "leave"]),
    "joined scores": (NEAREST, ["--format", "onnx", "--layout", "join"], ["--layout join", "ring or append"]),
    "joined by kind": (NEAREST, ["--format", "onnx", "--layout", "full=join"], ["--layout join"]),
    "accurate forms": (NEAREST, ["--format", "onnx", "--activations", "accurate"], ["--activations accurate"]),
    "blocks too long": (LPBQ.replace("32", "24"), ["--format", "onnx"], ["block", "power of two"]),
    "an override of nothing": (NEAREST + "[[override]]\npattern = 'layers.7.*'\nbits = 4\n", ["--format", "onnx"],
                               ["layers.7.*", "matches none"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_use(name: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheme, args, words = BAD[name]
    (tmp_path / "s.toml").write_text(scheme)
    line = refused(capsys, files / "llama", "--scheme", tmp_path / "s.toml", "--calibration", files / "text.txt", *args,
                   "--out", tmp_path / "out")  # fmt: skip
    for word in words:
        assert word in line, line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite(
    name: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Path(shutil.copytree(files / "llama", tmp_path / "bad"))
    tensors = load_file(bad / "model.safetensors")
    tensors[name].flat[-5] = np.nan
    save_file(tensors, bad / "model.safetensors")
    line = refused(capsys, bad, "--format", "onnx", "--scheme", files / "nearest.toml", "--calibration",
                   files / "text.txt", "--calibration-tokens", 96, "--out", tmp_path / "out")  # fmt: skip
    assert f"tensor {name}" in line and "not finite" in line


def test_an_empty_precision_is_none() -> None:
    with pytest.raises(RingstepError, match="--precision '' is unknown"):
        find_scheme(Job(model="m", out=Path("out"), precision=""))


def test_onnx_runtime_says_nothing_of_its_own(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A refused graph is the command's one line."""
    (out / "onnx/quantised.bin").write_bytes(b"short")
    assert run("generate", out, "--prompt", "w5", "--raw") == console.FAILURE
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ringstep: error: ") and "ONNX Runtime refuses it" in line
