"""The QNN stages of a line: cut where a graph is too large for one binary, then compile each part."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.stages import versions
from ringstep import console

if TYPE_CHECKING:
    from exporters.line import Line


def compile_stages(line: Line, n: int, done: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """A context binary of every part of the graph of n tokens; each part is a stage, so a killed run resumes."""
    from exporters.cut import block_bytes, choose_cuts, part_specs, write_parts
    from exporters.onnx import graph_file

    assert line.device is not None
    chip, fp16, whole = line.device.chip, line.device.chip.fp16, line.job.out / "onnx" / graph_file(n)
    stem = whole.stem
    files, results = [f"onnx/{whole.name}"], {}
    cuts: list[int] = []
    graphs, weights = (done["qdq"], done["round"]) if line.quantised else (done["sanitize"], done["weights"])
    layers, head = block_bytes(whole)
    if sum(layers) + head > line.job.part_bytes:
        cuts = choose_cuts(layers, head, line.job.part_bytes)

        def build_parts(folder: Path) -> dict[str, Any]:
            parts = part_specs(line.spec, line.spec.graph(n), cuts, f"onnx/{stem}")
            (folder / "onnx").mkdir()
            write_parts(whole, parts, folder / "onnx")
            return {"cut_after_layers": cuts}

        record = line.stage(f"cut-{stem}", {"graph": graphs[files[0]]}, {"cuts": cuts},
                            versions("exporters/cut.py", libraries=("onnx-ir",)), build_parts)  # fmt: skip
        results[record.name] = record.hashes
        files = sorted(record.outputs, key=lambda f: int(f.split(".part")[1].split(".")[0]))
    blocks, bounds = [*layers, head], [0, *(after + 1 for after in cuts), len(layers) + 1]
    for file, first, end in zip(files, bounds[:-1], bounds[1:], strict=True):
        sha = results[f"cut-{stem}"][file] if len(files) > 1 else graphs[file]
        name = Path(file).stem.replace(".", "_")

        def build(folder: Path, file: str = file, name: str = name) -> dict[str, Any]:
            from exporters.qnn import compile_context

            with console.progress(f"compiling {name} for {chip.name}"):
                report = compile_context(line.job.out / file, folder / "qnn", chip=chip, fp16=fp16, name=name)
            facts = dataclasses.asdict(report)
            del facts["files"], facts["seconds"]
            return facts

        record = line.stage(
            f"qnn-{name}", {"graph": sha, **weights}, {"chip": chip.name, "soc_model": chip.soc_model},
            versions("exporters/qnn.py", "ringstep/qnn.py", libraries=("onnxruntime", "onnxruntime-qnn")), build,
            sum(blocks[first:end]),
        )  # fmt: skip
        results[record.name] = record.hashes
    return results
