"""QNN, for Qualcomm's NPU: the recipe's module lowered in a child process, where the libraries can be found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ringstep import child, qairt
from ringstep.devices import Chip
from ringstep.errors import RingstepError

if TYPE_CHECKING:
    from exporters.job import Job

TIMEOUT_SECONDS = 3600.0
SAVED = 0.95  # of a copy of the weights: what sharing must save a method; it also spares other constants


def known_chip(chip: Chip) -> None:
    """Raise RingstepError for a chip that ExecuTorch's QNN backend has no entry for."""
    from ringstep.engines.executorch import quiet, require

    require()
    with quiet():
        from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset

    if chip.soc_model not in {c.value for c in QcomChipset}:
        raise RingstepError(f"ExecuTorch's QNN backend does not know {chip.name} (soc_model {chip.soc_model})")


def lower(job: Job, file: Path, *, chip: Chip, share: bool) -> dict[str, Any]:
    """Write the .pte of a job; returns its facts, with the seconds and the most anonymous memory of the process.

    `share` holds weights once for all methods, which no x86 machine can run. Raises RingstepError where something
    is left to the CPU, the backend refuses the graph, or its process crashes.
    """
    made = child.run(
        f"lowering for {chip.name} with ExecuTorch", _lower, job, file.resolve(), chip.soc_model, share,
        timeout_s=TIMEOUT_SECONDS, explain=qairt.explain, env=qairt.environment(qairt.require()),
    )  # fmt: skip
    facts: dict[str, Any] = made.value
    check_whole(facts["methods"], file.name)
    return facts | {"seconds": round(made.seconds, 1), "peak_bytes": made.peak_bytes}


def check_whole(methods: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raise RingstepError unless every method is one delegate and nothing else."""
    for method, found in methods.items():
        if sum(found["delegates"].values()) != 1 or found["cpu_kernels"]:
            left = ", ".join(f"{count} {kernel}" for kernel, count in found["cpu_kernels"].items()) or "nothing"
            raise RingstepError(f"{name}: method {method} has {sum(found['delegates'].values())} delegates, one is "
                                f"wanted; left to the CPU: {left}")  # fmt: skip


def check_shared(shared_bytes: int, apart_bytes: int, weight_bytes: int, methods: int) -> None:
    """Raise RingstepError unless a file holds one copy of the weights where the other build holds one a method."""
    saved, wanted = apart_bytes - shared_bytes, (methods - 1) * weight_bytes
    if saved < SAVED * wanted:
        raise RingstepError(f"weights shared by {methods} methods save {saved} bytes of {apart_bytes}, and should save "
                            f"{wanted}: they are not held once")  # fmt: skip


def _lower(job: Job, file: Path, soc_model: int, share: bool) -> dict[str, Any]:
    """Runs in the child."""
    import torch
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
    from executorch.backends.qualcomm.utils.utils import (
        generate_htp_compiler_spec,
        generate_qnn_executorch_compiler_spec,
        to_edge_transform_and_lower_to_qnn,
    )

    from exporters.executorch.method import Method, constants, example_inputs, write_pte
    from exporters.line import Line
    from recipes.step import DecodeStep
    from ringstep.engines.executorch import method_name

    line = Line(job)
    options = generate_htp_compiler_spec(use_fp16=True, use_weight_sharing=share)
    # A stack trace for each node would be most of the time.
    with torch.no_grad(), patch.object(torch.fx.config, "do_not_emit_stack_traces", True):
        step = DecodeStep(line.plan, line.options, line.spec, line.read)
        methods = {method_name(graph.n): Method(step, graph) for graph in line.spec.graphs}
        edge = to_edge_transform_and_lower_to_qnn(
            methods, {method_name(graph.n): example_inputs(graph) for graph in line.spec.graphs},
            {name: generate_qnn_executorch_compiler_spec(soc_model=QcomChipset(soc_model), backend_options=options)
             for name in methods}, constant_methods=constants(line.spec))  # fmt: skip
        return write_pte(edge, file)
