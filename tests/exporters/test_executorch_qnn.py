"""ExecuTorch for the NPU: lowered, run on the simulator, and weights shared by decode and prefill."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from export_runs import LLAMA, run, write_checkpoint

from exporters.executorch.qnn import check_shared, check_whole
from exporters.line import Job, Line
from exporters.tiny import tiny_ids, write_tiny
from ringstep import pte, pte_qnn, qairt
from ringstep.contract import StepSpec
from ringstep.devices import find_device
from ringstep.errors import RingstepError
from ringstep.manifest import manifest_of, open_folder
from ringstep.parity.metrics import snr_db
from ringstep.session import DecodeSession, is_simulated


def has_libraries() -> bool:
    try:
        qairt.require()
    except RingstepError:
        return False
    return importlib.util.find_spec("executorch") is not None


needs_libraries = pytest.mark.skipif(not has_libraries(), reason="needs ExecuTorch and ringstep fetch-qairt")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral of rings, decode and prefill in one file."""
    folder = tmp_path_factory.mktemp("qnn")
    model = write_tiny(folder / "model", "mistral-w8")
    Line(Job(model=str(model), out=folder / "out", format="executorch", device="galaxy-s25", context=32, chunk=4,
             parity=False)).run()  # fmt: skip
    return folder / "out"


@needs_libraries
def test_numerics_and_sharing(out: Path, tmp_path: Path) -> None:
    """Against the recipe in float32, past the wrap of a ring of 7; the shipped file has one copy of the weights."""
    model = out.parent / "model"
    Line(Job(model=str(model), out=tmp_path / "onnx", format="onnx", context=32, chunk=4, parity=False)).run()
    spec = StepSpec.load(out)
    ids = tiny_ids(spec.vocab, 20)
    assert spec.dtype == "float16" and is_simulated(spec, "executorch")
    with DecodeSession.open(out, "executorch") as own, DecodeSession.open(tmp_path / "onnx", "ort") as other:
        for start, stop in ((0, 14), (14, 15), (15, 17)):
            have, want = own.step(ids[start:stop]), other.step(ids[start:stop])
            assert min(snr_db(w, h) for w, h in zip(want, have, strict=True)) > 40
    facts = manifest_of(out).stages["executorch"].facts
    assert facts["bytes"] < 0.8 * facts["simulated"]["bytes"]
    assert facts["methods"] == {m: {"delegates": {"QnnBackend": 1}, "cpu_kernels": {}} for m in ("decode", "prefill")}


@needs_libraries
def test_inspect_reads_the_context(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = StepSpec.load(out)
    for name, shared in (("model", True), ("simulated", False)):
        (context,) = pte.describe(out / f"executorch/{name}.pte")["contexts"]
        assert (context["soc"], context["arch"], context["precision"]) == ("SM8750", "v79", "fp16")
        assert context["weight_sharing"] == shared and context["methods"] == ["decode", "prefill"]
        assert context["qairt"].startswith("v2.")
    found = pte_qnn.graphs(out / "executorch/model.pte")  # the shared one, which nothing here could run
    assert found.keys() == {"decode", "prefill"}
    for graph, name in zip(spec.graphs, ("decode", "prefill"), strict=True):
        have = sorted(tuple(t["shape"]) for t in found[name]["inputs"])
        assert have == sorted(t.shape for t in graph.inputs)
        assert {t["dtype"] for t in found[name]["inputs"]} == {"float_16"}
    assert run("inspect", out / "executorch/model.pte", "--json") == 0
    assert json.loads(capsys.readouterr().out)["graphs"].keys() == {"decode", "prefill"}


def test_check_whole() -> None:
    """A second delegate, or a kernel on the CPU, is an error that lists what was left."""
    good = {"decode": {"delegates": {"QnnBackend": 1}, "cpu_kernels": {}}}
    check_whole(good, "model.pte")
    split = {"decode": {"delegates": {"QnnBackend": 2}, "cpu_kernels": {"aten::topk": 3}}}
    with pytest.raises(RingstepError, match="decode has 2 delegates, one is wanted; left to the CPU: 3 aten::topk"):
        check_whole(split, "model.pte")


def test_check_shared() -> None:
    check_shared(1_000_000, 1_990_000, 1_000_000, 2)
    with pytest.raises(RingstepError, match="not held once"):
        check_shared(1_900_000, 1_990_000, 1_000_000, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--backend", "qnn"), "give --device"),
     (("--device", "galaxy-s25", "--precision", "fp32"), "the NPU computes in fp16"),
     (("--device", "galaxy-s25", "--precision", "8da4w"), "is XNNPACK's, give --backend xnnpack"),
     (("--device", "galaxy-s25", "--precision", "int4-g128"), "leave --device out and use --format onnx for a CPU"),
     (("--device", "sm8450", "--chunk", "4"), "takes v73 or newer; leave --chunk out"),
     (("--device", "qcs6490"), "has no fp16")],
)  # fmt: skip
@needs_libraries
def test_refusals_first(
    options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny(tmp_path / "model", "llama")
    assert run("export", model, "--format", "executorch", "--context", "16", "--out", tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


@needs_libraries
@pytest.mark.parametrize("precision", ["fp16", "w4a16-block"])
def test_weights_beyond_a_context(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .pte has no parts: what one context cannot hold is refused first, in a folder that is there already too."""
    s25 = find_device("galaxy-s25")
    small = dataclasses.replace(s25, chip=dataclasses.replace(s25.chip, graph_limit_mb=0))
    monkeypatch.setattr("exporters.job.find_device", lambda name: small)
    config = {**LLAMA, "hidden_size": 768, "intermediate_size": 768, "num_attention_heads": 12, "head_dim": 64}
    model, out = write_checkpoint(tmp_path / "model", config), tmp_path / "out"
    job = Job(model=str(model), out=out, format="executorch", device="galaxy-s25", precision=precision, context=16)
    with pytest.raises(RingstepError, match=r"\d MiB of weights, and one context of sm8750 holds 0 MiB: use --format"):
        Line(job).run()
    assert not out.exists()
    with open_folder(out):
        pass
    with pytest.raises(RingstepError, match="one context of sm8750"):
        Line(job).run()
