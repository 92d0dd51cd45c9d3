"""The stage `executorch` of a line: executorch/model.pte."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.stages import READERS, versions
from ringstep import console
from ringstep.manifest import StageRecord

if TYPE_CHECKING:
    from exporters.line import Line

PTE = "executorch/model.pte"
LIBRARIES = ("executorch", "torchao")


def executorch_stage(line: Line) -> StageRecord:
    """Lower the recipe's module for the backend that was asked for. Raises RingstepError without ExecuTorch."""
    from ringstep.engines.executorch import require

    require()

    def build(folder: Path) -> dict[str, Any]:
        from exporters.executorch import export_pte

        (folder / PTE).parent.mkdir()
        with console.progress("lowering for XNNPACK"):
            return export_pte(line.plan, line.options, line.spec, line.read, folder / PTE)

    options = {"context": line.context, "chunks": list(line.chunks), "backend": line.job.lowered_to,
               "precision": line.precision, "eos": line.spec.eos, **dataclasses.asdict(line.options)}  # fmt: skip
    sources = versions("recipes", "exporters/executorch.py", "ringstep/contract.py", *READERS,
                       libraries=("torch", *LIBRARIES))  # fmt: skip
    return line.stage("executorch", {"checkpoint": line.manifest.checkpoint["sha256"]}, options, sources, build)
