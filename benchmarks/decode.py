"""Decode SmolLM2-135M on the CPU, float32, greedy, with ringstep and its peers: tokens a second, in one run.

A round runs every tool once, each as one fresh process in its own environment; the next round starts with
another tool. All get the same prompt ids, generate the same number of tokens and must generate the same ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import export
import peers
from measure import BUILD, ROOT, Run, at_least_one, machine, ratio, rotated, run

from ringstep import console

PROMPT = "What is the capital of France?"
OUT = BUILD / "bench" / "decode"
WORKER = ROOT / "benchmarks" / "decode_worker.py"
OURS = "ringstep"


def artifacts(context: int) -> dict[str, Path]:
    """Return each tool's exported folder, made where it is missing; ours is brought up to date."""
    todo = export.commands(export.model_folder(), context)
    made = {"genai": "genai_config.json", "optimum": "model.onnx"}
    for tool, file in made.items():
        if not (export.output(tool) / file).is_file():
            export.export(tool, todo[tool])
    export.export(OURS, todo[OURS], clean=False)
    return {tool: export.output(tool) for tool in (OURS, *made)}


def decode(tool: str, folder: Path, ids: list[int], n: int, threads: int, context: int, python: Path,
           limit_bytes: float = math.inf) -> dict[str, Any]:  # fmt: skip
    """Run one tool once; tokens a second over the n - 1 steps after the first new token. RunFailed when it fails."""
    OUT.mkdir(parents=True, exist_ok=True)
    log = OUT / f"{tool}.log"
    words = [tool, folder, ",".join(map(str, ids)), n, threads, context]
    taken: Run = run([python, WORKER, *map(str, words)], log, limit_bytes)
    result = json.loads(log.read_text("utf-8").splitlines()[-1])
    rate = (n - 1) / result["decode_seconds"]
    return {**result, "tokens_per_second": rate, **dataclasses.asdict(taken)}


def measure(rounds: int, n: int, threads: int, context: int) -> dict[str, Any]:
    """Measure all tools for a number of rounds."""
    return compared(artifacts(context), OURS, rounds, n, threads, context)


def compared(folders: dict[str, Path], ours: str, rounds: int, n: int, threads: int, context: int) -> dict[str, Any]:
    """Decode with every tool's folder for a number of rounds; `ours` runs in this environment, peers in their own."""
    from ringstep.text import Text

    before = machine()
    text = Text(folders[ours])
    ids = text.chat(PROMPT)
    runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in folders}
    for index in range(rounds):
        for tool in rotated(list(folders), index):
            python = Path(sys.executable) if tool == ours else peers.python(tool)
            runs[tool].append(decode(tool, folders[tool], ids, n, threads, context, python))
            console.say(f"round {index + 1}/{rounds} {tool}: {runs[tool][-1]['tokens_per_second']:.1f} tokens/s")
    first = runs[ours][0]["ids"]
    answers = [one["ids"] for found in runs.values() for one in found]
    return {
        "rounds": rounds, "prompt_tokens": len(ids), "new_tokens": n, "threads": threads, "context": context,
        "rows": [summary(tool, runs[tool], runs[ours]) for tool in runs],
        "same_ids": all(answer == first for answer in answers),
        "same_until": {tool: min(common(first, one["ids"]) for one in found) for tool, found in runs.items()},
        "text": text.decode(first), "machine": before,
    }  # fmt: skip


def common(a: list[int], b: list[int]) -> int:
    """Return how many ids agree before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def summary(tool: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a tool's medians, ours / its tokens a second within a round, and every run."""
    pick = lambda name, found: [one[name] for one in found]
    median = lambda name: statistics.median(pick(name, runs))
    names = ("tokens_per_second", "prompt_seconds", "anon_bytes", "max_rss_bytes")
    rate = ratio(pick("tokens_per_second", ours), pick("tokens_per_second", runs))
    return {"tool": tool, "version": runs[0]["version"], **{name: median(name) for name in names},
            "tokens_per_second_ratio": rate, "runs": runs}  # fmt: skip


def show(result: dict[str, Any], ours: str = OURS) -> None:
    """Print the table."""
    rows = [
        (r["tool"], r["version"], f"{r['tokens_per_second']:.1f}",
         "" if r["tool"] == ours else f"{r['tokens_per_second_ratio']:.2f}",
         console.human_seconds(r["prompt_seconds"]), console.human_bytes(r["anon_bytes"]),
         console.human_bytes(r["max_rss_bytes"]))
        for r in result["rows"]
    ]  # fmt: skip
    title = f"Decode of SmolLM2-135M, fp32, medians of {result['rounds']} rounds"
    columns = ["tool", "version", "tokens/s", "ratio", "prompt", "RssAnon", "max RSS"]
    console.table(title, columns, rows)
    print()
    print("ratio: ours / its tokens/s, median of the rounds' ratios.")
    print(f"{result['threads']} threads, {result['prompt_tokens']} + {result['new_tokens']} tokens. "
          f"Our caches hold {result['context']} and are read whole.")  # fmt: skip
    if result["same_ids"]:
        print(f"All tools generated the same {result['new_tokens']} ids in every round.")
    else:
        print(f"The tools DIFFER; ids equal to ours before the first difference: {result['same_until']}")
    print(f"Text: {result['text']!r}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens, the prompt's first one included")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024, help="tokens that our and genai's caches hold")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds, args.tokens, args.threads, args.context)
    if args.json:
        console.print_json(result)
    else:
        show(result)


if __name__ == "__main__":
    main()
