"""`ringstep quantize` and `ringstep schemes`: one rounding in every format, resumed, reported, refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_runs import LLAMA, run, write_checkpoint, write_tokenizer
from safetensors.numpy import load_file, save_file

from quantize.scheme_file import load_scheme, presets
from quantize.store import load_index, weight_at
from ringstep import console
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import StepSpec
from ringstep.manifest import Manifest
from ringstep.session import DecodeSession

MODEL = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 96}
OPTIONS = ["--context", 32, "--calibration-tokens", 96]
NPU = """
[weights]
bits = 4
block = 32
two_level = true
"""
CPU = """
sink_prefix = "off"
[weights]
bits = 4
block = 32
symmetric = false
[head]
bits = 4
block = 32
symmetric = false
[embedding]
dtype = "float16"
[activations]
bits = 0
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """model/ that speaks, npu.toml and cpu.toml; npu/ in all formats; cpu/ exported and proven, then as GPTQ too."""
    folder = tmp_path_factory.mktemp("quantize")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("COLUMNS", "80")
        patch.chdir(folder)
        write_tokenizer(write_checkpoint(folder / "model", MODEL), MODEL["vocab_size"])
        (folder / "npu.toml").write_text(NPU)
        (folder / "cpu.toml").write_text(CPU)
        (folder / "w8.toml").write_text("[weights]\nbits = 8\n")
        (folder / "text.txt").write_text(" ".join(f"w{i % 90 + 4}" for i in range(7, 7000, 7)))
        formats = ["--format", "qdq,gptq,matmulnbits", "--format", "encodings", "--format", "genie-table"]
        assert run("quantize", "model", "--scheme", "npu.toml", "--out", "npu", "-q", *formats, *TEXT, *OPTIONS) == 0
        assert run("export", "model", "--scheme", "cpu.toml", "--format", "onnx", "--out", "cpu", "-q", *TEXT,
                   *OPTIONS) == 0  # fmt: skip
        assert run("quantize", "model", "--scheme", "cpu.toml", "--format", "gptq,encodings", "--out", "cpu", "-q",
                   *TEXT, *OPTIONS) == 0  # fmt: skip
        yield folder


TEXT = ["--calibration", "text.txt"]


def words(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """GPTQ's int32 words taken apart along an axis, one number after the other."""
    shifts = np.arange(0, 32, bits).astype(np.uint32)
    parts = (np.moveaxis(packed, axis, -1).view(np.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    return np.moveaxis(parts.reshape(*parts.shape[:-2], -1), -1, axis).astype(np.int64)


def from_gptq(folder: Path) -> dict[str, np.ndarray]:
    """The floats that a reader of a GPTQ checkpoint makes of every linear, by the checkpoint's name."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
        own = next((v for k, v in config.get("dynamic", {}).items() if name in k.replace("\\", "")), config)
        q = words(np.ascontiguousarray(tensors[f"{name}.qweight"].T), own["bits"], -1).T  # [in, out]
        zero = words(tensors[f"{name}.qzeros"], own["bits"], -1)
        zero = zero + (config["checkpoint_format"] == "gptq")
        group = tensors[f"{name}.g_idx"]
        scale = tensors[f"{name}.scales"].astype(np.float32)
        found[f"{name}.weight"] = ((q - zero[group]) * scale[group]).T.astype(np.float32)
    return found


@pytest.mark.parametrize("artifact", ["npu", "cpu"])
def test_every_format_has_the_rounded_numbers(artifact: str, made: Path) -> None:
    index = load_index(made / artifact / "onnx/quantised.json")
    gptq = from_gptq(made / artifact / "gptq")
    assert len(gptq) == 2 * 7 + 1
    for name, have in gptq.items():
        stored = index["model.embed_tokens.weight" if name == "lm_head.weight" else name]
        want = weight_at(made / artifact / "onnx", stored).dequantised()
        # GPTQ keeps scales in float16.
        assert np.allclose(have, want, rtol=2**-10, atol=1e-7), name
    encodings = json.loads((made / artifact / "quantize/encodings.json").read_text())
    names = [entry["name"] for entry in encodings["param_encodings"]]
    assert sorted(names) == sorted(index)
    assert {e["enc_type"] for e in encodings["param_encodings"]} == (
        {"LPBQ", "PER_CHANNEL"} if artifact == "npu" else {"PER_BLOCK"})  # fmt: skip
    assert bool(encodings["activation_encodings"]) == (artifact == "npu")


def test_accuracy_level_reaches_the_graphs(made: Path) -> None:
    import onnx

    scheme = made / "fast.toml"
    scheme.write_text(CPU.replace("bits = 0\n", "bits = 0\naccuracy_level = 4\n"))
    levels = {}
    for name in ("fast", "cpu"):
        if name == "fast":
            assert run("export", "model", "--scheme", str(scheme), "--format", "onnx", "--out", str(made / name), "-q",
                       "--no-parity", *TEXT, *OPTIONS) == 0  # fmt: skip
        nodes = onnx.load(made / name / "onnx/decode.onnx", load_external_data=False).graph.node
        products = [node for node in nodes if node.op_type == "MatMulNBits"]
        levels[name] = {a.i for node in products for a in node.attribute if a.name == "accuracy_level"}
        assert len(products) == 2 * 7 + 1
    assert levels == {"fast": {4}, "cpu": set()}


@pytest.mark.parametrize("artifact", ["npu/matmulnbits", "cpu"])
def test_cpu_graphs_compute_the_rounded_model(artifact: str, made: Path, tmp_path: Path) -> None:
    same_as_dequantised(made, artifact, tmp_path)


def test_a_part_of_an_artifact_knows_its_own_weights(made: Path) -> None:
    # What windows are held against lies in the outer artifact: onnx/quantised.json, rescaling, the manifest.
    from exporters.own_weights import OwnWeights
    from exporters.prove import as_stored
    from ringstep.checkpoint import open_checkpoint
    from ringstep.parity.metrics import snr_db

    checkpoint = open_checkpoint(str(made / "model"))
    inner, outer = (OwnWeights(made / name, checkpoint).truth([3, 5, 8]) for name in ("npu/matmulnbits", "npu"))
    assert snr_db(outer.logits, inner.logits) > 25
    for one, other in zip(as_stored(inner, made / "npu/matmulnbits").caches, as_stored(inner, made / "npu").caches,
                          strict=True):  # fmt: skip
        assert np.array_equal(one[2], other[2])


def test_linears_left_in_float_are_the_checkpoints(copy: Path, tmp_path: Path) -> None:
    floats = "[[override]]\npattern = '*.1.mlp.down_proj'\ndtype = 'float16'\n"
    (copy / "cpu.toml").write_text(CPU.replace("[head]\nbits = 4\nblock = 32\nsymmetric = false",
                                               "[head]\ndtype = 'float16'") + floats)  # fmt: skip
    assert run("quantize", "model", "--scheme", "cpu.toml", "--out", "cpu", "-q", *TEXT, *OPTIONS) == 0
    assert len(load_index(copy / "cpu/onnx/quantised.json")) == 13
    same_as_dequantised(copy, "cpu", tmp_path)


def test_rotated_weights_come_with_their_norms(copy: Path) -> None:
    from ringstep.parity.metrics import snr_db
    from ringstep.parity.reference import TransformersReference

    (copy / "cpu.toml").write_text("rotate = 'hadamard'\n" + CPU.replace("bits = 4", "bits = 8"))
    assert run("quantize", "model", "--scheme", "cpu.toml", "--out", "cpu", "-q", *TEXT, *OPTIONS) == 0
    ids = [1, *range(40, 60)]
    truth = TransformersReference(open_checkpoint("model")).truth(ids)
    with DecodeSession.open(copy / "cpu", "ort") as session:
        assert snr_db(truth.logits, session.step(ids)) > 25  # 8 bits; with the original's norms it is no model


def same_as_dequantised(made: Path, artifact: str, tmp_path: Path) -> None:
    """Against transformers on a checkpoint whose weights are the dequantised ones."""
    from ringstep.parity.metrics import snr_db
    from ringstep.parity.reference import TransformersReference

    home = made / artifact.split("/")[0]
    tensors = load_file(made / "model/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for name, stored in load_index(home / "onnx/quantised.json").items():
        tensors["lm_head.weight" if "embed" in name else name] = weight_at(home / "onnx", stored).dequantised()
    spec = StepSpec.load(made / artifact)
    table = np.fromfile(made / artifact / "onnx/embedding.bin", spec.embedding.dtype, 96 * 64).reshape(96, 64)
    if spec.embedding.scales is not None:
        scales = np.fromfile(made / artifact / "onnx/embedding.bin", "<f4", 96, offset=spec.embedding.scales)
        table = table * scales[:, None]
    tensors["model.embed_tokens.weight"] = table.astype(np.float32)
    shutil.copytree(made / "model", tmp_path / "rounded")
    save_file(tensors, tmp_path / "rounded/model.safetensors")
    (tmp_path / "rounded/config.json").write_text(json.dumps(MODEL | {"tie_word_embeddings": False}))
    ids = [1, *range(40, 60)]
    truth = TransformersReference(open_checkpoint(str(tmp_path / "rounded"))).truth(ids)
    with DecodeSession.open(made / artifact, "ort") as session:
        assert snr_db(truth.logits, session.step(ids)) > 90


def test_genie_table_is_the_table(made: Path) -> None:
    body = json.loads((made / "npu/genie/table.json").read_text())
    raw = np.fromfile(made / "npu/genie/embedding.bin", "<u2").reshape(96, 64).astype(np.float64)
    want = load_file(made / "model/model.safetensors")["model.embed_tokens.weight"]
    path, kind, scale, offset = body["argument"].split(",")
    assert (path, kind) == ("embedding.bin", "uint16")
    assert np.abs(float(scale) * (raw + int(offset)) - want).max() < 0.51 * float(scale)
    x = next(t for t in StepSpec.load(made / "npu").graphs[0].inputs if t.name == "x")
    fed = body["requantisation"]["factor"] * raw + body["requantisation"]["shift"]
    assert x.encoding and np.abs(x.encoding.scale * (np.rint(fed) - x.encoding.zero) - want).max() < x.encoding.scale


def test_sizes_are_those_on_disk(made: Path) -> None:
    for artifact, formats in (("npu", {"qdq", "gptq", "matmulnbits"}), ("cpu", {"gptq"})):
        sizes = json.loads((made / artifact / "quantize/sizes.json").read_text())
        assert set(sizes) == formats
        for name, body in sizes.items():
            file, floats = body["file_bytes"], sum(p["bytes"] for p in body["parameters"] if len(p["shape"]) == 1)
            if name == "gptq":
                raw = (made / artifact / "gptq/model.safetensors").read_bytes()
                file -= 8 + int.from_bytes(raw[:8], "little")  # the header
                file -= 4 * sum(p["shape"][1] for p in body["parameters"][1:] if len(p["shape"]) == 2)  # g_idx
                assert file == body["bytes"], artifact
            else:
                # Norms are in the QDQ graph itself, and arrays begin at multiples of 64 bytes.
                aligned = 64 * 3 * len(body["parameters"])
                least = body["bytes"] - (floats if name == "qdq" else 0)
                assert least <= file < least + aligned, (artifact, name, file, least)
            assert body["bytes"] == sum(p["bytes"] for p in body["parameters"])
    head = next(p for p in sizes["gptq"]["parameters"] if p["path"] == "head")
    assert head["stored"] == "uint4 x 32" and head["bits"] == 4 + (16 + 4) / 32


def stages(folder: Path) -> list[str]:
    return list(Manifest.load(folder).stages)


def test_stages_are_recorded_with_their_files(made: Path) -> None:
    assert set(stages(made / "npu")) == {
        "tokenizer", "graphs", "calibrate", "round", "qdq", "contract", "gptq", "matmulnbits", "genie-table", "report",
    }  # fmt: skip
    manifest = Manifest.load(made / "npu")
    assert "gptq/model.safetensors" in manifest.stages["gptq"].outputs
    assert "matmulnbits/step.json" in manifest.stages["matmulnbits"].outputs
    assert {"quantize/encodings.json", "onnx/decode.onnx"} <= manifest.stages["qdq"].outputs.keys()
    recorded = {name for record in manifest.stages.values() for name in record.outputs}
    there = {str(p.relative_to(made / "npu")) for p in (made / "npu").rglob("*") if p.is_file()}
    assert there - recorded == {"manifest.json", ".ringstep.lock"}


def test_quantising_beside_an_export_keeps_its_proof(made: Path) -> None:
    names = stages(made / "cpu")
    assert {"matmulnbits", "contract", "parity", "gptq", "encodings"} <= set(names)
    assert StepSpec.load(made / "cpu").scheme == "cpu" and (made / "cpu/parity.json").is_file()
    assert Manifest.load(made / "cpu").stages["parity"].facts["passed"]


@pytest.fixture
def copy(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of everything, to change; the working folder."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copy/cache"))
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def parsed(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    capsys.readouterr()
    assert run(*args, "--json") == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_second_run_redoes_what_changed(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["quantize", "model", "--scheme", "npu.toml", "--out", "npu", *TEXT, *OPTIONS]
    formats = ["--format", "qdq,gptq,matmulnbits,genie-table"]
    body = parsed(capsys, *again, *formats)
    assert body["redone"] == [] and body["parity"] is None
    (copy / "npu/gptq/config.json").write_text("{}")
    assert parsed(capsys, *again, *formats)["redone"] == ["gptq"]
    # Fewer formats: the others hold still, and only the report is about other files.
    body = parsed(capsys, *again, "--format", "qdq")
    assert body["redone"] == ["report"] and (copy / "npu/gptq/config.json").is_file()
    assert list(body["quantised"]["sizes"]) == ["qdq"]
    # An export of the same goes on from here, and keeps them too.
    body = parsed(capsys, "export", "model", "--format", "onnx", "--no-parity", *again[2:])
    assert body["redone"] == [] and "gptq" in stages(copy / "npu")
    body = parsed(capsys, "export", "model", "--format", "onnx", "--no-parity", "--layout", "append", *again[2:])
    assert "gptq" in stages(copy / "npu")
    # Other activations: the weights are as they were, the graphs are not.
    (copy / "npu.toml").write_text(NPU + "[activations]\npercentile = 80\nranges.residual = 'percentile'\n")
    body = parsed(capsys, *again, "--format", "qdq")
    assert {"graphs", "qdq", "contract", "report"} == set(body["redone"])  # graphs: the layout was another
    (line,) = body["quantised"]["warnings"]
    assert "lose more than 1 % of their values to clipping (/layers." in line
    assert {"gptq", "matmulnbits"} <= set(stages(copy / "npu"))
    # Its input is another now.
    assert "genie-table" not in stages(copy / "npu") and not (copy / "npu/genie").exists()
    # Other weights: what was written of the old ones goes.
    (copy / "npu.toml").write_text(NPU.replace("= 32\ntwo", "= 16\ntwo"))
    body = parsed(capsys, *again, "--format", "qdq")
    assert "round" in body["redone"] and not (copy / "npu/gptq").exists() and not (copy / "npu/matmulnbits").exists()


def test_a_compiled_export_stays_compiled(copy: Path, capsys: pytest.CaptureFixture[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The compiler is not asked: what it would write is a word."""
    from exporters.qnn import CompileReport

    def compiled(onnx: Path, out: Path, *, name: str, **options: Any) -> CompileReport:
        out.mkdir()
        (out / f"{name}_ctx.onnx").write_text(str(len(asked)))
        asked.append(name)
        return CompileReport((), "sm8750", 1.0, 1, 1, {}, {"MatMul": 1}, "1")

    asked: list[str] = []
    monkeypatch.setattr("exporters.qnn.compile_context", compiled)
    same = ["model", "--device", "galaxy-s25", "--scheme", "npu.toml", "--out", "npu", *TEXT, *OPTIONS]
    export = ["export", *same, "--no-parity"]
    assert "qnn-decode" in parsed(capsys, *export)["redone"]
    step = (copy / "npu/step.json").read_text()
    body = parsed(capsys, "quantize", *same, "--format", "qdq,genie-table")
    assert "qnn-decode" not in body["redone"] and "contract" not in body["redone"]
    assert (copy / "npu/step.json").read_text() == step and body["options"]["format"] == "qnn"
    assert '"qnn/decode_ctx.onnx"' in step and (copy / "npu/qnn/decode_ctx.onnx").is_file()
    assert parsed(capsys, *export)["redone"] == [] and asked == ["decode"]
    # As ONNX nothing says what was compiled: it goes, the formats stay.
    parsed(capsys, *export, "--format", "onnx")
    assert not (copy / "npu/qnn").exists() and "genie-table" in stages(copy / "npu")
    # For another chip the graphs are others.
    assert "qdq" in parsed(capsys, "quantize", *same, "--device", "qcs6490", "--scheme", "w8.toml")["redone"]


def test_json_has_sizes_sinks_and_warnings(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = parsed(capsys, "quantize", "model", "--scheme", "cpu.toml", "--format", "gptq", "--out", "cpu", *TEXT,
                  *OPTIONS)  # fmt: skip
    own = body["quantised"]
    assert own.keys() == {"scheme", "tokens", "sinks", "prefix", "warnings", "sizes"}
    assert own["scheme"] == "cpu" and own["sizes"]["gptq"]["bits"] > 4
    # Float activations and weights to nearest: no text is of use, and none is read.
    assert own["tokens"] == 0 and json.loads((copy / "npu/quantize/report.json").read_text())["tokens"] >= 96
    assert body["passed"] is True  # the export's proof, which still holds


def test_tables_fit_80_columns(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("quantize", "model", "--scheme", "npu.toml", "--out", "npu", *TEXT, *OPTIONS) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word in ("npu as qdq", "int4 x 32 two-level", "bits a weight", "on disk", "attention sinks"):
        assert word in out


def test_parts_of_an_artifact_are_described_and_proven(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = parsed(capsys, "inspect", "npu/matmulnbits")
    assert {"step.json", "onnx/decode.onnx", "onnx/weights.nbits.bin"} <= set(body["files"])
    assert "quantize/report.json" not in body["files"]
    (report,) = parsed(capsys, "parity", "npu/matmulnbits", "--tokens", 9)
    assert report["summary"]["scheme"] == "npu" and report["summary"]["passed"]


def test_sinks_in_words() -> None:
    from exporters.quantize_report import sink_lines

    sinks = [{"position": i, "token": 5 + i, "text": "<s>" if not i else None, "layer": 2, "ratio": 336.2,
              "largest": 9.0} for i in range(5)]  # fmt: skip
    body: dict[str, Any] = {"sinks": sinks, "prefix": {"ids": [5], "texts": ["<s>"]}}
    lines = sink_lines(body)
    assert lines[0] == "attention sink at position 0: token 5 '<s>', 336 times the rest in layer 2"
    assert lines[1].startswith("attention sink at position 1: token 6, ")
    assert lines[3:] == [
        "... and at 2 more positions",
        "sink prefix: '<s>', its keys and values kept in float; every text begins with it",
    ]
    assert sink_lines(body | {"prefix": {"ids": [], "texts": []}})[-1].startswith("no sink prefix")
    assert sink_lines({"sinks": [], "prefix": {"ids": [], "texts": []}})[0].startswith("no attention sinks")


def test_warnings_are_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    from exporters.show import finish

    body = {"quantised": {"warnings": ["3 tensors lose more", "1 tensor had one value"]}, "redone": []}
    finish(body, as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == body
    assert captured.err == "ringstep: warning: 3 tensors lose more\nringstep: warning: 1 tensor had one value\n"


def test_schemes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run("schemes") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in presets()) and max(map(len, listed.splitlines())) <= 80
    bodies = parsed(capsys, "schemes")
    assert [body["name"] for body in bodies] == presets() and all(body["description"] for body in bodies)
    for name in presets():
        assert run("schemes", name) == 0
        (tmp_path / f"{name}.toml").write_text(capsys.readouterr().out)  # as `ringstep schemes NAME > NAME.toml`
        assert load_scheme(tmp_path / f"{name}.toml") == load_scheme(name)
    assert parsed(capsys, "schemes", "w4a16")["weights"]["bits"] == 4


BAD: dict[str, tuple[list[Any], list[str]]] = {
    "no scheme": (["quantize", "model"], ["Missing option '--scheme'"]),
    "unknown scheme": (["quantize", "model", "--scheme", "w8a61"], ["'w8a61' (did you mean w8a16?)"]),
    "unknown schemes": (["schemes", "w8a61"], ["'w8a61' (did you mean w8a16?)"]),
    "nothing to quantise": (["quantize", "model", "--scheme", "fp16"], ["fp16 quantises nothing"]),
    "unknown format": (["quantize", "model", "--scheme", "w8a16", "--format", "qdq,gtpq"],
                       ["'gtpq' is none of qdq, gptq,", "(did you mean gptq?)"]),
    "weights alone in QDQ": (["quantize", "model", "--scheme", "cpu.toml", "--format", "qdq"],
                             ["--format qdq: scheme cpu leaves activations in float", "gptq for CPUs"]),
    "weights alone on a chip": (["quantize", "model", "--scheme", "cpu.toml", "--device", "galaxy-s25"],
                                ["cpu leaves activations in float", "leave --device out for a CPU"]),
    "weights alone for QNN": (["export", "model", "--scheme", "cpu.toml", "--device", "galaxy-s25"],
                              ["leaves activations in float", "leave --device out and use --format onnx"]),
    "zero points in QDQ": (["quantize", "model", "--scheme", "asymmetric.toml"],
                           ["asymmetric: layers.0.attn.q_proj: HTP refuses weights with zero points"]),
    "floats in QDQ": (["quantize", "model", "--scheme", "floats.toml"], ["floats: head: its weights stay in float16"]),
    "groups of no reader": (["quantize", "model", "--scheme", "wide.toml", "--format", "gptq"],
                            ["(layers.0.attn.q_proj): its 64 inputs are no multiple of groups of 128"]),
    "16 bits on a CPU": (["quantize", "model", "--scheme", "sixteen.toml", "--format", "matmulnbits"],
                         ["(layers.0.attn.q_proj): MatMulNBits has no 16 bits"]),
    "two precisions": (["export", "model", "--scheme", "npu.toml", "--precision", "w8a16"],
                       ["--scheme npu.toml and --precision w8a16: give one of them"]),
    "unknown precision": (["export", "model", "--precision", "fp61"],
                          ["--precision 'fp61' is unknown (did you mean fp16?)", "there are fp32, fp16, auto,"]),
    "precision of a preset": (["export", "model", "--precision", "w4a61"], ["(did you mean w4a16?)"]),
    "no fp16": (["export", "model", "--device", "qcs6490"], ["has no fp16: use --precision w8a16, or choose another"]),
    "GPTQ as input": (["export", "npu/gptq", "--format", "onnx"],
                      ["npu/gptq: quantised already", "quant_method gptq", "give the unquantised checkpoint"]),
    "GPTQ quantised again": (["quantize", "npu/gptq", "--scheme", "w8a16"], ["quant_method gptq"]),
    "fp8 as input": (["quantize", "fp8", "--scheme", "w8a16"], ["quantization_config: quant_method fp8"]),
    "MLX as input": (["export", "mlx", "--format", "onnx"], ["config.json quantization: quant_method not given"]),
    "AutoGPTQ as input": (["export", "auto", "--format", "onnx"], ["quantised already (quantize_config.json)"]),
}  # fmt: skip


@pytest.fixture
def bad(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Schemes and checkpoints to refuse, beside the good ones; the working folder."""
    files = {
        "asymmetric": "[weights]\nbits = 4\nsymmetric = false\n", "floats": "[head]\ndtype = 'float16'\n",
        "wide": CPU.replace("block = 32", "block = 128"), "sixteen": "[weights]\nbits = 16\n",
    }  # fmt: skip
    for name, text in files.items():
        (made / f"{name}.toml").write_text(text)
    fp8, mlx = {"quantization_config": {"quant_method": "fp8"}}, {"quantization": {"bits": 4}}
    configs: dict[str, Any] = {"fp8": fp8, "mlx": mlx, "auto": {}}
    for name, more in configs.items():
        write_checkpoint(made / name, MODEL)
        (made / name / "config.json").write_text(json.dumps(MODEL | more))
    (made / "auto/quantize_config.json").write_text("{}")
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize("name", BAD)
def test_bad_use(name: str, bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args, words = BAD[name]
    capsys.readouterr()
    code = run(*args, *([] if args[0] == "schemes" else ["--out", "refused"]))
    captured = capsys.readouterr()
    assert code == console.FAILURE and captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("ringstep: error: "), captured.err
    assert "internal error" not in captured.err
    for word in words:
        assert word in captured.err
    assert not (bad / "refused").exists()
