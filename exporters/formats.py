"""What else is written of the rounded weights, each a stage of its own: nothing is rounded again.

    gptq         gptq/         a Hugging Face GPTQ checkpoint, for CPUs and GPUs
    matmulnbits  matmulnbits/  float graphs on MatMulNBits with their step.json, for ONNX Runtime on CPUs; for a scheme
                               of weights alone they are the artifact's own graphs, in onnx/
    encodings    quantize/encodings.json, AIMET style: of the weights alone (qdq writes those of activations too)
    genie-table  genie/        the embedding table for Genie, and the factors to the graph's input
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.stages import READERS, versions
from ringstep import console
from ringstep.errors import RingstepError

if TYPE_CHECKING:
    from exporters.quantised import Quantised
    from quantize.encodings import WeightEncoding
    from quantize.parameters import WeightOf
    from quantize.scheme import Scheme
    from quantize.store import Stored
    from ringstep.manifest import StageRecord

Done = dict[str, dict[str, str]]
GPTQ, CPU, GENIE = "gptq", "matmulnbits", "genie"
GENIE_TYPE = "uint16"  # one scale for the whole table: 8 bits of it would cost what a scale a row keeps


def chosen(formats: Collection[str], scheme: Scheme) -> tuple[str, ...]:
    """The formats of a run in the order of their stages: those asked for and what they need; () stands for graphs."""
    from exporters.job import FORMATS

    wanted = set(formats)
    if scheme.activations.bits:
        # Encodings of activations and the input that a table feeds are known with the graphs.
        wanted |= {"qdq"} if not wanted or wanted & {"encodings", "genie-table"} else set()
        wanted -= {"encodings"}  # written with the graphs
    elif not wanted:
        wanted = {"matmulnbits"}
    return tuple(name for name in FORMATS if name in wanted)


def check_formats(own: Quantised) -> None:
    """Raise RingstepError for a format that cannot hold this scheme's weights, before anything is computed."""
    from quantize.formats.gptq import check_gptq
    from quantize.formats.matmul_nbits import check_matmul_nbits
    from quantize.parameters import linears
    from quantize.qdq import refusal
    from quantize.scheme import grid_for

    scheme, plan = own.scheme, own.line.plan
    planned = lambda path: grid_for(scheme, path)  # nothing is rounded yet, or an earlier scheme was
    if "qdq" in own.formats:
        if not scheme.activations.bits:
            raise RingstepError(
                f"--format qdq: scheme {scheme.name} leaves activations in float, which no NPU takes beside integer "
                "weights; use --format matmulnbits or gptq for CPUs, or a scheme such as w8a16"
            )
        for path in linears(plan):
            if reason := refusal(planned(path)):
                raise RingstepError(f"scheme {scheme.name}: {path}: {reason}")
    if "gptq" in own.formats:
        check_gptq(own.line.checkpoint, plan, planned)
    if "matmulnbits" in own.formats:
        check_matmul_nbits(plan, planned)


def weight_of(own: Quantised) -> WeightOf:
    """The rounded weights by path, each read when it is asked for."""
    from quantize.store import weight_at

    stored, home = own.weights(), own.job.out / "onnx"
    return lambda path: weight_at(home, stored[path])


def weight_encodings(home: Path, index: Mapping[str, Stored]) -> Iterator[tuple[str, WeightEncoding]]:
    """Encodings of the weights in an index by name, one at a time."""
    from quantize.encodings import WeightEncoding
    from quantize.store import array_at

    for name, stored in index.items():
        scale = array_at(home, stored.scale)
        zero = None if stored.zero is None else array_at(home, stored.zero)
        if stored.steps is None:
            yield name, WeightEncoding(stored.grid, scale, zero)
        else:
            steps = array_at(home, stored.steps).T
            yield name, WeightEncoding(stored.grid, steps * scale[:, None], None, steps, scale)


def stage_gptq(own: Quantised, done: Done) -> StageRecord:
    """gptq/: a checkpoint that transformers and gptqmodel load."""
    line = own.line

    def build(folder: Path) -> dict[str, Any]:
        from quantize.formats.gptq import write_gptq

        with console.progress("writing the GPTQ checkpoint", line.weight_bytes() / 2) as tick:
            return {"bytes": write_gptq(line.checkpoint, line.plan, own.grid_of, weight_of(own), line.pieces,
                                        folder / GPTQ, tick=tick)}  # fmt: skip

    inputs = {"checkpoint": line.manifest.checkpoint["sha256"], **done["tokenizer"], **done["round"],
              **done.get("rescale", {})}  # fmt: skip
    return line.stage("gptq", inputs, {}, versions("quantize", "exporters/formats.py", *READERS), build)


def stage_matmulnbits(own: Quantised, done: Done) -> StageRecord:
    """Graphs on MatMulNBits: onnx/ for a scheme of weights alone, else a whole artifact in matmulnbits/."""
    line, beside = own.line, bool(own.scheme.activations.bits)

    def build(folder: Path) -> dict[str, Any]:
        from quantize.formats.matmul_nbits import DATA

        home = folder / CPU if beside else folder
        (home / "onnx").mkdir(parents=True)
        with console.progress("writing MatMulNBits"):
            cpu_graphs(own, home / "onnx", folder / "float")
        shutil.rmtree(folder / "float")
        if beside:
            if (line.job.out / "tokenizer").is_dir():  # a checkpoint without one has none
                shutil.copytree(line.job.out / "tokenizer", home / "tokenizer")
            shutil.copyfile(line.job.out / "onnx" / "embedding.bin", home / "onnx" / "embedding.bin")
            cpu_step(own, home)
        return {"bytes": (home / "onnx" / DATA).stat().st_size}

    inputs = {"checkpoint": line.manifest.checkpoint["sha256"], **done["graphs"], **done["round"],
              **done.get("rescale", {})}  # fmt: skip
    inputs |= {**done["calibrate"], **done["tokenizer"]} if beside else {}
    options = {"beside": beside, "sink_prefix": own.scheme.sink_prefix, "label": line.checkpoint.label,
               "accuracy_level": own.scheme.activations.accuracy_level, "eos": line.checkpoint.eos_ids()}  # fmt: skip
    return line.stage("matmulnbits", inputs, options, versions(
        "quantize", "exporters/formats.py", "exporters/step_file.py", "exporters/weights.py", "ringstep/contract.py",
        *READERS, libraries=("onnx-ir",)), build)  # fmt: skip


def cpu_graphs(own: Quantised, into: Path, scratch: Path) -> None:
    """Write the graphs and weights.nbits.bin into `into`."""
    from exporters.onnx import graph_file
    from exporters.quantised import float_file
    from exporters.weights import write_weights
    from quantize.formats.matmul_nbits import write_matmul_nbits
    from quantize.parameters import linears
    from recipes.weights import key

    line = own.line
    scratch.mkdir()
    # The float graphs refer to files that were never kept: norms, and linears that stay in float, in their places.
    kept = {key(source) for path, source in linears(line.plan).items() if own.grid_of(path) is None}
    write_weights(line.checkpoint, line.plan, "float32", scratch, matrices=kept, read=line.pieces)
    sources = []
    for n in line.chunks:
        sources.append(scratch / graph_file(n))
        shutil.copyfile(line.job.out / "onnx" / float_file(n), sources[-1])
    write_matmul_nbits(line.plan, sources, into, own.grid_of, weight_of(own),
                       accuracy_level=own.scheme.activations.accuracy_level)  # fmt: skip


def cpu_step(own: Quantised, home: Path) -> None:
    """step.json of graphs that lie beside the artifact's own."""
    from exporters.step_file import save, whole_part

    spec = own.line.spec
    graphs = tuple(dataclasses.replace(g, parts={"onnx": (whole_part(g),)}) for g in spec.graphs)
    save(own.line, dataclasses.replace(spec, graphs=graphs), home)


def stage_encodings(own: Quantised, done: Done) -> StageRecord:
    """quantize/encodings.json of the weights alone."""

    def build(folder: Path) -> None:
        from exporters.quantised import ENCODINGS
        from quantize.encodings import write_encodings
        from quantize.store import INDEX, load_index

        home = own.job.out / "onnx"
        with console.progress("writing encodings"):
            write_encodings(folder / ENCODINGS, {}, weight_encodings(home, load_index(home / INDEX)))

    return own.line.stage("encodings", dict(done["round"]), {}, versions("quantize", "exporters/formats.py"), build)


def stage_genie(own: Quantised, done: Done) -> StageRecord:
    """genie/embedding.bin and genie/table.json: the argument that says what it means, the factors to the input."""
    line = own.line

    def build(folder: Path) -> dict[str, Any]:
        from exporters.quantised import ACTIVATIONS
        from quantize.activations import Activation
        from quantize.formats.genie import requantise, write_table
        from ringstep.contract import Encoding

        # The graph's input comes before the embedding's scale, which is a node of the graph.
        plan = dataclasses.replace(line.plan, embedding_scale=1.0)
        with console.progress("writing Genie's table", 2 * plan.vocab * plan.hidden) as tick:
            table = write_table(plan, line.pieces, folder / GENIE / "embedding.bin", GENIE_TYPE, tick=tick)
        there = dataclasses.replace(table, file=Path("embedding.bin"))
        body: dict[str, Any] = {
            "argument": there.argument(), "file": "embedding.bin", "shape": table.shape,
            "type": table.activation.dtype, "scale": table.activation.encoding.scale,
            "offset": -table.activation.encoding.zero, "snr_db": table.snr_db, "requantisation": None,
        }  # fmt: skip
        if "qdq" in done:
            x = json.loads((own.job.out / ACTIVATIONS).read_text())["x"]
            factors = requantise(table, Activation(x["dtype"], Encoding(x["scale"], x["zero"])))
            body["requantisation"] = dataclasses.asdict(factors)
        (folder / GENIE / "table.json").write_text(json.dumps(body, indent=1) + "\n")
        return {"argument": body["argument"], "snr_db": table.snr_db}

    inputs = {"checkpoint": line.manifest.checkpoint["sha256"], **done.get("qdq", {})}
    return line.stage("genie-table", inputs, {}, versions("quantize", "exporters/formats.py", *READERS), build)


STAGES: dict[str, Callable[[Quantised, Done], StageRecord]] = {
    "gptq": stage_gptq, "matmulnbits": stage_matmulnbits, "encodings": stage_encodings, "genie-table": stage_genie,
}  # fmt: skip
