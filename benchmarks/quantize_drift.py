"""SNR by position of a w8a16 ring model: the golden Spark-X2.5 (tiny, random weights), ONNX Runtime against float32.

Random texts of 48 tokens, past the second wrap of its windows; the SNR of sixteen positions is of their logits as one
signal. A cache that goes wrong with time would fall from third to third; single texts differ by more than that.
"""

from __future__ import annotations

import argparse
import shutil
import sys

import numpy as np
from measure import BUILD, ROOT, run

sys.path.insert(0, str(ROOT))

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
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--precision", default="w8a16")
    args = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    run([BUILD.parent / ".venv/bin/ringstep", "export", GOLDEN, "--format", "onnx", "--precision", args.precision,
         "--context", "64", "--no-parity", "--out", OUT / "out"], OUT / "log")  # fmt: skip
    reference = RecipeReference(open_checkpoint(str(GOLDEN)))
    rows = []
    for seed in range(args.texts):
        with DecodeSession.open(OUT / "out") as session:
            first = list(session.prefix.ids) if session.prefix else []
            ids = [*first, *np.random.default_rng(seed).integers(3, session.spec.vocab, TOKENS - len(first)).tolist()]
            truth = reference.truth(ids).logits
            start = len(first) + 1
            # One at a time: the decode graph and its rings.
            have = np.concatenate([session.step(ids[:start]), *(session.step([i]) for i in ids[start:])])
        rows.append([snr_db(truth[at : at + PIECE], have[at : at + PIECE]) for at in range(0, TOKENS, PIECE)])
    found = np.array(rows)
    mean, error = found.mean(0), found.std(0, ddof=1) / len(found) ** 0.5
    figures = zip(range(0, TOKENS, PIECE), mean, error, found.min(0), found.max(0), strict=True)
    console.table(
        f"{args.precision}, dB over {args.texts} texts", ["positions", "mean", "its error", "lowest", "highest"],
        [(f"{at}..{at + PIECE - 1}", *(f"{x:.1f}" for x in own)) for at, *own in figures],
    )  # fmt: skip
    change = found[:, -1] - found[:, 0]
    print(f"last sixteen against first sixteen: {change.mean():+.1f} dB, {change.min():+.1f} to {change.max():+.1f}")


if __name__ == "__main__":
    main()
