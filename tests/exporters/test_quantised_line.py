"""Quantised exports by the line: what they are worth, what a repeated one redoes, caches of the user, refusals."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_runs import LLAMA, SPARK, run, write_checkpoint, write_tokenizer
from safetensors.numpy import load_file, save_file

import exporters.line
import exporters.stages
from exporters.line import Job, Line
from exporters.quantised import Quantised
from ringstep import console
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import StepSpec
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
    (folder / "text.txt").write_text(" ".join(f"w{i * i % 57 + 4}" for i in range(2000)))
    (folder / "other.txt").write_text(" ".join(f"w{i * i % 53 + 4}" for i in range(2000)))
    write_tokenizer(write_checkpoint(folder / "llama", MODEL), MODEL["vocab_size"])
    write_checkpoint(folder / "mute", MODEL)
    shutil.copytree(folder / "llama", folder / "sink")
    tensors = load_file(folder / "sink/model.safetensors")
    tensors["model.embed_tokens.weight"][FIRST] *= 2000
    save_file(tensors, folder / "sink/model.safetensors")
    return folder


def built(model: Path, out: Path, files: Path, **options: Any) -> list[str]:
    """Run the line; returns the stages that ran."""
    job: dict[str, Any] = {"format": "onnx", "context": 64, "calibration_tokens": 96, "parity": False}
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


def steady(want: np.ndarray, have: np.ndarray, floor: float) -> float:
    """SNR of all positions, no worse at the end than at the beginning."""
    assert want.shape == have.shape == (TOKENS, want.shape[1])
    first, last = snr_db(want[:16], have[:16]), snr_db(want[-16:], have[-16:])
    whole = snr_db(want, have)
    print(f"{whole:.1f} dB, first 16 {first:.1f}, last 16 {last:.1f}")
    assert whole >= floor and abs(first - last) <= 2
    return whole


@pytest.fixture(scope="module")
def spark(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Spark by the preset w8a16, with a prefill graph."""
    out = tmp_path_factory.mktemp("spark") / "out"
    assert built(SPARK, out, files, precision="w8a16", chunk=8) == QUANTISED
    return out


def test_spark_does_not_drift(spark: Path, golden: dict[str, np.ndarray]) -> None:
    """48 positions over rings of 15: the last third is as good as the first, in decode and in prefill."""
    ids = golden["input_ids"].tolist()
    one = steady(golden["logits"], decoded(spark, ids), 30)
    assert abs(steady(golden["logits"], decoded(spark, ids, 8), 30) - one) < 0.5
    spec = StepSpec.load(spark)
    assert {c.kind for c in spec.caches} == {"ring", "append"} and {c.dtype for c in spec.caches} == {"int16"}
    assert spec.dtype == "uint16" and spec.scheme == "w8a16" and spec.prefix is None


@pytest.mark.parametrize("model", ["llama", "mute"])
def test_llama_with_and_without_a_tokenizer(model: str, files: Path, tmp_path: Path) -> None:
    assert built(files / model, tmp_path / "out", files) == QUANTISED
    ids = ids_of(MODEL["vocab_size"])
    truth = TransformersReference(open_checkpoint(str(files / model))).truth(ids)
    steady(truth.logits, decoded(tmp_path / "out", ids), 30)


def test_8_bit_caches_and_rolled_windows(files: Path, tmp_path: Path, golden: dict[str, np.ndarray]) -> None:
    """uint8 keys and values from scheme to session; `roll` has the encodings that calibration saw in rings."""
    (tmp_path / "kv8.toml").write_text(NEAREST + "[cache]\nbits = 8\n")
    ids = golden["input_ids"].tolist()
    found = {}
    for layout in ("ring", "roll"):
        own = {"sliding": layout} if layout == "roll" else {}
        built(SPARK, tmp_path / layout, files, scheme=tmp_path / "kv8.toml", layout=own)
        spec = StepSpec.load(tmp_path / layout)
        assert {c.dtype for c in spec.caches} == {"uint8"}
        assert {c.kind for c in spec.caches} == {layout, "append"}
        for graph in spec.graphs:
            for tensor in (*graph.inputs, *graph.outputs):
                if tensor.layer is not None:
                    assert tensor.dtype == "uint8" and tensor.encoding and tensor.encoding.zero == 128
        found[layout] = decoded(tmp_path / layout, ids)
        steady(golden["logits"], found[layout], 24)
        with DecodeSession.open(tmp_path / layout, threads=1) as session:
            session.step(ids[:20])
            assert all(array.dtype == np.uint8 for array in session.caches.values())
            keys = session.entries(0)[1]
            assert keys.dtype == np.float32 and 0.1 < np.abs(keys).max() < 100
    assert snr_db(found["ring"], found["roll"]) >= 35


@pytest.fixture(scope="module")
def sink(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a planted sink, exported with its prefix."""
    out = tmp_path_factory.mktemp("sink") / "out"
    assert built(files / "sink", out, files, chunk=8) == QUANTISED
    return out


def test_a_planted_sink_becomes_the_prefix(sink: Path, files: Path) -> None:
    manifest, spec = Manifest.load(sink), StepSpec.load(sink)
    facts = manifest.stages["calibrate"].facts
    assert facts["prefix"] == [FIRST] and [s["position"] for s in facts["sinks"]] == [0]
    assert facts["sinks"][0]["token"] == FIRST and facts["sinks"][0]["ratio"] > 20
    assert spec.prefix is not None and spec.prefix.ids == (FIRST,) and (sink / spec.prefix.file).is_file()
    ids = ids_of(MODEL["vocab_size"])
    truth = TransformersReference(open_checkpoint(str(files / "sink"))).truth(ids)
    for each in (1, 8, TOKENS):
        have = decoded(sink, ids, each)
        assert snr_db(truth.logits[:1], have[:1]) >= 80  # in float, copied
        assert snr_db(truth.logits[1:], have[1:]) >= 30
    with DecodeSession.open(sink, threads=1) as session, pytest.raises(console.RingstepError, match="begin every text"):
        session.step([FIRST + 1, 5])


def test_without_the_prefix_the_sink_costs_accuracy_or_floats(sink: Path, files: Path, tmp_path: Path) -> None:
    """--sink-prefix off: no sink.bin, and the text may begin with anything."""
    built(files / "sink", tmp_path / "out", files, sink_prefix="off")
    spec = StepSpec.load(tmp_path / "out")
    assert spec.prefix is None and not (tmp_path / "out/sink.bin").exists()
    ids = ids_of(MODEL["vocab_size"])
    truth = TransformersReference(open_checkpoint(str(files / "sink"))).truth(ids)
    have = decoded(tmp_path / "out", ids)
    assert snr_db(truth.logits[1:], have[1:]) <= snr_db(truth.logits[1:], decoded(sink, ids)[1:]) + 0.5
    decoded(tmp_path / "out", ids[1:])


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
    (tmp_path / "nearest.toml").write_text(NEAREST + "[activations.ranges]\nlogits = 'percentile'\n")
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
    ("name", "place", "left"),
    [("calibrate", "quantize.calibrate.calibrate", 2), ("round", "quantize.rounding.walk.round_weights", 3),
     ("qdq", "quantize.qdq.to_qdq", 4), ("contract", "exporters.step_file.save", 5)],
)  # fmt: skip
def test_an_interrupted_export_resumes(
    name: str, place: str, left: int, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a stage: what was before it stands, nothing of it is left, and the next run goes on from there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"

    def stop(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, stop)
        with pytest.raises(KeyboardInterrupt):
            built(files / "llama", out, files)
    assert list(Manifest.load(out).stages) == QUANTISED[:left]
    assert not [p for p in out.rglob("*") if ".tmp" in p.name]
    assert built(files / "llama", out, files) == QUANTISED[left:]


def test_a_calibration_is_kept_for_the_user(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By content, for other exports: used, refreshed, and done again where the file is damaged or the cache is none."""
    cache = tmp_path / "home/ringstep/calibration"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    ran: list[int] = []
    calibrate = Quantised.calibrate
    monkeypatch.setattr(Quantised, "calibrate", lambda own, path: (ran.append(1), calibrate(own, path))[1])
    built(files / "llama", tmp_path / "one", files)
    (kept,) = cache.iterdir()
    assert len(ran) == 1
    assert "calibrate" in built(files / "llama", tmp_path / "two", files) and len(ran) == 1
    same = "quantize/calibration.npz"
    assert (tmp_path / "one" / same).read_bytes() == (tmp_path / "two" / same).read_bytes() == kept.read_bytes()
    kept.write_bytes(kept.read_bytes()[:5000])
    built(files / "llama", tmp_path / "three", files)
    assert len(ran) == 2 and kept.read_bytes() == (tmp_path / "one" / same).read_bytes()
    shutil.rmtree(cache)
    cache.parent.rmdir()
    cache.parent.write_text("a file where a folder should be")
    built(files / "llama", tmp_path / "four", files)
    assert len(ran) == 3 and (tmp_path / "four" / same).read_bytes() == (tmp_path / "one" / same).read_bytes()


def test_the_cache_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibrations used longest ago go."""
    from exporters import calibration
    from quantize.calibrate import Calibration, save

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from quantize.observe import Seen

    save(tmp_path / "c.npz", Calibration(1, {"x": Seen(-1, 1, 1.0)}))
    import os

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
    assert run("export", *args) == console.FAILURE
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
    assert not (tmp_path / "out/step.json").exists() and not (tmp_path / "out/onnx/decode.onnx").exists()


def test_text_without_a_tokenizer(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, files / "mute", "--format", "onnx", "--scheme", files / "nearest.toml", "--calibration",
                   files / "text.txt", "--out", tmp_path / "out")  # fmt: skip
    assert "no tokenizer to read text with" in line
    line = refused(capsys, files / "mute", "--format", "onnx", "--scheme", files / "nearest.toml",
                   "--calibration-tokens", 9, "--context", 16, "--out", tmp_path / "out")  # fmt: skip
    assert "--calibration-tokens" in line and "at least 64" in line


LPBQ = "[weights]\nbits = 4\nblock = 32\ntwo_level = true\n"
BAD: dict[str, tuple[str, list[Any], list[str]]] = {
    "LPBQ before v69": (LPBQ, ["--device", "qcs6490"], ["qcs6490" if False else "v68", "need v69"]),
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


@pytest.mark.parametrize(("name", "word"), [("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj"),
    ("model.norm.weight", "model.norm.weight"), ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "lm_head.weight")])  # fmt: skip
def test_weights_that_are_not_finite(
    name: str, word: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(files / "llama", tmp_path / "bad")
    tensors = load_file(tmp_path / "bad/model.safetensors")
    tensors[name].flat[-5] = np.nan
    save_file(tensors, tmp_path / "bad/model.safetensors")
    line = refused(capsys, tmp_path / "bad", "--format", "onnx", "--scheme", files / "nearest.toml", "--calibration",
                   files / "text.txt", "--calibration-tokens", 96, "--context", 64, "--out",
                   tmp_path / "out")  # fmt: skip
    assert f"tensor {word}" in line and "not finite" in line


def test_the_report_says_what_was_found(sink: Path) -> None:
    body = json.loads((sink / "quantize/report.json").read_text())
    assert body["sinks"][0]["token"] == FIRST and body["prefix"]["ids"] == [FIRST]
