"""Cutting a step into parts by layers, for chips whose compiler takes no graph of that size.

    x ─ layers 0..9 ─ hidden_9 ─ layers 10..19 ─ hidden_19 ─ layers 20..29 ─ head ─ logits

Each part is an ONNX file of its own beside the whole one and refers to the same weight files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from exporters.onnx import hidden_names
from recipes.step import layer_inputs, layer_outputs
from ringstep.contract import GraphSpec, PartSpec, StepSpec
from ringstep.errors import RingstepError


def block_bytes(path: Path) -> tuple[list[int], int]:
    """Bytes of weights of each layer (the embedding block counts to the first) and of the head."""
    graph = ir.load(path).graph
    layers: dict[int, int] = {}
    head, seen = 0, set[str]()
    for node in graph:
        for value in node.inputs:
            if value is None or value.name in seen or value.const_value is None:
                continue
            seen.add(str(value.name))
            if (node.name or "").startswith("/head/"):
                head += value.const_value.nbytes
            else:
                index = layer_of(node.name or "")
                layers[index] = layers.get(index, 0) + value.const_value.nbytes
    return [layers.get(i, 0) for i in range(max(layers, default=-1) + 1)], head


def layer_of(name: str) -> int:
    """The layer a node belongs to by its name, 0 for the embedding block."""
    return int(name.split("/")[1].removeprefix("layers.")) if name.startswith("/layers.") else 0


def choose_cuts(layers: Sequence[int], head: int, limit: int) -> list[int]:
    """The layers after which to cut so that no part holds more than `limit` bytes of weights.

    Raises RingstepError when one layer or the head alone is larger.
    """
    largest = max([*layers, head])
    if largest > limit:
        raise RingstepError(
            f"one block holds {largest / 1e6:.0f} MB of weights, more than a part may ({limit / 1e6:.0f} MB); "
            "raise --max-part-mb or use a smaller precision"
        )
    cuts, size = [], 0
    for index, nbytes in enumerate([*layers, head]):
        if size + nbytes > limit:
            cuts.append(index - 1)
            size = 0
        size += nbytes
    return cuts


def part_specs(spec: StepSpec, graph: GraphSpec, cuts: Sequence[int], stem: str) -> tuple[PartSpec, ...]:
    """The parts between `cuts` with the tensors each takes and returns; files are STEM.partK.onnx."""
    streams = 2 if spec.activations == "accurate" else 1
    last = len(spec.caches) - 1
    # A cut after the last layer leaves the head a part of its own, with no layer at all.
    firsts, lasts = [0, *(c + 1 for c in cuts)], [*cuts, last]
    declared = [t.name for t in graph.inputs]
    parts = []
    for k, (first, end) in enumerate(zip(firsts, lasts, strict=True)):
        caches = spec.caches[first : end + 1]
        needed = {name for cache in caches for name in layer_inputs(cache)}
        # The head takes no rest.
        before = hidden_names(first - 1, streams if caches else 1)
        inputs = [declared[0]] if k == 0 else before
        inputs += [name for name in declared if name in needed]
        outputs = ["logits"] if k == len(cuts) else hidden_names(end, streams if end < last else 1)
        outputs += [name for cache in caches for name in layer_outputs(cache)]
        parts.append(PartSpec(f"{stem}.part{k + 1}.onnx", tuple(inputs), tuple(outputs)))
    return tuple(parts)


def write_parts(whole: Path, parts: Sequence[PartSpec], folder: Path) -> None:
    """Write each part's ONNX file into `folder`; it must end up beside the whole one's weight files."""
    model = ir.load(whole)
    for part in parts:
        body = ir.convenience.extract(model.graph, part.inputs, part.outputs)
        body.name = f"{model.graph.name}_{Path(part.file).stem.rpartition('.')[2]}"
        inside = sorted(body.initializers.items())  # extract's own order changes from run to run
        body.initializers.clear()
        body.initializers.update(inside)
        piece = ir.Model(body, ir_version=model.ir_version, producer_name="ringstep")
        ir.save(piece, folder / Path(part.file).name)
