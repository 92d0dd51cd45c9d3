"""Profiles of the stand-in: SYNTHETIC. No phone ran; times follow from the graph's bytes, so that they repeat.

An execution takes 100 us and 1 us for each 1000 bytes of the model, with 2 % of noise seeded by its content and device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from qai_hub import public_api_pb2 as pb

BASE_US, BYTES_PER_US, NOISE = 100.0, 1000.0, 0.02
ITERATIONS = 100
UNITS = {"npu": pb.COMPUTE_UNIT_NPU, "gpu": pb.COMPUTE_UNIT_GPU, "cpu": pb.COMPUTE_UNIT_CPU}


def profile(
    size: int, seed: str, ops: list[list[str]], options: dict[str, str], samples: int, faults: dict[str, Any]
) -> pb.ProfileDetail:
    """The profile of a model of `size` bytes (us and bytes in it); `seed` is hexadecimal, `ops` name and type each."""
    random = np.random.default_rng(int(seed[:12], 16))
    count = max(1, int(options.get("max_profiler_iterations", ITERATIONS)) // max(1, samples))
    noise = np.abs(random.normal(0, NOISE, count))
    times = [int(us) for us in (BASE_US + size / BYTES_PER_US) * (1 + noise)]
    detail = pb.ProfileDetail(
        major_version=1, minor_version=2, execution_time=min(times), all_execution_times=times,
        cold_load_time=size // 10 + 50_000, warm_load_time=size // 20 + 25_000,
        after_cold_load_peak_memory=size + (8 << 20), after_warm_load_peak_memory=size + (8 << 20),
        after_execution_peak_memory=size + (4 << 20),
    )  # fmt: skip
    detail.all_cold_load_times.append(detail.cold_load_time)
    detail.all_warm_load_times.append(detail.warm_load_time)
    for memory in (detail.cold_load_memory, detail.warm_load_memory, detail.execution_memory):
        memory.peak.lower, memory.peak.upper = size, size + (4 << 20)
        memory.increase.lower, memory.increase.upper = 0, 4 << 20
    asked = [unit for unit in options.get("compute_unit", "npu").split(",") if unit in UNITS]
    unit, on_cpu = (asked or ["npu"])[0], faults.get("on_cpu", {}).get("count", 0)
    for index, (name, kind) in enumerate(ops):
        detail.layer_details.add(
            name=name, layer_type_name=kind, id=str(index), execution_time=min(times) // len(ops),
            execution_cycles=min(times) * 1000 // len(ops),
            compute_unit=UNITS["cpu" if index < on_cpu else unit],
        )  # fmt: skip
    _break(detail, faults.get("profile", {}).get("how", ""))
    return detail


def _break(detail: pb.ProfileDetail, how: str) -> None:
    if how == "empty_times":
        del detail.all_execution_times[:]
    elif how == "zero_times":
        detail.all_execution_times[:] = [0] * len(detail.all_execution_times)
        detail.execution_time = 0
    elif how == "headline":
        detail.execution_time = 10 * max(detail.all_execution_times)
