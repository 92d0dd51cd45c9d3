"""The stage that rescales: quantize/rescale.npz, by which everything after it reads the model's weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.stages import READERS, versions
from ringstep import console

if TYPE_CHECKING:
    from exporters.quantised import Quantised
    from ringstep.manifest import StageRecord

RESCALE = "quantize/rescale.npz"


def stage_rescale(own: Quantised, done: dict[str, dict[str, str]]) -> StageRecord:
    """Find the scales on calibration's texts, and have the line read through them from here on."""
    from exporters.quantised import FLOAT
    from quantize.scheme import paths_of

    line = own.line

    def build(folder: Path) -> dict[str, Any]:
        import numpy as np

        from quantize.folding.rescale import OUT, find

        model, texts = own.open_model(), own.texts
        # The first token may be a sink, which is known only later; all texts begin with it.
        sequences = [ids[1:] for ids in texts]
        with console.progress("rescaling", len(line.plan.layers) * sum(map(len, sequences))) as tick:
            found = find(model, sequences, texts[0][:1], own.scheme, tick)
        (folder / RESCALE).parent.mkdir()
        with open(folder / RESCALE, "wb") as file:
            np.savez(file, **found)  # type: ignore[arg-type]
        return {"rescaled": [name.removeprefix(OUT) for name in found if name.startswith(OUT)]}

    grids = {path: own.grid_of(path) for path in paths_of(line.plan)}
    options = {"rotate": own.scheme.rotate,
               "grids": {path: grid and dataclasses.asdict(grid) for path, grid in grids.items()}}  # fmt: skip
    inputs = {"checkpoint": line.manifest.checkpoint["sha256"], "ids": own.texts_hash,
              "graph": done["graphs"][f"onnx/{FLOAT}"]}  # fmt: skip
    record = line.stage("rescale", inputs, options, versions(
        "quantize", "recipes", "ringstep/session.py", "exporters/rescaled.py", *READERS, libraries=("torch",)),
        build)  # fmt: skip
    line.scales = load(own.job.out / RESCALE)
    return record


def load(path: Path) -> dict[str, Any]:
    """What the stage wrote."""
    import numpy as np

    with np.load(path, allow_pickle=False) as body:
        return {name: body[name] for name in body.files}
