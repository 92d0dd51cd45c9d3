"""ringstep beside its peers: export time, memory, bytes and decode speed on a CPU, in one run.

    python benchmarks/beside.py                         SmolLM2-135M three times and a Llama of 1.2 B parameters once
    python benchmarks/beside.py --models smollm2-135m --groups "ONNX int4" --rounds 1

A round exports with every tool, each a fresh process in its own environment (peers.py) with its old output removed,
and decodes with what it made; the next round starts with another tool. XNNPACK's rows, which take minutes each, are
measured in the first round alone. Ratios are ours / theirs of the same precision
and runtime within a round, their median over rounds. A tool that fails or passes the machine's memory is a row that
says so. build/beside/beside.json has every run, beside.md the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import decode
import export
import full_size
import numpy as np
import peers
from measure import BUILD, ROOT, Run, RunFailed, at_least_one, machine, ratio, rotated, run, size_bytes

from ringstep import console
from ringstep.files import write_json, write_whole

OUT = BUILD / "beside"
GROUPS = ("ONNX fp32", "ONNX fp16", "ONNX int4", "XNNPACK fp32", "XNNPACK 8da4w")
ROUNDS = {"smollm2-135m": 3, "llama-1b": 1}
CONTEXT, PROMPT, NEW, THREADS = 1024, 32, 64, 2
SPARE_BYTES = 1.5e9  # of the machine's memory: past the rest a run is killed before the kernel kills another process
FIGURES = ("seconds", "anon_bytes", "disk_bytes", "tokens_per_second", "cpu_seconds", "max_rss_bytes",
           "decode_anon_bytes")  # fmt: skip
# genai's defaults: blocks of 32, symmetric, to nearest, the head too; 8-bit products.
INT4 = """description = "int4 in blocks of 32, to nearest: beside other CPU exporters"
sink_prefix = "off"

[weights]
bits = 4
block = 32
symmetric = true
rounding = "nearest"

[head]
bits = 4
block = 32
rounding = "nearest"

[embedding]
dtype = "float16"

[activations]
bits = 0
accuracy_level = 4
"""


@dataclass(frozen=True)
class Tool:
    """A row: whose it is, the group it is compared in, its export command but for the output folder."""

    name: str
    group: str
    command: list[str | Path]
    worker: str
    """The name of its loop in decode_worker.py."""
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.worker}-{self.group}".replace(" ", "-")


def tools(model: Path, home: Path) -> list[Tool]:
    """All rows of a model."""
    meta = home / "meta"
    ringstep = [Path(sys.executable).parent / "ringstep", "export", model, "--context", str(CONTEXT), "--no-parity"]
    ours = lambda *words: [*ringstep, *words, "--out"]
    builder = lambda precision: export.genai_builder(model, precision, home / "genai-cache")
    flow = lambda *words: [peers.python("executorch"), "-m", "executorch.extension.llm.export.export_llm",
                           "base.model_class=llama3_2", f"base.checkpoint={meta / 'consolidated.pth'}",
                           f"base.params={meta / 'params.json'}", "model.use_kv_cache=True",
                           "model.use_sdpa_with_kv_cache=True", "backend.xnnpack.enabled=True",
                           f"export.max_seq_length={CONTEXT}", f"export.max_context_length={CONTEXT}", *words,
                           "export.output_name=model.pte", "export.output_dir="]  # fmt: skip
    scheme = home / "int4.toml"
    scheme.write_text(INT4)
    return [
        Tool("ringstep", "ONNX fp32", ours("--format", "onnx", "--precision", "fp32"), "ringstep"),
        Tool("optimum-onnx", "ONNX fp32", export.optimum(model), "optimum"),
        Tool("genai builder", "ONNX fp32", builder("fp32"), "genai"),
        Tool("ringstep", "ONNX fp16", ours("--format", "onnx", "--precision", "fp16"), "ringstep"),
        Tool("genai builder", "ONNX fp16", builder("fp16"), "genai"),
        Tool("ringstep", "ONNX int4", ours("--format", "onnx", "--scheme", scheme), "ringstep"),
        Tool("genai builder", "ONNX int4", builder("int4"), "genai"),
        Tool("ringstep", "XNNPACK fp32", ours("--format", "executorch"), "ringstep-executorch"),
        Tool("ExecuTorch's flow", "XNNPACK fp32", flow(), "executorch"),
        Tool("ringstep", "XNNPACK 8da4w", ours("--format", "executorch", "--precision", "8da4w"),
             "ringstep-executorch"),
        Tool("ExecuTorch's flow", "XNNPACK 8da4w",
             flow("quantization.qmode=8da4w", "quantization.group_size=32"), "executorch"),
    ]  # fmt: skip


def once(tool: Tool, home: Path, ids: list[int], limit: float) -> dict[str, Any]:
    """Export and decode once; what failed is said in `failed`."""
    out = home / tool.key
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(home / "genai-cache", ignore_errors=True)
    *first, last = tool.command
    # Its option and value are one word in ExecuTorch's flow, and its folder must be there.
    command = [*first, f"{last}{out}"] if str(last).endswith("=") else [*tool.command, out]
    if str(last).endswith("="):
        out.mkdir()
    found: dict[str, Any] = {}
    try:
        made: Run = run(command, home / f"{tool.key}.log", limit)
        found |= {**dataclasses.asdict(made), "disk_bytes": size_bytes(out)}
        python = Path(sys.executable) if tool.name == "ringstep" else peers.python(tool.worker)
        said = decode.decode(tool.worker, out, ids, NEW, THREADS, CONTEXT, python, limit)
        found |= {name: said[name] for name in ("tokens_per_second", "ids")} | {"decode_anon_bytes": said["anon_bytes"]}
    except RunFailed as error:
        found["failed"] = f"{'decode' if 'seconds' in found else 'export'}: {error.reason}"
    shutil.rmtree(out, ignore_errors=True)
    return found


def measure(name: str, groups: list[str], rounds: int) -> dict[str, Any]:
    """All tools of these groups on one model."""
    home = OUT / name
    home.mkdir(parents=True, exist_ok=True)
    before = machine()
    model = export.model_folder() if name == "smollm2-135m" else full_size.checkpoint(name, {}, home)
    config = json.loads((model / "config.json").read_text())
    convert = [peers.python("executorch"), ROOT / "benchmarks" / "meta_checkpoint.py", model, home / "meta"]
    subprocess.run(convert, check=True)
    every = [tool for tool in tools(model, home) if tool.group in groups]
    ids = np.random.default_rng(0).integers(3, config["vocab_size"], PROMPT).tolist()
    limit = before["memory_bytes"] - SPARE_BYTES
    for index in range(rounds):
        for tool in rotated(every, index):
            if index and tool.group.startswith("XNNPACK"):
                continue
            tool.runs.append(once(tool, home, ids, limit))
            last = tool.runs[-1]
            said = last.get("failed") or f"{last['tokens_per_second']:.1f} tokens/s"
            console.say(f"{name} {index + 1}/{rounds} {tool.name}, {tool.group}: "
                        f"{console.human_seconds(last.get('seconds', 0))}, {said}")  # fmt: skip
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return {"model": name, "checkpoint_bytes": weights, "rounds": rounds, "context": CONTEXT, "prompt_tokens": PROMPT,
            "new_tokens": NEW, "threads": THREADS, "machine": before, "rows": [row(one, every) for one in every],
            }  # fmt: skip


def row(tool: Tool, every: list[Tool]) -> dict[str, Any]:
    """A tool's medians, ours / its ratios, and every run."""
    ours = next(one for one in every if one.group == tool.group and one.name == "ringstep")
    made: dict[str, Any] = {"tool": tool.name, "group": tool.group}
    failed = [one["failed"] for one in tool.runs if "failed" in one]
    made |= {"failed": failed[0]} if failed else {}
    for name in FIGURES:
        values = [one[name] for one in tool.runs if name in one]
        if values:
            made[name] = statistics.median(values)
        both = [(a[name], b[name]) for a, b in zip(ours.runs, tool.runs, strict=True) if name in a and name in b]
        if both and tool is not ours:
            made[f"{name}_ratio"] = ratio(*zip(*both, strict=True))
    if tool is not ours and "ids" in ours.runs[0] and "ids" in tool.runs[0]:
        made["same_ids"] = decode.common(ours.runs[0]["ids"], tool.runs[0]["ids"])
    return made | {"runs": tool.runs}


def markdown(result: dict[str, Any]) -> str:
    """The table of one model."""
    lines = [f"**{result['model']}**, checkpoint {console.human_bytes(result['checkpoint_bytes'])}, "
             f"{'one round' if result['rounds'] == 1 else 'medians of ' + str(result['rounds']) + ' rounds'}", "",
             "| what | tool | wall | ratio | RssAnon | ratio | written | ratio | tokens/s | ratio | same ids |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    show = {"seconds": console.human_seconds, "anon_bytes": console.human_bytes, "disk_bytes": console.human_bytes,
            "tokens_per_second": lambda rate: f"{rate:.1f}"}  # fmt: skip
    for one in result["rows"]:
        cells = [one["group"], one["tool"]]
        for name, human in show.items():
            share = one.get(f"{name}_ratio")
            cells += [human(one[name]) if name in one else "", f"{share:.2f}" if share else ""]
        cells.append(f"{one['same_ids']} of {NEW}" if "same_ids" in one else one.get("failed", ""))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    usual = ", ".join(f"{n} of {m}" for m, n in ROUNDS.items())
    parser.add_argument("--rounds", type=at_least_one, help=f"default: {usual}")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    whole: dict[str, Any] = {"models": [], "versions": export.versions(["genai", "optimum", "executorch"]),
                             "commit": commit.stdout.strip()}  # fmt: skip
    for name in args.models:
        whole["models"].append(measure(name, args.groups, args.rounds or ROUNDS[name]))
        text = "\n".join(map(markdown, whole["models"]))
        write_json(OUT / "beside.json", whole)
        write_whole(OUT / "beside.md", text)
    print(text)
    print(f"ratio: ours / theirs. {OUT / 'beside.json'}")


if __name__ == "__main__":
    main()
