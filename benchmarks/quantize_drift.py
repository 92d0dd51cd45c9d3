"""SNR by position of a w8a16 ring model: the golden Spark-X2.5 (tiny, random weights), ONNX Runtime against float32.

Random texts of 48 tokens, past the second wrap of its windows; the SNR of sixteen positions is of their logits as one
signal. Against its own rounded weights in floats what is left is the arithmetic and the caches alone: a cache that goes
wrong with time falls there from third to third.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
from measure import BUILD, ROOT, run

sys.path.insert(0, str(ROOT))

from exporters.own_weights import OwnWeights
from exporters.prove import RecipeReference
from ringstep import console
from ringstep.checkpoint import open_checkpoint
from ringstep.parity.metrics import snr_db
from ringstep.session import DecodeSession

GOLDEN = ROOT / "tests" / "data" / "spark2_5_tiny"
OUT = BUILD / "bench" / "quantize-drift"
TOKENS, PIECE = 48, 16


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--precision", default="w8a16")
    args = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    command = [Path(sys.executable).with_name("ringstep"), "export", GOLDEN, "--format", "onnx",
               "--precision", args.precision, "--context", "64", "--no-parity", "--out", OUT / "out"]  # fmt: skip
    run(command, OUT / "log")
    checkpoint = open_checkpoint(str(GOLDEN))
    own = OwnWeights(OUT / "out", checkpoint)
    references = {"the original": RecipeReference(checkpoint), "its own rounded weights": own}
    found: dict[str, list[list[float]]] = {name: [] for name in references}
    with DecodeSession.open(OUT / "out") as session:
        first = list(session.prefix.ids) if session.prefix else []
        for seed in range(args.texts):
            session.reset()
            ids = [*first, *np.random.default_rng(seed).integers(3, session.spec.vocab, TOKENS - len(first)).tolist()]
            start = len(first) + 1
            # One at a time: the decode graph and its rings.
            have = np.concatenate([session.step(ids[:start]), *(session.step([i]) for i in ids[start:])])
            for name, reference in references.items():
                truth = reference.truth(ids).logits
                pieces = [slice(at, at + PIECE) for at in range(0, TOKENS, PIECE)]
                found[name].append([snr_db(truth[piece], have[piece]) for piece in pieces])
    for name, values in found.items():
        rows = np.array(values)
        spread = rows.std(0, ddof=1) / len(rows) ** 0.5
        figures = zip(range(0, TOKENS, PIECE), rows.mean(0), spread, rows.min(0), rows.max(0), strict=True)
        console.table(
            f"{args.precision} against {name}, dB over {args.texts} texts",
            ["positions", "mean", "its error", "lowest", "highest"],
            [(f"{at}..{at + PIECE - 1}", *(f"{x:.1f}" for x in row)) for at, *row in figures],
        )  # fmt: skip


if __name__ == "__main__":
    main()
