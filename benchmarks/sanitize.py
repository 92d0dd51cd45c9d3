"""Clean ten exported models with ringstep, onnxslim and onnxsim: time, memory, nodes, and what HTP still refuses.

One run, interleaved: a round cleans every model with every tool, each as one fresh process from command to file; the
next round starts with another tool. Ratios are medians over models and rounds of ours / theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

import onnx
import peers
from measure import BUILD, ROOT, Run, at_least_one, machine, ratio, rotated, run

from ringstep import child, console, qnn
from ringstep.devices import find_device
from ringstep.errors import RingstepError

sys.path.insert(0, str(ROOT / "tests" / "sanitize"))
import corpus

OUT = BUILD / "bench" / "sanitize"
OURS, PLAIN = "ringstep", "native"
CHIP = "sm8750"
SIZES = corpus.SIZES | dict(vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=12)


def commands() -> dict[str, list[str | Path]]:
    """Each tool's command; the model and the result follow."""
    ringstep = Path(sys.executable).parent / "ringstep"
    return {
        OURS: [ringstep, "-q", "sanitize", "--target", "qnn-htp", "--chip", CHIP, "-o"],
        PLAIN: [ringstep, "-q", "sanitize", "--target", "qnn-htp", "--chip", CHIP, "--skip", "accurate-*", "-o"],
        "onnxslim": [peers.env("onnxslim") / "bin" / "onnxslim"],
        "onnxsim": [peers.env("onnxsim") / "bin" / "onnxsim"],
    }


def command(tool: str, source: Path, out: Path) -> list[str | Path]:
    """The whole command; ours takes the result first."""
    base = commands()[tool]
    return [*base, out, source] if tool in (OURS, PLAIN) else [*base, source, out]


def models() -> list[Path]:
    """The ten models, exported on first use: one exporter for one half, the other for the other."""
    found = []
    for index, name in enumerate(corpus.ARCHITECTURES):
        path = OUT / f"{name}.onnx"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            console.say(f"exporting {name}")
            corpus.export(name, corpus.EXPORTERS[index % 2], path, SIZES, spread=1.5)
        found.append(path)
    return found


def refused(path: Path) -> dict[str, int]:
    """Nodes that HTP refuses, by type; {"cannot be opened": 1} where the whole model fails."""
    try:
        with child.Worker(f"{path.name}: asking the compiler", explain=qnn.explain) as worker:
            soc_model = find_device(CHIP).chip.soc_model
            counts: dict[str, int] = worker.call(qnn.refused_ops, path, soc_model, timeout_s=600).value
            return counts
    except RingstepError as error:
        console.warn(str(error))
        return {"cannot be opened": 1}


def nodes(path: Path) -> int:
    """Nodes of a file, those of bodies too."""

    def count(graph: onnx.GraphProto) -> int:
        inner = (a.g for node in graph.node for a in node.attribute if a.HasField("g"))
        return len(graph.node) + sum(map(count, inner))

    return count(onnx.load(str(path), load_external_data=False).graph)


def measure(rounds: int) -> dict[str, Any]:
    """Measure everything."""
    tools = list(commands())
    runs: dict[tuple[str, str], list[Run]] = {}
    before, sources = machine(), models()
    for index in range(rounds):
        for source in sources:
            for tool in rotated(tools, index):
                out = OUT / tool / source.name
                out.parent.mkdir(exist_ok=True)
                log = OUT / "logs" / f"{source.stem}-{tool}.log"
                runs.setdefault((tool, source.stem), []).append(run(command(tool, source, out), log))
        console.say(f"round {index + 1}/{rounds}")
    rows = []
    for source in sources:
        for tool in tools:
            out, own = OUT / tool / source.name, runs[tool, source.stem]
            rows.append({
                "model": source.stem, "tool": tool, "nodes_before": nodes(source), "nodes": nodes(out),
                "refused": refused(out), "seconds": statistics.median(r.seconds for r in own),
                "anon_bytes": statistics.median(r.anon_bytes for r in own),
                "max_rss_bytes": statistics.median(r.max_rss_bytes for r in own),
                "seconds_ratio": ratio([r.seconds for r in runs[OURS, source.stem]], [r.seconds for r in own]),
                "anon_ratio": ratio([r.anon_bytes for r in runs[OURS, source.stem]], [r.anon_bytes for r in own]),
                "runs": [dataclasses.asdict(r) for r in own],
            })  # fmt: skip
    return {"rounds": rounds, "rows": rows, "machine": before, "refused_before": {s.stem: refused(s) for s in sources}}


def show(result: dict[str, Any]) -> None:
    """Print a row a model, then the medians."""
    found: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        found.setdefault(row["model"], {})[row["tool"]] = row
    tools = list(commands())
    table = []
    for model, by_tool in found.items():
        counts = [(by_tool[OURS]["nodes_before"], result["refused_before"][model])]
        counts += [(by_tool[tool]["nodes"], by_tool[tool]["refused"]) for tool in tools]
        table.append([model, *(f"{total} ({sum(refused.values())})" for total, refused in counts)])
    console.table(f"nodes (of which HTP refuses), {CHIP}", ["model", "before", *tools], table)
    print()
    table = []
    for tool in tools:
        rows = [by_tool[tool] for by_tool in found.values()]
        middle = lambda key, rows=rows: statistics.median(row[key] for row in rows)
        table.append((tool, f"{middle('seconds'):.2f}", f"{middle('seconds_ratio'):.2f}",
                      console.human_bytes(middle("anon_bytes")), f"{middle('anon_ratio'):.2f}",
                      console.human_bytes(middle("max_rss_bytes"))))  # fmt: skip
    title = f"medians over models and {result['rounds']} rounds; ratio: ringstep's / the tool's"
    console.table(title, ["tool", "seconds", "ratio", "RssAnon", "ratio", "max RSS"], table)
    print("native: ringstep with --skip 'accurate-*', which writes no operator out for accuracy")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds)
    if args.json:
        console.print_json(result)
    else:
        show(result)


if __name__ == "__main__":
    main()
