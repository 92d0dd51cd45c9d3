"""Export SmolLM2-135M to ONNX float32 with ringstep and its peers: time, memory, size, interleaved in one run.

A round runs every tool once, each as one fresh process from command to files, its old output removed; the next
round starts with another tool. Ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import peers
from measure import BUILD, ROOT, Run, at_least_one, machine, ratio, rotated, run, size_bytes

from ringstep import console

OURS = "ringstep"
OUT = BUILD / "bench" / "export"
TASK = "text-generation-with-past"
# optimum-cli has no option to leave out its check against PyTorch; this is the same export without it.
UNCHECKED = (
    "import sys; from optimum.exporters.onnx import main_export; "
    f"main_export(sys.argv[1], sys.argv[2], task={TASK!r}, do_validation=False)"
)


def commands(model: Path, context: int) -> dict[str, list[str | Path]]:
    """Return each row's command, without its output folder where that comes last."""
    ringstep: list[str | Path] = [Path(sys.executable).parent / "ringstep", "export", model, "--format", "onnx",
                "--precision", "fp32", "--context", str(context)]  # fmt: skip
    return {
        OURS: [*ringstep, "--no-parity", "--out"],
        "ringstep, proven": [*ringstep, "--out"],
        "genai": genai_builder(model, "fp32", OUT / "genai-cache"),
        "optimum": optimum(model),
        "optimum, checked": [peers.env("optimum") / "bin" / "optimum-cli", "export", "onnx", "--model", model,
                             "--task", TASK],
    }  # fmt: skip


def genai_builder(model: Path, precision: str, cache: Path) -> list[str | Path]:
    """onnxruntime-genai's model builder, for the CPU; the output folder follows."""
    return [peers.python("genai"), "-m", "onnxruntime_genai.models.builder", "-i", model, "-p", precision, "-e", "cpu",
            "-c", cache, "-o"]  # fmt: skip


def optimum(model: Path) -> list[str | Path]:
    """optimum-onnx without its check; the output folder follows."""
    return [peers.python("optimum"), "-c", UNCHECKED, model]


def output(row: str) -> Path:
    """Return a row's output folder."""
    return OUT / row.replace(", ", "-")


def export(row: str, command: list[str | Path], clean: bool = True) -> Run:
    """Run a row's export once; with `clean` its old output is removed first."""
    if clean:
        shutil.rmtree(output(row), ignore_errors=True)
        shutil.rmtree(OUT / "genai-cache", ignore_errors=True)
    return run([*command, output(row)], OUT / f"{output(row).name}.log")


def model_folder() -> Path:
    """Return the model's folder, its weights in the page cache: the first tool must not pay for the disk."""
    # A process of its own: ru_maxrss of a child starts from its parent's peak.
    made = subprocess.run([sys.executable, ROOT / "benchmarks" / "smollm2.py"], check=True, stdout=subprocess.PIPE)
    folder = Path(made.stdout.decode().strip())
    with (folder / "model.safetensors").open("rb") as stream:
        while stream.read(1 << 20):
            pass
    return folder


def versions(names_of_peers: list[str]) -> dict[str, dict[str, str]]:
    """Return the packages that matter, by environment: ringstep's and these peers'."""
    names = ["ringstep", "onnxruntime-genai", "optimum", "optimum-onnx", "onnxruntime", "transformers", "torch",
             "executorch", "torchao"]  # fmt: skip
    code = (
        "import importlib.metadata as m, json, sys\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: have[n] for n in sys.argv[1:] if n in have}))"
    )
    pythons = {OURS: Path(sys.executable), **{name: peers.python(name) for name in names_of_peers}}
    ask = lambda python: subprocess.run([python, "-I", "-c", code, *names], check=True, stdout=subprocess.PIPE)
    return {name: json.loads(ask(python).stdout) for name, python in pythons.items()}


def measure(rounds: int, context: int) -> dict[str, Any]:
    """Measure all rows for a number of rounds, and one repeated export of ours where nothing is left to do."""
    todo, before = commands(model_folder(), context), machine()
    runs: dict[str, list[Run]] = {row: [] for row in todo}
    for index in range(rounds):
        for row in rotated(list(todo), index):
            runs[row].append(export(row, todo[row]))
            last = runs[row][-1]
            console.say(f"round {index + 1}/{rounds} {row}: {console.human_seconds(last.seconds)}, "
                        f"{console.human_bytes(last.anon_bytes)} RssAnon")  # fmt: skip
    graph = output(OURS) / "onnx" / "decode.onnx"
    written = graph.stat().st_mtime_ns
    repeat = export(OURS, todo[OURS], clean=False)
    if graph.stat().st_mtime_ns != written:
        console.warn("the repeated export was no repetition: ringstep's sources changed during the run")
    rows = [summary(row, runs[row], runs[OURS]) for row in todo]
    return {"rounds": rounds, "context": context, "rows": rows, "repeat": dataclasses.asdict(repeat),
            "machine": before, "versions": versions(["genai", "optimum"])}  # fmt: skip


def summary(row: str, runs: list[Run], ours: list[Run]) -> dict[str, Any]:
    """Return a row's medians, its size on disk, ours / its ratios, and every run."""
    fields = {}
    for name in ("seconds", "cpu_seconds", "anon_bytes", "max_rss_bytes"):
        values = [getattr(one, name) for one in runs]
        fields[name] = statistics.median(values)
        fields[f"{name}_ratio"] = ratio([getattr(one, name) for one in ours], values)
    return {"tool": row, **fields, "disk_bytes": size_bytes(output(row)), "runs": [dataclasses.asdict(r) for r in runs]}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    rows = []
    for r in result["rows"]:
        share = lambda name, r=r: "" if r["tool"] == OURS else f"{r[f'{name}_ratio']:.2f}"
        rows.append((r["tool"], console.human_seconds(r["seconds"]), share("seconds"),
                     console.human_seconds(r["cpu_seconds"]), console.human_bytes(r["anon_bytes"]), share("anon_bytes"),
                     console.human_bytes(r["max_rss_bytes"]), console.human_bytes(r["disk_bytes"])))  # fmt: skip
    columns = ["tool", "wall", "ratio", "CPU", "RssAnon", "ratio", "max RSS", "disk"]
    console.table(f"Export of SmolLM2-135M, fp32, medians of {result['rounds']} rounds", columns, rows)
    print()
    repeat = result["repeat"]
    print(f"ringstep again, nothing to do: {console.human_seconds(repeat['seconds'])}, "
          f"{console.human_bytes(repeat['anon_bytes'])} RssAnon")  # fmt: skip
    print("ratio: ours / it, median of the rounds' ratios. CPU: processor time, user and system.")
    print("RssAnon: peak of the process tree's sum, every 20 ms. max RSS: largest process, mapped files too.")
    for name, found in result["versions"].items():
        print(f"{name}: " + ", ".join(f"{package} {version}" for package, version in found.items()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--context", type=int, default=1024, help="tokens that ringstep's caches hold")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds, args.context)
    if args.json:
        console.print_json(result)
    else:
        show(result)


if __name__ == "__main__":
    main()
