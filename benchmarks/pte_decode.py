"""Decode SmolLM2-135M on XNNPACK, float32, greedy: our .pte against optimum-executorch's, in one run.

Exports are timed once each, decoding as decode.py does it: rounds that start with another tool, one fresh process a
run, the same prompt, the same ids asked for. The peer has its own attention and cache operators switched on.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import decode
import export
import peers
from measure import at_least_one, size_bytes

from ringstep import console

OURS, PEER = "ringstep-executorch", "optimum-executorch"


def commands(context: int) -> dict[str, list[str | Path]]:
    """Each tool's export, its output folder to come last."""
    model = export.model_folder()
    return {
        OURS: [Path(sys.executable).parent / "ringstep", "export", model, "--format", "executorch", "--context",
               str(context), "--chunk", "32", "--no-parity", "--out"],
        PEER: [peers.env(PEER) / "bin" / "optimum-cli", "export", "executorch", "--model", model, "--task",
               "text-generation", "--recipe", "xnnpack", "--use_custom_sdpa", "--use_custom_kv_cache", "--max_seq_len",
               str(context), "--output_dir"],
    }  # fmt: skip


def exported(context: int) -> dict[str, dict[str, Any]]:
    """Export with every tool that has not yet; seconds, memory and size by tool, without times where it was there."""
    facts: dict[str, dict[str, Any]] = {}
    for tool, command in commands(context).items():
        taken = {}
        if not any(export.output(tool).rglob("*.pte")):
            taken = dataclasses.asdict(export.export(tool, command))
        (pte,) = export.output(tool).rglob("*.pte")
        facts[tool] = {**taken, "pte_bytes": pte.stat().st_size, "bytes": size_bytes(export.output(tool))}
    return facts


def measure(rounds: int, n: int, context: int) -> dict[str, Any]:
    """Measure both for a number of rounds."""
    made = exported(context)
    folders = {tool: export.output(tool) for tool in made}
    found = decode.compared(folders, OURS, rounds, n, 0, context)
    return found | {"exports": made, "threads": "the runtime's own number of"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens, the prompt's first one included")
    parser.add_argument("--context", type=int, default=512, help="tokens that caches hold")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds, args.tokens, args.context)
    if args.json:
        console.print_json(result)
        return
    decode.show(result, OURS)
    for tool, facts in result["exports"].items():
        took = "exported before"
        if "seconds" in facts:
            took = f"exported in {console.human_seconds(facts['seconds'])}"
            took += f", {console.human_bytes(facts['anon_bytes'])} RssAnon"
        print(f"{tool}: {took}, .pte {facts['pte_bytes']:,} bytes")


if __name__ == "__main__":
    main()
