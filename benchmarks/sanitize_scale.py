"""Processor seconds of `ringstep sanitize` and `ringstep lint` on generated graphs of 50 000 and 100 000 nodes.

The graphs are those of tests/sanitize/test_scale.py: a chain full of shape arithmetic and no-ops, a wide graph, and a
row of Ifs. Each row is a fresh process; start-up is in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measure import BUILD, ROOT, run

from ringstep import console

sys.path.insert(0, str(ROOT / "tests" / "sanitize"))
sys.path.insert(0, str(ROOT))  # before this folder, which has a sanitize.py of its own
import test_scale

OUT = BUILD / "bench" / "sanitize-scale"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    args = parser.parse_args()
    ringstep = Path(sys.executable).parent / "ringstep"
    OUT.mkdir(parents=True, exist_ok=True)
    rows = []
    for kind in (test_scale.chain, test_scale.wide, test_scale.branches):
        seconds: dict[str, list[float]] = {"sanitize": [], "lint": []}
        peak = 0
        for nodes in (args.nodes // 2, args.nodes):
            path = OUT / f"{kind.__name__}.onnx"
            test_scale.save(kind(nodes), path)
            done = run([ringstep, "-q", "sanitize", path, "-o", OUT / "out.onnx"], OUT / "sanitize.log")
            seconds["sanitize"].append(done.cpu_seconds)
            peak = done.anon_bytes
            # The result: a lint of the source may leave with 1.
            seconds["lint"].append(run([ringstep, "-q", "lint", OUT / "out.onnx", "--target", "ort-mobile"],
                                       OUT / "lint.log").cpu_seconds)  # fmt: skip
        for command, (half, whole) in seconds.items():
            rows.append((kind.__name__, command, f"{half:.1f}", f"{whole:.1f}", f"{whole / half:.2f}",
                         console.human_bytes(peak) if command == "sanitize" else ""))  # fmt: skip
    columns = ["graph", "command", f"{args.nodes // 2} nodes", f"{args.nodes} nodes", "ratio", "RssAnon"]
    console.table("processor seconds", columns, rows)


if __name__ == "__main__":
    main()
