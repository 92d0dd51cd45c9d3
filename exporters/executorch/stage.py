"""The stage `executorch` of a line: executorch/model.pte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.stages import READERS, versions
from ringstep import console
from ringstep.errors import RingstepError
from ringstep.manifest import StageRecord

if TYPE_CHECKING:
    from exporters.job import Job
    from exporters.line import Line
    from quantize.grid import Grid

PTE, SIMULATED_PTE = "executorch/model.pte", "executorch/simulated.pte"
LIBRARIES = ("executorch", "torchao")
QUANTISED = ("graphs", "rescale", "round", "qdq")  # stages whose files a quantised .pte is made from
CONVERTING = ("quantize/torch_graph.py", "quantize/qdq.py", "quantize/store.py", "exporters/tapped.py")
GROUPS = {"8da4w": 32, "8da4w-g128": 128}  # weights that share a scale


def builds_two(job: Job) -> bool:
    """Whether x86 cannot run what is shipped: the NPU's methods share weights, and a second build does not."""
    return job.lowered_to == "qnn" and job.chunk > 1


def executorch_stage(line: Line, done: Mapping[str, Mapping[str, str]]) -> StageRecord:
    """Lower the step for the backend that was asked for: the recipe's module, or what was quantised (`done`).

    Raises RingstepError without ExecuTorch.
    """
    from ringstep.engines.executorch import require

    require()
    backend = line.job.lowered_to
    options = {"context": line.context, "chunks": list(line.chunks), "backend": backend, "precision": line.precision,
               "eos": line.spec.eos, **dataclasses.asdict(line.options)}  # fmt: skip
    if line.device and backend == "qnn":
        from ringstep import qairt

        options |= {"chip": line.device.chip.name, "libraries": qairt.require().name}
    own = ("xnnpack",) if backend == "xnnpack" else ("qnn", "qnn_lower", "converted")
    sources = versions("recipes", *(f"exporters/executorch/{name}.py" for name in ("method", "faster_fx", *own)),
                       *(CONVERTING if line.quantised else ()), "ringstep/contract.py", *READERS,
                       libraries=("torch", *LIBRARIES))  # fmt: skip
    build = build_xnnpack if backend == "xnnpack" else build_qnn
    inputs = {"checkpoint": line.manifest.checkpoint["sha256"]}
    for name in QUANTISED if line.quantised else ():
        inputs |= done.get(name, {})
    return line.stage("executorch", inputs, options, sources,
                      lambda folder: build(line, folder))  # fmt: skip


def refuse_too_large(line: Line) -> None:
    """Raise RingstepError where the weights are more than one context of the chip may hold: a .pte has no parts."""
    if line.job.lowered_to != "qnn" or line.device is None:
        return
    from quantize.scheme import grid_for

    scheme, limit = line.scheme, line.device.chip.graph_limit_mb << 20
    have = weight_bytes(line, (lambda path: grid_for(scheme, path)) if scheme else None)
    if have > limit:
        raise RingstepError(
            f"{have >> 20} MiB of weights, and one context of {line.device.chip.name} holds {limit >> 20} MiB: use "
            "--format qnn, which cuts a model into parts"
        )


def build_xnnpack(line: Line, folder: Path) -> dict[str, Any]:
    """The .pte for CPUs."""
    from exporters.executorch.xnnpack import export_pte

    (folder / PTE).parent.mkdir()
    with console.progress("lowering for XNNPACK"):
        return export_pte(line.plan, line.options, line.spec, line.read, folder / PTE, GROUPS.get(line.precision))


def build_qnn(line: Line, folder: Path) -> dict[str, Any]:
    """The .pte for the NPU; where its methods share weights, proof that they do, and one that the simulator runs."""
    from exporters.executorch.qnn import check_shared, lower
    from ringstep.engines.executorch import method_name

    assert line.device is not None
    (folder / PTE).parent.mkdir()
    files = {True: folder / PTE, False: folder / SIMULATED_PTE} if builds_two(line.job) else {False: folder / PTE}
    graphs, small = line.spec.graphs, {}
    if line.quantised:
        from exporters.step_file import encoded_spec

        graphs, small = encoded_spec(line.spec, line.job.out).graphs, line.quantised.small
    with console.progress(f"lowering for {line.device.chip.name}"):
        made = lower(line.job, files, chip=line.device.chip, small=small,
                     graphs={method_name(graph.n): graph for graph in graphs})  # fmt: skip
    facts, apart = made["files"].get(True), made["files"][False]
    weights = weight_bytes(line, line.quantised.grid_of if line.quantised else None)
    if facts is None:
        facts = apart
    else:
        check_shared(facts["bytes"], apart["bytes"], weights, len(line.chunks))
        facts |= {"simulated": apart}
    return {**facts, "weight_bytes": weights, "seconds": made["seconds"], "peak_bytes": made["peak_bytes"]}


def weight_bytes(line: Line, grid_of: Callable[[str], Grid | None] | None) -> int:
    """Bytes of one copy of what the methods hold: all layers and the head, and a table that is inside.

    `grid_of` gives the grid of a quantised linear by path, None: all are floats.
    """
    from quantize.parameters import linears
    from quantize.sizes import HTP, nbytes
    from ringstep.contract import DTYPE_BYTES

    if grid_of:
        return sum(nbytes(s.out_shape, grid_of(path), HTP) for path, s in linears(line.plan).items())
    sources = [s for i in range(len(line.plan.layers)) for s in line.plan.layer_sources(i).values()]
    sources += [line.plan.head, *([line.plan.embedding] if line.options.embedding_inside else [])]
    return sum(math.prod(s.out_shape) for s in sources) * DTYPE_BYTES[line.dtype]
