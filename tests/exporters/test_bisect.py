"""`ringstep bisect` on the tiny Spark: planted faults found in their layer and at their node, none in what is clean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_runs import GEMMA, LLAMA, SPARK, run, write_checkpoint
from graph_faults import FAULTS, Plant, flipped_rotary, norm_eps, plant, wrong_weights

from exporters.bisect import Bisection, bisect
from exporters.line import Job, Line
from exporters.prove import open_reference
from ringstep import console
from ringstep.checkpoint import open_checkpoint

LAYERS = 8


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bisect") / "spark"
    console.settings.quiet = True
    Line(Job(model=str(SPARK), out=out, format="onnx", context=64, chunk=8, parity=False)).run()
    return out


@pytest.fixture(scope="module")
def bisections(artifact: Path) -> dict[int, Bisection]:
    """One for each graph: what is made of the checkpoint is made once."""
    checkpoint = open_checkpoint(str(SPARK))
    reference = open_reference(checkpoint)
    return {n: Bisection(artifact, checkpoint, "ort", n, reference) for n in (1, 8)}


@pytest.fixture
def edited(artifact: Path) -> Iterator[Path]:
    """The artifact, put back afterwards."""
    kept = {path: path.read_bytes() for path in (artifact / "onnx").iterdir()}
    yield artifact
    for path, content in kept.items():
        path.write_bytes(content)


def test_a_clean_artifact_has_no_fault(bisections: dict[int, Bisection], artifact: Path) -> None:
    (artifact / "onnx" / ".bisect.tmp-999999999.nodes.onnx").touch()  # a killed run's
    for bisection in bisections.values():
        body = bisection.run()
        assert body["first"]["kind"] == "loss", body["verdict"]
        assert min(row["local_db"] for row in body["depth"]) > 100
        assert len(body["depth"]) == LAYERS + 2
    assert not list((artifact / "onnx").glob(".bisect*"))


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_one_layer(bisections: dict[int, Bisection], edited: Path, fault: Plant, layer: int) -> None:
    # Decode and chunk by turns: every fault meets both graphs.
    n, file = ((1, "decode.onnx"), (8, "prefill_8.onnx"))[layer % 2]
    node = plant(edited / "onnx" / file, fault, layer)
    body = bisections[n].run()
    first = body["first"]
    assert (first["kind"], first["layer"], first["node"]) == ("fault", layer, node), body["verdict"]
    assert first["stage"] == "sanitised"  # the traced graph is as it was
    # Later blocks are blameless by themselves, whatever the depth says.
    assert min(row["local_db"] for row in body["depth"][layer + 2 :]) > 100


def test_a_changed_weight_file(bisections: dict[int, Bisection], edited: Path) -> None:
    index = json.loads((edited / "onnx" / "index.json").read_text())
    offset = index["parameters"]["model.layers.5.mlp.up_proj.weight"]["offset"]
    with open(edited / "onnx" / "weights.bin", "r+b") as file:
        file.seek(offset)
        file.write(np.full(64, 3.0, np.float32).tobytes())
    body = bisections[8].run()
    first = body["first"]
    assert (first["layer"], first["node"], first["stage"]) == (5, "/layers.5/mlp/up_proj/Gemm", "traced")
    notes = next(x["notes"] for x in body["nodes"] if x["node"] == first["node"])
    assert any("not the checkpoint's" in note for note in notes)


def test_a_wrong_row_of_the_table(bisections: dict[int, Bisection], edited: Path) -> None:
    table = np.memmap(edited / "onnx" / "embedding.bin", "float32", "r+")
    table[: len(table) // 2] *= 1.1
    table.flush()
    del table
    body = bisections[8].run()
    assert (body["first"]["kind"], body["first"]["tensor"]) == ("fault", "x")


def test_the_command(edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bisect", edited) == 0
    assert "no block is at fault" in capsys.readouterr().out
    node = plant(edited / "onnx" / "prefill_8.onnx", norm_eps, 2)
    assert run("bisect", edited, "--json") == 1
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert body == json.loads((edited / "bisect.json").read_text())
    # The decode graph is clean, so the chunk's was looked at too.
    assert body["graphs"] == [1, 8] and body["first"]["node"] == node
    assert run("bisect", edited, "--graph", 3) == 2
    assert "graphs of 1, 8 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["decode.onnx", "prefill_8.onnx"])
@pytest.mark.parametrize("how", [["--windows", "off"], ["--stages", "--engine", "ort"]])
def test_parity_fails_by_either_graph(edited: Path, file: str, how: list[str]) -> None:
    # 64 tokens are eight whole chunks: the decode graph must run all the same.
    plant(edited / "onnx" / file, flipped_rotary, 3)
    assert run("parity", edited, *how) == 1


def test_a_page_that_cannot_be_written(edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (edited / "onnx" / "file").write_text("")
    assert run("report", edited, "-o", edited / "onnx" / "file" / "page.html") == 2
    assert "page.html cannot be written" in capsys.readouterr().err
    (edited / "onnx" / "file").unlink()


def test_no_compiled_stage_for_the_simulator(edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("parity", edited, "--stages", "--engine", "qnn-sim") == 2
    assert "has no stage compiled: it was exported without --format qnn" in capsys.readouterr().err


def test_on_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime_qnn")
    out = tmp_path / "chip"
    Line(Job(model=str(SPARK), out=out, device="galaxy-s25", context=64, chunk=8, parity=False)).run()
    assert run("bisect", out, "--engine", "qnn-sim", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body["simulated"] and body["first"]["kind"] == "loss" and body["stages"][-1]["stage"] == "compiled"
    assert min(row["local_db"] for row in body["depth"]) > 45
    shutil.copy(out / "onnx" / "decode.onnx", tmp_path)
    plant(out / "onnx" / "decode.onnx", wrong_weights, 4)
    # The context is not compiled anew: bisect compiles what the ONNX files say.
    assert run("bisect", out, "--engine", "qnn-sim", "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["first"]["layer"], body["first"]["node"]) == (4, "/layers.4/attn/q_proj/Gemm")
    assert body["first"]["stage"] == "sanitised"


def test_a_quantised_artifact_whose_graphs_name_other_tensors_alike(tmp_path: Path) -> None:
    # Transpose_output_0 is an int16 key of the decode graph and a uint16 query of the chunk's.
    out = tmp_path / "w8a16"
    Line(Job(model=str(SPARK), out=out, format="onnx", precision="w8a16", context=64, chunk=8,
             calibration_tokens=1024, parity=False)).run()  # fmt: skip
    for n in (1, 8):
        body = bisect(out, open_checkpoint(str(SPARK)), "ort", n)
        assert body["first"]["kind"] == "loss" and body["nodes"], body["verdict"]


@pytest.mark.parametrize(("config", "options"), [
    (LLAMA, {"activations": "accurate"}), (LLAMA, {"layout": {"*": "join"}}), (LLAMA, {"embedding": "inside"}),
    (LLAMA, {"precision": "fp16"}), (GEMMA, {}), (GEMMA, {"embedding": "inside", "layout": {"sliding": "roll"}}),
    (GEMMA, {"precision": "fp16"}),
], ids=["accurate", "join", "table inside", "fp16", "gemma", "gemma rolled", "gemma fp16"])  # fmt: skip
def test_clean_models_of_other_recipes(tmp_path: Path, config: dict[str, Any], options: dict[str, Any]) -> None:
    model, out = write_checkpoint(tmp_path / "model", config), tmp_path / "out"
    job: dict[str, Any] = {"format": "onnx", "context": 32, "chunk": 4, "parity": False, **options}
    Line(Job(model=str(model), out=out, **job)).run()
    body = bisect(out, open_checkpoint(str(model)), "ort")
    assert body["first"]["kind"] == "loss", body["verdict"]
    assert body["reference"].startswith("transformers")
    # The recipe's blocks are transformers' own.
    same = 60 if "precision" in options else 100
    assert min(row["recipe_db"] for row in body["depth"] if row["layer"] is not None) > same
    if "precision" not in options:
        assert min(row["local_db"] for row in body["depth"]) > (70 if "activations" in options else 100)
    plant(out / "onnx" / "decode.onnx", flipped_rotary, 1)
    body = bisect(out, open_checkpoint(str(model)), "ort")
    assert (body["first"]["kind"], body["first"]["node"]) == ("fault", "/layers.1/attn/Sub"), body["verdict"]
