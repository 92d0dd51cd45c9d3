"""An artifact's own rounded weights in floats: what is left against them is the arithmetic and the caches alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from exporters.artifact import Artifact
from exporters.whole_text import whole_text
from ringstep.checkpoint import Checkpoint
from ringstep.encoding import dequantise, open_prefix, open_table
from ringstep.errors import RingstepError
from ringstep.parity.report import Truth


class OwnWeights:
    """The recipe in eager torch, float32, on the weights and the table that a quantised artifact holds.

    Random or chaotic models lose 10 to 30 dB by rounding weights, which would hide a window that is off by one.
    """

    source = "recipe, eager torch, float32, on the artifact's rounded weights"

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        from quantize.store import INDEX, load_index, weight_at
        from recipes.plan import Options, Source
        from recipes.step import DecodeStep, step_spec
        from recipes.weights import key

        artifact = Artifact(folder, checkpoint)
        home = artifact.home / "onnx"
        if not (home / INDEX).is_file():
            raise RingstepError(f"{home / INDEX}: not there, so the rounded weights cannot be read; export again")
        own, (plan, original) = artifact.spec, artifact.weights
        index = load_index(home / INDEX)

        def values(source: Source) -> np.ndarray:
            stored = index.get(key(source))
            return original(source) if stored is None else weight_at(home, stored).dequantised()

        options = Options(layout={"*": "append"})
        spec = step_spec(plan, options, model="reference", context=own.context, chunks=(1,), eos=())
        self.step = DecodeStep(plan, options, spec, values)
        self.table, self.prefix = open_table(folder, own), open_prefix(folder, own)
        self.encodings = {(t.layer, t.role.split("_")[0]): t.encoding
                          for t in own.graphs[0].inputs if t.layer is not None}  # fmt: skip

    def truth(self, ids: Sequence[int]) -> Truth:
        """Logits and caches after feeding `ids`, which begin with the sink prefix where there is one."""
        assert self.table is not None
        past, logits, count = None, [], 0
        if self.prefix:
            past = {where: dequantise(array, self.encodings[where]) for where, array in self.prefix.entries.items()}
            logits, count = [self.prefix.logits], len(self.prefix.ids)
        found, caches = whole_text(self.step, self.table[np.array(ids[count:])].astype(np.float32), past)
        return Truth(self.source, list(ids), np.concatenate([*logits, found]), caches)
