"""`--method`: modules with fixed shapes, one .pte a chunk size."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export_runs import run
from test_executorch import needs_executorch
from test_executorch_qnn import needs_libraries
from torch import Tensor, nn

from exporters.executorch import module
from exporters.job import Job
from exporters.line import Line
from exporters.tiny import write_tiny
from recipes import fixed
from recipes.plan import FixedModule, Source
from ringstep import pte
from ringstep.errors import RingstepError


@needs_executorch
def test_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One program a chunk size, a manifest of them, and a second run that does nothing."""
    model, out = write_tiny(tmp_path / "model", "llama"), tmp_path / "out"
    command = ("export", model, "--format", "executorch", "--method", "head=1,6", "--out", out)
    assert run(*command) == 0
    assert "executorch/head_6.pte" in capsys.readouterr().out
    body = json.loads((out / "modules.json").read_text())
    assert body["method"] == "head" and [p["chunk"] for p in body["programs"]] == [1, 6]
    for program in body["programs"]:
        assert program["snr_db"]["logits"] > 110
        described = pte.describe(out / program["file"])
        for side in ("inputs", "outputs"):
            assert [[t["name"], list(t["shape"]), t["dtype"]] for t in described["methods"]["forward"][side]] == \
                   [[t["name"], t["shape"], t["dtype"]] for t in program[side]]  # fmt: skip
        assert described["constants"]["get_chunk"] == program["chunk"]
    assert run(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["redone"] == []
    assert run("inspect", out) == 0 and "executorch/head_6.pte" in capsys.readouterr().out
    for damaged in ((out / "modules.json").read_text()[:20], "{}", "[]"):
        (out / "modules.json").write_text(damaged)
        assert run("inspect", out) == 2
        assert "modules.json" in capsys.readouterr().err


@needs_libraries
def test_head_on_the_simulator(tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = write_tiny(tmp_path / "model", "llama")
    Line(Job(model=str(model), out=out, format="executorch", device="galaxy-s25", method="head=4")).run()
    body = json.loads((out / "modules.json").read_text())
    assert body["passed"] and body["simulated"] and body["chip"] == "sm8750"
    assert 45 < body["programs"][0]["snr_db"]["logits"] < 90  # float16, not float32


class Vocoder(nn.Module):
    """A stateless decoder of a window of codes: transposed and dilated convolutions, as vocoders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix = nn.ConvTranspose1d(8, 4, 4, stride=2), nn.Conv1d(4, 1, 3, dilation=2)

    def forward(self, codes: Tensor) -> Tensor:
        return torch.tanh(self.mix(F.leaky_relu(self.up(codes), 0.1)))


@needs_executorch
def test_windowed_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that a recipe adds to its plan, in this process: no recipe has one yet."""
    shapes = {"up.weight": (8, 4, 4), "up.bias": (4,), "mix.weight": (1, 4, 3), "mix.bias": (1,)}
    vocoder = FixedModule(lambda options: Vocoder(), {name: Source(name, shape) for name, shape in shapes.items()},
                          lambda n: {"codes": (1, 8, n)}, ("samples",))  # fmt: skip
    random = np.random.default_rng(1)
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    monkeypatch.setattr(fixed, "fixed_modules", lambda plan: {"vocoder": vocoder})
    monkeypatch.setattr(Line, "read", property(lambda line: lambda source: weights[source.name]))
    here = lambda what, function, *args, **_: SimpleNamespace(value=function(*args), seconds=0.0, peak_bytes=0)
    monkeypatch.setattr(module.child, "run", here)
    model = write_tiny(tmp_path / "model", "llama")
    Line(Job(model=str(model), out=tmp_path / "out", format="executorch", method="vocoder=8,20")).run()
    body: dict[str, Any] = json.loads((tmp_path / "out/modules.json").read_text())
    assert body["passed"] and [p["outputs"][0]["shape"] for p in body["programs"]] == [[1, 1, 14], [1, 1, 38]]


def test_parse() -> None:
    assert module.parse("head") == ("head", ()) and module.parse("vocoder=25,50") == ("vocoder", (25, 50))
    for bad in ("head=0", "head=x", "head=1,", "head=-4", "head=99999999"):
        with pytest.raises(RingstepError, match="chunk sizes are numbers"):
            module.parse(bad)
    for bad in ("", "=1,2"):
        with pytest.raises(RingstepError, match=f"--method '{bad}': names no module"):
            module.parse(bad)


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--format", "onnx", "--method", "head"), "--method head: goes with --format executorch"),
     (("--format", "executorch", "--method", ""), "names no module"),
     (("--format", "executorch", "--method", "hed"), "did you mean head"),
     (("--format", "executorch", "--precision", "8da4w", "--method", "head"), "in fp32 or fp16")],
)  # fmt: skip
@needs_executorch
def test_refusals(options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny(tmp_path / "model", "llama")
    assert run("export", model, "--out", tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


@needs_executorch
def test_a_whole_model_is_not_overwritten(tmp_path: Path) -> None:
    model, out = write_tiny(tmp_path / "model", "llama"), tmp_path / "out"
    Line(Job(model=str(model), out=out, format="onnx", context=16, parity=False)).run()
    with pytest.raises(RingstepError, match="holds a whole model"):
        Line(Job(model=str(model), out=out, format="executorch", method="head=1")).run()
    assert (out / "step.json").exists()
