"""step.json of an artifact: the contract of its graphs with the files and encodings that a line made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.executorch.stage import PTE, SIMULATED_PTE, builds_two
from ringstep.contract import EmbeddingSpec, Encoding, GraphSpec, PartSpec, StepSpec, TensorSpec

if TYPE_CHECKING:
    from exporters.line import Line
    from quantize.calibrate import Calibration


def write_step(line: Line, cuts: Mapping[str, list[int]], folder: Path) -> None:
    """Write step.json into `folder`, and sink.bin where there is a sink prefix.

    `cuts` are the layers after which graphs were cut, by the stem of their file.
    """
    spec = float_spec(line, cuts)
    if line.quantised and line.quantised.graphs == "qdq":
        spec = encoded_spec(spec, line.job.out)
    save(line, spec, folder)


def save(line: Line, spec: StepSpec, folder: Path) -> None:
    """Complete a contract of quantised weights with table and sink prefix, write it and read it back."""
    if line.quantised:
        assert line.scheme is not None
        spec = with_table(dataclasses.replace(spec, scheme=line.scheme.name), line.job.out)
        if line.scheme.sink_prefix == "auto":
            spec = with_prefix(spec, line.quantised.calibration, folder)
    spec.save(folder / "step.json")
    StepSpec.load(folder)  # what is shipped has passed its own validation


def float_spec(line: Line, cuts: Mapping[str, list[int]]) -> StepSpec:
    """The contract with its files, every tensor as the float graphs have it."""
    from exporters.cut import part_specs
    from exporters.onnx import graph_file

    graphs = []
    for graph in line.spec.graphs:
        stem = Path(graph_file(graph.n)).stem
        parts: dict[str, tuple[PartSpec, ...]] = {"onnx": (whole_part(graph),)}
        hidden: tuple[TensorSpec, ...] = ()
        if line.job.format == "qnn":
            compiled = part_specs(line.spec, graph, cuts[stem], stem) if cuts.get(stem) else parts["onnx"]
            parts["qnn"] = tuple(
                dataclasses.replace(p, file=f"qnn/{Path(p.file).stem.replace('.', '_')}_ctx.onnx") for p in compiled
            )
            inside = {t.name for t in graph.outputs}
            crossing = [name for p in compiled for name in p.outputs if name not in inside]
            hidden = tuple(TensorSpec(name, (graph.n, line.plan.hidden), line.dtype, "hidden") for name in crossing)
        if line.job.format == "executorch":
            parts["executorch"] = (dataclasses.replace(parts["onnx"][0], file=PTE),)
            if builds_two(line.job):
                parts["executorch-simulated"] = (dataclasses.replace(parts["onnx"][0], file=SIMULATED_PTE),)
        graphs.append(dataclasses.replace(graph, parts=parts, hidden=hidden))
    embedding = None
    if not line.options.embedding_inside and not line.quantised:
        embedding = EmbeddingSpec("onnx/embedding.bin", 0, (line.plan.vocab, line.plan.hidden), line.dtype)
    target = {"device": line.device.id, "chip": line.device.chip.name} if line.device else {}
    if line.job.format == "executorch":
        target |= {"backend": line.job.lowered_to, "precision": line.precision}
    return dataclasses.replace(line.spec, graphs=tuple(graphs), embedding=embedding, target=target)


def whole_part(graph: GraphSpec) -> PartSpec:
    """A graph as one ONNX file."""
    from exporters.onnx import graph_file

    return PartSpec(f"onnx/{graph_file(graph.n)}", tuple(t.name for t in graph.inputs),
                    tuple(t.name for t in graph.outputs))  # fmt: skip


def encoded_spec(spec: StepSpec, artifact: Path) -> StepSpec:
    """A float contract with the quantised types and encodings of the artifact's QDQ graphs."""
    from exporters.quantised import ACTIVATIONS

    encodings = json.loads((artifact / ACTIVATIONS).read_text())
    graphs = tuple(dataclasses.replace(
        g, inputs=tuple(encoded(t, encodings) for t in g.inputs),
        outputs=tuple(encoded(t, encodings) for t in g.outputs),
        hidden=tuple(encoded(t, encodings) for t in g.hidden)) for g in spec.graphs)  # fmt: skip
    caches = tuple(dataclasses.replace(c, dtype=encodings[f"past_key_{c.layer}"]["dtype"]) for c in spec.caches)
    mask = encodings[f"mask_{spec.masks[0].name}"]
    return dataclasses.replace(
        spec, dtype=encodings["x"]["dtype"], mask_value=-mask["scale"] * mask["zero"], caches=caches, graphs=graphs
    )


def encoded(tensor: TensorSpec, encodings: Mapping[str, Any]) -> TensorSpec:
    """A tensor of the float contract with its quantised type and encoding."""
    own = encodings.get(tensor.name)
    if own is None:
        return tensor
    return dataclasses.replace(tensor, dtype=own["dtype"], encoding=Encoding(own["scale"], own["zero"]))


def with_table(spec: StepSpec, artifact: Path) -> StepSpec:
    """The contract with the quantised embedding table."""
    from exporters.quantised import TABLE

    table = json.loads((artifact / TABLE).read_text())["embedding"]
    table["shape"] = tuple(table["shape"])
    return dataclasses.replace(spec, embedding=EmbeddingSpec(**table))


def with_prefix(spec: StepSpec, found: Calibration, folder: Path) -> StepSpec:
    """The contract with the sink prefix, which is written into `folder`."""
    from ringstep.encoding import write_prefix

    if not found.prefix:
        return spec
    assert found.logits is not None
    entries = {key: array[0] for key, array in found.entries.items()}
    made = write_prefix(folder / "sink.bin", spec, found.prefix, entries, found.logits)
    return dataclasses.replace(spec, prefix=made)
