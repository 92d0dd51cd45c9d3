"""Ten architectures by both exporters: they come out clean by lint, equal by ONNX Runtime, and the NPU takes them."""

from __future__ import annotations

from pathlib import Path

import corpus
import pytest

from exporters.qnn import compile_context
from ringstep.devices import find_device
from sanitize.command import sanitize_file
from sanitize.target import find_target

MODELS = [f"{name}-{exporter}" for name in corpus.ARCHITECTURES for exporter in corpus.EXPORTERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this module lie."""
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.parametrize("model", MODELS)
def test_clean_equal_and_taken(folder: Path, model: str) -> None:
    from sanitize.lint import lint_file

    name, exporter = model.rsplit("-", 1)
    source = corpus.export(name, exporter, folder / f"{model}.onnx")
    out = folder / f"{model}.clean.onnx"
    report = sanitize_file(source, out, target="qnn-htp", chip="sm8750", precision="fp16", verify=True)
    assert report["nodes_after"] > 0 and report["verified"]
    findings = lint_file(out, find_target("qnn-htp", "sm8750", "fp16"))
    assert [f for f in findings if f.severity == "error" or f.fixed_by] == []
    again = sanitize_file(out, None, target="qnn-htp", chip="sm8750", precision="fp16")
    assert {p["name"]: p["changes"] for p in again["passes"] if p["changes"]} == {}
    pytest.importorskip("onnxruntime_qnn")
    chip = find_device("sm8750").chip
    compiled = compile_context(out, folder / "qnn", chip=chip, fp16=True, name=model)
    assert sum(compiled.npu_ops.values()) > 20
