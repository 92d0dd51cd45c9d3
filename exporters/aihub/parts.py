"""What of an artifact is measured: the whole step, or one layer of each kind and the head, as ONNX files of their own.

Each comes with samples: what the graph is fed at a few positions of a text, and what it returns on ONNX Runtime here.
A phone is given the former and held against the latter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exporters.stages import versions
from ringstep import console
from ringstep.contract import GraphSpec, PartSpec, StepSpec
from ringstep.errors import RingstepError, did_you_mean
from ringstep.manifest import Manifest, StageRecord
from ringstep.stage import run_stage

HOME = "profiles"
HEAD = "head"
TEXT_TOKENS = 48  # how far into a text samples are taken; caches hold as much
SAMPLES = 4
CHUNKS = 2  # samples of a prefill graph, which is fed whole chunks


@dataclass(frozen=True)
class Part:
    """One graph to measure."""

    name: str
    """"decode" or "prefill_N" (with .partK where the step is cut), or the kind of a layer, or "head"."""
    n: int
    count: int
    """How often the step has it."""
    layout: str
    io: PartSpec
    """What it takes and returns."""
    whole: bool

    @property
    def subject(self) -> str:
        """What a profile calls it: "step" for all of it."""
        return self.name.replace("decode", "step").replace("prefill_", "prefill-") if self.whole else self.name


def whole_parts(spec: StepSpec, manifest: Manifest) -> list[Part]:
    """Every graph of the artifact, each cut as it was for its chip. Raises RingstepError."""
    from exporters.cut import part_specs
    from exporters.onnx import graph_file
    from exporters.step_file import whole_part

    layout = "+".join(sorted({cache.kind for cache in spec.caches}))
    parts = []
    for graph in spec.graphs:
        stem = Path(graph_file(graph.n)).stem
        cuts = cuts_of(manifest, graph)
        pieces = part_specs(spec, graph, cuts, f"onnx/{stem}") if cuts else (whole_part(graph),)
        parts += [Part(Path(piece.file).stem, graph.n, 1, layout, piece, True) for piece in pieces]
    return parts


def cuts_of(manifest: Manifest, graph: GraphSpec) -> list[int]:
    """The layers after which a graph is cut: as it was compiled, else where one is too large for a chip."""
    from exporters.cut import block_bytes, choose_cuts
    from exporters.job import DEFAULT_PART_BYTES
    from exporters.onnx import graph_file

    record = manifest.stages.get(f"cut-{Path(graph_file(graph.n)).stem}")
    if "qnn" in graph.parts:
        return list(record.facts["cut_after_layers"]) if record else []
    layers, head = block_bytes(manifest.folder / "onnx" / graph_file(graph.n))
    return choose_cuts(layers, head, DEFAULT_PART_BYTES) if sum(layers) + head > DEFAULT_PART_BYTES else []


def kinds(spec: StepSpec) -> list[str]:
    """The kinds of layers, and the head."""
    return [*dict.fromkeys(cache.mask for cache in spec.caches), HEAD]


def layer_parts(spec: StepSpec, names: Sequence[str]) -> list[Part]:
    """One layer of each kind that is named, the middle one, and the head. Raises RingstepError for an unknown kind."""
    from exporters.cut import part_specs

    graph, known = spec.graph(1), kinds(spec)
    parts = []
    last = len(spec.caches) - 1
    for name in dict.fromkeys(names):
        if name not in known:
            raise RingstepError(f"--layers {name}: this model has {', '.join(known)}{did_you_mean(name, known)}")
        if name == HEAD:
            piece = part_specs(spec, graph, [last], HEAD)[-1]
            parts.append(Part(HEAD, 1, 1, "", piece, False))
            continue
        own = [index for index, cache in enumerate(spec.caches) if cache.mask == name]
        # With accurate activations the first layer has no rest to take in, and the last returns none.
        inner = [index for index in own if 0 < index < last] or own
        layer = inner[len(inner) // 2]
        cuts = [layer - 1, layer] if layer else [layer]
        piece = part_specs(spec, graph, cuts, name)[1 if layer else 0]
        parts.append(Part(name, 1, len(own), spec.caches[layer].kind, piece, False))
    return parts


def sources(manifest: Manifest, parts: Sequence[Part]) -> dict[str, Path]:
    """An ONNX file of its own for each part, its weights beside it in one .data file; a stage, so made once."""
    from exporters.onnx import graph_file, load_model
    from exporters.surgery import extract

    folder = manifest.folder

    def build(home: Path) -> None:
        import onnx_ir as ir

        for part in parts:
            model = extract(load_model(folder / "onnx" / graph_file(part.n)), part.io.inputs, part.io.outputs)
            model.graph.name = graph_name(part)
            place = home / source_file(part)
            place.parent.mkdir(parents=True)
            ir.save(model, place, external_data=f"{part.name}.data")

    with console.progress("cutting the graphs out"):
        stage(manifest, "profile-parts", parts, ("exporters/aihub/parts.py", "exporters/cut.py"), build)
    return {part.name: folder / source_file(part) for part in parts}


def samples(manifest: Manifest, spec: StepSpec, parts: Sequence[Part]) -> dict[str, list[tuple[Any, Any]]]:
    """For each part the samples (what it is fed, what it returns here) as they are stored; a stage, so made once."""
    folder = manifest.folder

    def build(home: Path) -> dict[str, Any]:
        (home / HOME / "samples").mkdir(parents=True)
        for n in sorted({part.n for part in parts}):
            for part, found in run_parts(folder, spec, spec.graph(n), [p for p in parts if p.n == n]).items():
                arrays: Any = {f"{side}{i}:{name}": array for i, pair in enumerate(found)
                               for side, tensors in zip("io", pair, strict=True) for name, array in tensors.items()}
                with (home / sample_file(part)).open("wb") as stream:
                    np.savez(stream, **arrays)
        return {"tokens": TEXT_TOKENS}

    with console.progress("running the text here"):
        stage(manifest, "profile-samples", parts, ("exporters/aihub/parts.py", "ringstep/session.py"), build)
    found: dict[str, list[tuple[Any, Any]]] = {}
    for part in parts:
        with np.load(folder / sample_file(part.name), allow_pickle=False) as arrays:
            count = 1 + max(int(key.partition(":")[0][1:]) for key in arrays.files)
            pairs: list[tuple[Any, Any]] = [({}, {}) for _ in range(count)]
            for key in arrays.files:
                side, name = key.split(":", 1)
                pairs[int(side[1:])]["io".index(side[0])][name] = arrays[key]
            found[part.name] = pairs
    return found


def run_parts(
    folder: Path, spec: StepSpec, graph: GraphSpec, parts: Sequence[Part]
) -> dict[str, list[tuple[Any, Any]]]:
    """Feed the proof's text to the graph of n tokens on ONNX Runtime and keep what the parts take and return."""
    from exporters.onnx import graph_file, load_model
    from exporters.prove import proof_ids
    from exporters.surgery import OrtGraph, expose, workshop
    from exporters.tapped import Exposed
    from ringstep.encoding import open_prefix, open_table
    from ringstep.session import DecodeSession

    n = graph.n
    calls = min(CHUNKS, spec.context // n) if n > 1 else min(TEXT_TOKENS, spec.context)
    ids = proof_ids(spec, folder, calls * n)
    wanted = set(np.linspace(calls // 3, calls - 1, SAMPLES).astype(int).tolist()) if n == 1 else set(range(calls))
    names = sorted({name for part in parts for name in (*part.io.inputs, *part.io.outputs)})
    with workshop(folder) as place:
        import onnx_ir as ir

        model = load_model(folder / "onnx" / graph_file(n))
        expose(model, names)
        ir.save(model, place("samples"))
        engine = Exposed("ort", [OrtGraph(place("samples"), graph_file(n))], names)
        alone = dataclasses.replace(spec, graphs=(graph,))
        with DecodeSession(alone, engine, open_table(folder, spec), open_prefix(folder, spec)) as session:
            for call in range(calls):
                engine.keep = call in wanted
                session.step(ids[call * n : (call + 1) * n])
    if not engine.kept:
        raise RingstepError(f"{folder}: the sink prefix is as long as the context: there is nothing to measure")
    pick = lambda kept, own: {name: kept[name] for name in own}
    return {part.name: [(pick(kept, part.io.inputs), pick(kept, part.io.outputs)) for kept in engine.kept]
            for part in parts}  # fmt: skip


def stage(
    manifest: Manifest, name: str, parts: Sequence[Part], code: Sequence[str],
    build: Callable[[Path], dict[str, Any] | None], options: dict[str, Any] | None = None,
) -> StageRecord:  # fmt: skip
    """A stage over these parts of what the export wrote."""
    inputs = {path: output.sha256 for record in manifest.stages.values() for path, output in record.outputs.items()
              if path.startswith(("onnx/", "tokenizer/", "sink.bin"))}  # fmt: skip
    listed = [dataclasses.asdict(part) for part in parts]
    return run_stage(manifest, name, inputs=inputs, options={"parts": listed, **(options or {})},
                     versions=versions(*code, libraries=("onnx-ir", "onnxruntime")), build=build)  # fmt: skip


def graph_name(part: Part) -> str:
    """What its graph is called in a context binary, and its file there."""
    return part.name.replace(".", "_")


def source_file(part: Part) -> str:
    """Where a part's ONNX file lies in the artifact: a folder of its own, as AI Hub takes it."""
    return f"{HOME}/parts/{part.name}.onnx/{part.name}.onnx"


def sample_file(name: str) -> str:
    """Where a part's samples lie in the artifact."""
    return f"{HOME}/samples/{name}.npz"


@contextmanager
def opened(folder: Path, writing: bool) -> Iterator[Manifest]:
    """The manifest of an artifact that is there, locked where it is written. Raises RingstepError."""
    from ringstep.manifest import open_folder

    manifest = Manifest.load(folder)  # not a folder made by a mistyped name
    if not writing:
        yield manifest
        return
    with open_folder(folder) as manifest:
        yield manifest
