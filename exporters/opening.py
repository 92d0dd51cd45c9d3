"""The stages of an artifact, each opened as a session: what `ringstep parity --stages` compares.

    original ─▶ recipe ─▶ onnx ─▶ sanitised ─▶ quantised ─▶ compiled

A float artifact holds its graphs; a quantised one keeps neither traced graphs nor float weights, so both are made
anew in a temporary folder, from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ringstep import console
from ringstep.contract import EmbeddingSpec, StepSpec
from ringstep.encoding import open_table
from ringstep.errors import RingstepError
from ringstep.manifest import Manifest, manifest_of
from ringstep.session import DecodeSession

if TYPE_CHECKING:
    import numpy as np

    from recipes.plan import Options, Plan, Source
    from ringstep.checkpoint import Checkpoint

RESCALE = "quantize/rescale.npz"


class Artifact:
    """An artifact folder and, where it is at hand, the checkpoint it was made from; close() frees what was made."""

    def __init__(self, folder: Path, checkpoint: Checkpoint | None) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.spec = StepSpec.load(folder)
        self.manifest: Manifest = manifest_of(folder)
        self.temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def rotated(self) -> bool:
        """Whether the weights, and with them the values in caches, are rotated ones."""
        calibrated = self.manifest.stages.get("calibrate")
        return bool(calibrated and calibrated.options.get("rotate"))

    @cached_property
    def options(self) -> Options:
        """How the export wrote the step down. Raises RingstepError."""
        from recipes.plan import Options

        record = self.manifest.stages.get("graphs") or self.manifest.stages.get("onnx")
        if record is None:
            raise RingstepError(f"{self.folder}: its manifest knows no stage that traced a graph; export it again")
        names = {field.name for field in dataclasses.fields(Options)}
        return Options(**{name: value for name, value in record.options.items() if name in names})

    @cached_property
    def weights(self) -> tuple[Plan, Callable[[Source], np.ndarray]]:
        """The plan of the artifact's float graphs and a way to their parameters, rotated and rescaled as they were."""
        plan, read = self.original
        if self.rotated:
            from quantize.folding.rotate import rotated

            plan, read = rotated(plan, read)
        if "rescale" in self.manifest.stages:
            from exporters.rescaled import load
            from quantize.folding.rescale import rescaled

            read = rescaled(read, load(self.folder / RESCALE))
        return plan, read

    @cached_property
    def original(self) -> tuple[Plan, Callable[[Source], np.ndarray]]:
        """The recipe's plan and a way to the checkpoint's own parameters."""
        from recipes import plan_for
        from recipes.weights import read

        checkpoint = self.needed()
        return plan_for(checkpoint.config), lambda source: read(checkpoint, source)

    def needed(self) -> Checkpoint:
        """The checkpoint. Raises RingstepError without one."""
        if self.checkpoint is None:
            raise RingstepError(f"{self.folder}: this stage is made from the checkpoint, which is not at hand")
        return self.checkpoint

    def float_spec(self, plan: Plan, options: Options) -> StepSpec:
        """The contract of the float step: the artifact's layouts, context and chunks, no files."""
        from recipes.step import step_spec

        chunks = tuple(sorted(graph.n for graph in self.spec.graphs))
        return step_spec(plan, options, model=self.spec.model, context=self.spec.context, chunks=chunks,
                         eos=self.spec.eos)  # fmt: skip

    @cached_property
    def float_files(self) -> Path:
        """A temporary folder with the float weights of a quantised artifact, its traced and its float graphs."""
        from exporters.onnx import export_graphs, traced_file
        from exporters.quantised import float_file
        from exporters.weights import load_index, write_weights

        plan, read = self.weights
        self.temporary = tempfile.TemporaryDirectory(prefix="ringstep-stages-")
        home = Path(self.temporary.name)
        with console.progress("writing float weights and graphs"):
            write_weights(self.needed(), plan, "float32", home, read=lambda source: [read(source)])
            spec = self.float_spec(plan, self.options)
            export_graphs(plan, self.options, spec, load_index(home), home, traced_file)
            for graph in spec.graphs:
                shutil.copyfile(self.folder / "onnx" / float_file(graph.n), home / float_file(graph.n))
        return home

    def close(self) -> None:
        """Remove the temporary folder."""
        if self.temporary:
            self.temporary.cleanup()
            self.temporary = None

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Stage:
    """One stage: `open` gives its session, `lacking` says why an artifact has none ("" where it has)."""

    name: str
    engine: str
    open: Callable[[Artifact], DecodeSession]
    lacking: Callable[[Artifact], str]
    stored: bool = True
    """Whether its caches hold what the artifact's do: the original's and the recipe's values are never rotated."""

    @property
    def simulated(self) -> bool:
        """Whether its arithmetic is a simulator's."""
        return self.engine == "qnn-sim"


def open_recipe(artifact: Artifact) -> DecodeSession:
    """The recipe's modules in eager torch, in the artifact's dtype, layouts, context and chunks."""
    from recipes.step import DecodeStep
    from ringstep.engines.torch_eager import TorchEngine

    plan, read = artifact.original
    options = dataclasses.replace(artifact.options, embedding_inside=True)
    spec = artifact.float_spec(plan, options)
    return DecodeSession(spec, TorchEngine(DecodeStep(plan, options, spec, read)))


def open_traced(artifact: Artifact) -> DecodeSession:
    """The graphs as traced, on ONNX Runtime."""
    from exporters.onnx import traced_file

    return open_float(artifact, traced_file)


def open_sanitised(artifact: Artifact) -> DecodeSession:
    """The sanitised graphs before anything is quantised, on ONNX Runtime."""
    from exporters.onnx import graph_file
    from exporters.quantised import float_file

    return open_float(artifact, float_file if artifact.spec.scheme else graph_file)


def open_float(artifact: Artifact, name: Callable[[int], str]) -> DecodeSession:
    """Float graphs by these file names: the artifact's own, or a quantised one's made anew."""
    from exporters.step_file import whole_part
    from ringstep.engines.ort import OrtEngine

    if artifact.spec.scheme:
        home = artifact.float_files
        spec = artifact.float_spec(artifact.weights[0], artifact.options)
        table = EmbeddingSpec("embedding.bin", 0, (spec.vocab, spec.hidden), "float32")
        spec = dataclasses.replace(spec, embedding=None if artifact.options.embedding_inside else table)
    else:
        home, spec = artifact.folder, artifact.spec
    place = "" if artifact.spec.scheme else "onnx/"
    graphs = []
    for graph in spec.graphs:
        part = dataclasses.replace(whole_part(graph), file=place + name(graph.n))
        graphs.append(dataclasses.replace(graph, parts={"onnx": (part,)}, hidden=()))
    spec = dataclasses.replace(spec, graphs=tuple(graphs))
    return DecodeSession(spec, OrtEngine(home, spec), open_table(home, spec))


def lacks_checkpoint(artifact: Artifact) -> str:
    """Made from the checkpoint."""
    return "" if artifact.checkpoint else "it is made from the checkpoint"


def lacks_traced(artifact: Artifact) -> str:
    """A quantised artifact's is made from the checkpoint, a float one's lies there."""
    from exporters.onnx import traced_file

    if artifact.spec.scheme:
        return lacks_checkpoint(artifact)
    files = [f"onnx/{traced_file(graph.n)}" for graph in artifact.spec.graphs]
    return next((f"no {file}: export it again" for file in files if not (artifact.folder / file).is_file()), "")


def lacks_sanitised(artifact: Artifact) -> str:
    """A quantised artifact's float graphs have no weights of their own."""
    return lacks_checkpoint(artifact) if artifact.spec.scheme else ""


def lacks_scheme(artifact: Artifact) -> str:
    """Only a quantised artifact has it."""
    return "" if artifact.spec.scheme else "nothing is quantised"


def lacks_binary(artifact: Artifact) -> str:
    """Only --format qnn has it, and only where Qualcomm's plugin runs."""
    from ringstep import qnn

    if not all("qnn" in graph.parts for graph in artifact.spec.graphs):
        return "it was exported without --format qnn"
    try:
        qnn.require()
    except RingstepError as error:
        return str(error)
    return ""


# One row a stage, in the order of the line; the original comes before all of them. A stage yet to come (ExecuTorch, a
# phone) is a row at the end: an engine, how to open it, and when there is none.
STAGES: tuple[Stage, ...] = (
    Stage("recipe", "torch", open_recipe, lacks_checkpoint, stored=False),
    Stage("onnx", "ort", open_traced, lacks_traced),
    Stage("sanitised", "ort", open_sanitised, lacks_sanitised),
    Stage("quantised", "ort", lambda artifact: DecodeSession.open(artifact.folder, "ort"), lacks_scheme),
    Stage("compiled", "qnn-sim", lambda artifact: DecodeSession.open(artifact.folder, "qnn-sim"), lacks_binary),
)
ORIGINAL = "original"
NAMES = (ORIGINAL, *(stage.name for stage in STAGES))


def artifacts_in(folder: Path) -> Iterator[Path]:
    """The folder itself where it is an artifact, else those directly in it. Raises RingstepError for none."""
    if (folder / "step.json").exists() or not folder.is_dir():
        yield folder
        return
    found = sorted(path.parent for path in folder.glob("*/step.json"))
    if not found:
        raise RingstepError(f"{folder}/step.json: no such file; is this an artifact made by ringstep export?")
    yield from found
