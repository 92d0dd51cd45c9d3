"""The stages of an artifact, each opened as a session: what `ringstep parity --stages` compares.

    original ─▶ recipe ─▶ onnx ─▶ sanitised ─▶ quantised ─▶ compiled

A float artifact holds its graphs; a quantised one keeps neither traced graphs nor float weights, so both are made
anew in a temporary folder, from the checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from exporters.artifact import Artifact
from ringstep.contract import EmbeddingSpec
from ringstep.encoding import open_table
from ringstep.errors import RingstepError
from ringstep.session import DecodeSession, is_simulated


@dataclass(frozen=True)
class Stage:
    """One stage: `open` gives its session, `lacking` says why an artifact has none ("" where it has)."""

    name: str
    engine: str
    open: Callable[[Artifact], DecodeSession]
    lacking: Callable[[Artifact], str]
    stored: bool = True
    """Whether its caches hold what the artifact's do: the original's and the recipe's values are never rotated."""

    def simulated(self, artifact: Artifact) -> bool:
        """Whether its arithmetic is a simulator's."""
        return is_simulated(artifact.spec, self.engine)


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

    return lacks_format(artifact, "qnn", qnn.require)


def lacks_pte(artifact: Artifact) -> str:
    """Only --format executorch has it, and only where ExecuTorch is installed; the NPU's needs Qualcomm's libraries."""
    from ringstep import qairt
    from ringstep.engines.executorch import FORMAT, require

    def installed() -> None:
        require()
        if artifact.spec.target.get("backend") == "qnn":
            qairt.require()

    return lacks_format(artifact, FORMAT, installed)


def lacks_format(artifact: Artifact, form: str, require: Callable[[], None]) -> str:
    """Why a format cannot be run: it was not exported, or `require` says what is not installed."""
    if not all(form in graph.parts for graph in artifact.spec.graphs):
        return f"it was exported without --format {form}"
    try:
        require()
    except RingstepError as error:
        return str(error)
    return ""


# One row a stage, in the order of the line; the original comes before all of them. A stage yet to come (a phone) is a
# row at the end: an engine, how to open it, and when there is none.
STAGES: tuple[Stage, ...] = (
    Stage("recipe", "torch", open_recipe, lacks_checkpoint, stored=False),
    Stage("onnx", "ort", open_traced, lacks_traced),
    Stage("sanitised", "ort", open_sanitised, lacks_sanitised),
    Stage("quantised", "ort", lambda artifact: DecodeSession.open(artifact.folder, "ort"), lacks_scheme),
    Stage("compiled", "qnn-sim", lambda artifact: DecodeSession.open(artifact.folder, "qnn-sim"), lacks_binary),
    Stage("executorch", "executorch", lambda artifact: DecodeSession.open(artifact.folder, "executorch"), lacks_pte),
)
ORIGINAL = "original"
NAMES = (ORIGINAL, *(stage.name for stage in STAGES))
