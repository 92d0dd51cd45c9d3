"""`ringstep parity --blocks`: every block by itself, and a fault in one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_runs import SPARK

from exporters import block_parity
from exporters.cli import cli
from ringstep import console


def run(*args: object) -> int:
    console.settings.quiet = console.settings.verbose = False
    return console.run(cli, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks") / "artifact"
    options = ("--format", "onnx", "--precision", "fp32", "--context", "64", "--chunk", "8", "--no-parity")
    assert run("-q", "export", SPARK, *options, "--out", folder) == 0
    return folder


def test_every_block_is_what_onnx_runtime_computes(artifact: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert run("-q", "parity", artifact, "--blocks", "--engine", "ort", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["block"] for row in report["blocks"]] == [*(f"layer {i}" for i in range(8)), "head"]
    assert report["tokens"] == 8 and all(row["worst_db"] > 100 for row in report["blocks"])
    assert not list((artifact / "onnx").glob(".bisect*"))


def test_the_chain_is_the_whole_graph(artifact: Path) -> None:
    """The last block's logits, chained block after block, are those of the whole graph."""
    from exporters.cut import part_specs
    from exporters.onnx import graph_file, load_model
    from exporters.surgery import OrtGraph, workshop
    from ringstep.contract import StepSpec

    spec = StepSpec.load(artifact)
    pool = block_parity.fed(artifact, spec, 8)
    want = OrtGraph(artifact / "onnx" / graph_file(8), "whole").run(pool)["logits"]
    model = load_model(artifact / "onnx" / graph_file(8))
    with workshop(artifact) as place:
        for index, part in enumerate(part_specs(spec, spec.graph(8), list(range(8)), "block")):
            path = block_parity.write_block(model, part, place(str(index)))
            pool |= block_parity.run_alone(path, {name: pool[name] for name in part.inputs})
    assert np.abs(pool["logits"] - want).max() < 1e-4 * np.abs(want).max()


def test_a_fault_in_one_block_is_named_there_only(artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    whole = block_parity.OrtGraph

    class Faulty(whole):  # type: ignore[valid-type, misc]
        def run(self, feeds: Any, outputs: Any = None) -> Any:
            made = super().run(feeds, outputs)
            if "block3" in self.name and not self.optimised:
                made["hidden_3"] = -made["hidden_3"]
            return made

        def __init__(self, model: Any, name: str, optimised: bool = True) -> None:
            super().__init__(model, name, optimised)
            self.optimised = optimised

    monkeypatch.setattr(block_parity, "OrtGraph", Faulty)
    capsys.readouterr()
    assert run("-q", "parity", artifact, "--blocks", "--engine", "ort", "--json") == console.GATE_FAILED
    report = json.loads(capsys.readouterr().out)
    assert [row["block"] for row in report["blocks"] if row["failures"]] == ["layer 3"]


@pytest.mark.parametrize("options, words", [
    (["--tokens", "5"], "--blocks: takes"), (["--stages"], "--blocks: takes"),
    (["--engine", "executorch"], "one program"), (["--engine", "qnn-sim"], "for no chip")])  # fmt: skip
def test_what_it_refuses(options: list[str], words: str, artifact: Path, capsys: Any) -> None:
    assert run("parity", artifact, "--blocks", *options) == 2
    assert words in capsys.readouterr().err
