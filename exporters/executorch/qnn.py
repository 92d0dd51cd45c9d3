"""QNN, for Qualcomm's NPU: the recipe's module lowered in a child process, where the libraries can be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringstep import child, qairt
from ringstep.contract import GraphSpec
from ringstep.devices import Chip
from ringstep.errors import RingstepError

if TYPE_CHECKING:
    import numpy as np

    from exporters.job import Job

TIMEOUT_SECONDS = 3600.0
QNN_TYPES = {"float16": "float_16", "int32": "int_32", "uint8": "ufixed_point_8", "int16": "sfixed_point_16",
             "uint16": "ufixed_point_16"}  # fmt: skip
SAVED = 0.95  # of a copy of the weights: what sharing must save a method; it also spares other constants


def known_chip(chip: Chip) -> None:
    """Raise RingstepError for a chip that ExecuTorch's QNN backend has no entry for."""
    from ringstep.console import quiet_libraries
    from ringstep.engines.executorch import require

    require()
    with quiet_libraries():
        from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset

    if chip.soc_model not in {c.value for c in QcomChipset}:
        raise RingstepError(f"ExecuTorch's QNN backend does not know {chip.name} (soc_model {chip.soc_model})")


def lower(job: Job, files: Mapping[bool, Path], *, chip: Chip, graphs: Mapping[str, GraphSpec],
          small: Mapping[str, np.ndarray]) -> dict[str, Any]:  # fmt: skip
    """Write the .pte files of a job, by whether methods share weights; returns facts of each, seconds and peak memory.

    A file whose weights are held once for all methods runs on no x86 machine. `graphs` are the contract's by method,
    `small` the parameters of a quantised step that are no linear's. The peak is of the process's anonymous memory.
    Raises RingstepError where something is left to the CPU, files and methods do not hold the same weights or the
    contract's graphs, the backend refuses them, or its process crashes.
    """
    made = child.run(
        f"lowering for {chip.name} with ExecuTorch", _lower, job, chip.soc_model, dict(graphs),
        {share: file.resolve() for share, file in files.items()}, dict(small),
        timeout_s=TIMEOUT_SECONDS, explain=qairt.explain, env=qairt.environment(qairt.require()),
    )  # fmt: skip
    facts: dict[bool, dict[str, Any]] = made.value
    check_weights({file.name: facts[share].pop("weights") for share, file in files.items()})
    for share, file in files.items():
        check_whole(facts[share]["methods"], file.name)
        check_graphs(facts[share].pop("graphs"), graphs, file.name)
    return {"files": facts, "seconds": round(made.seconds, 1), "peak_bytes": made.peak_bytes}


def _lower(*args: Any) -> dict[bool, dict[str, Any]]:
    """Runs in the child."""
    from exporters.executorch.qnn_lower import lower_to_files

    return lower_to_files(*args)


def check_whole(methods: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raise RingstepError unless every method is one delegate and nothing else."""
    for method, found in methods.items():
        if sum(found["delegates"].values()) != 1 or found["cpu_kernels"]:
            left = ", ".join(f"{count} {kernel}" for kernel, count in found["cpu_kernels"].items()) or "nothing"
            raise RingstepError(f"{name}: method {method} has {sum(found['delegates'].values())} delegates, one is "
                                f"wanted; left to the CPU: {left}")  # fmt: skip


def check_weights(given: Mapping[str, Mapping[str, str]]) -> None:
    """Raise RingstepError unless all methods of all files were given the same constants (sha256 by file and method)."""
    by_sha: dict[str, list[str]] = {}
    for file, methods in given.items():
        for method, sha in methods.items():
            by_sha.setdefault(sha, []).append(f"{method} of {file}")
    if len(by_sha) > 1:
        parts = " and ".join(", ".join(names) for names in by_sha.values())
        raise RingstepError(f"{parts} hold different weights or encodings of weights: a fault of ringstep, report it")


def check_graphs(found: Mapping[str, Mapping[str, Any]], graphs: Mapping[str, GraphSpec], name: str) -> None:
    """Raise RingstepError unless a context binary, read back, has the contract's graphs with their shapes and types."""
    if found.keys() != graphs.keys():
        raise RingstepError(f"{name}: its context has the graphs {', '.join(found)}, wanted are {', '.join(graphs)}")
    for method, graph in graphs.items():
        for side in ("inputs", "outputs"):
            have = Counter((tuple(t["shape"]), t["dtype"]) for t in found[method][side])
            want = Counter((t.shape, QNN_TYPES[t.dtype]) for t in getattr(graph, side))
            if have != want:
                first = next(iter((have - want) + (want - have)))
                raise RingstepError(f"{name}: the {side} of graph {method} are not the contract's: {first[1]} "
                                    f"{list(first[0])}")  # fmt: skip


def check_shared(shared_bytes: int, apart_bytes: int, weight_bytes: int, methods: int) -> None:
    """Raise RingstepError unless a file holds one copy of the weights where the other build holds one a method."""
    saved, wanted = apart_bytes - shared_bytes, (methods - 1) * weight_bytes
    if saved < SAVED * wanted:
        raise RingstepError(f"weights shared by {methods} methods save {saved} bytes of {apart_bytes}, and should save "
                            f"{wanted}: they are not held once")  # fmt: skip
