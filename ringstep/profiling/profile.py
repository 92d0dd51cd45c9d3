"""One profile: how long one graph took on one device, all iterations, by operation, and what it was checked against.

Where a profile comes from is part of it: "aihub" is a phone's, measured by a job; "published" a figure that others
measured and wrote down, without iterations; "synthetic" a made one, of a test. No other number is a latency.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ringstep.contract import shown
from ringstep.errors import RingstepError

UNITS = ("NPU", "GPU", "CPU", "UNSPECIFIED")
MAX_ITERATIONS = 100_000
MAX_OPS = 200_000
LONGEST_US = 3_600_000_000
Origin = Literal["aihub", "published", "synthetic"]


@dataclass(frozen=True)
class Op:
    """One operation as the device ran it."""

    name: str
    type: str
    unit: str
    """NPU, GPU, CPU or UNSPECIFIED."""
    us: float
    """Microseconds; 0 where the runtime counts cycles only."""
    cycles: int


@dataclass(frozen=True)
class Subject:
    """What was measured: one graph of one model. `part` is "step", a kind of layer such as "sliding", or "head"."""

    model: str
    recipe: str
    part: str
    count: int
    """How often the part stands in the step: 21 for the sliding layers of Spark-X2.5-1.7B, 1 for a whole step."""
    tokens: int
    """Tokens a call: 1 for decode."""
    layout: str
    """Cache layout: ring, append, roll; of a step with several, joined by "+"; "" for a head."""
    precision: str
    context: int


@dataclass(frozen=True)
class Place:
    """Where it ran: the device by its id (or AI Hub's name), its chip, the runtime and the unit that was asked for."""

    device: str
    chip: str
    runtime: str
    """qnn, onnx or tflite."""
    unit: str
    """npu, gpu or cpu, as asked; `Profile.units` says what it came to."""


@dataclass(frozen=True)
class Profile:
    """A measurement. Times in microseconds, memory in bytes."""

    subject: Subject
    place: Place
    origin: Origin
    job: str
    """The service's job id; a reference for published figures."""
    created: str
    """ISO 8601, UTC."""
    times_us: tuple[float, ...]
    """Every iteration, in the order of running."""
    versions: dict[str, str] = field(default_factory=dict)
    first_load_us: float | None = None
    warm_load_us: float | None = None
    peak_bytes: tuple[int, int] | None = None
    """Bounds of the peak memory while running, lower and upper."""
    ops: tuple[Op, ...] = ()
    snr_db: float | None = None
    """The worst output's SNR against the reference in the same run; None where parity was not checked."""
    parity: Literal["passed", "failed", "unchecked"] = "unchecked"

    @property
    def median_us(self) -> float:
        """The figure to compare by."""
        return float(np.median(self.times_us))

    @property
    def min_us(self) -> float:
        """What the service shows as its headline; never to be shown alone."""
        return float(min(self.times_us))

    @property
    def p95_us(self) -> float:
        """95th percentile of the iterations."""
        return float(np.percentile(self.times_us, 95))

    @property
    def units(self) -> dict[str, int]:
        """Operations by compute unit, those that ran nowhere left out."""
        return {unit: count for unit in UNITS if (count := sum(op.unit == unit for op in self.ops))}

    @property
    def on_cpu(self) -> tuple[Op, ...]:
        """What ran on the CPU although another unit was asked for."""
        return () if self.place.unit == "cpu" else tuple(op for op in self.ops if op.unit == "CPU")


def read_profile(body: Any, where: str) -> dict[str, Any]:
    """Read what AI Hub's client gives for a job: the fields of Profile that it fills.

    Raises RingstepError for a profile that is no measurement: empty, without times, times of zero or less or over an
    hour, a headline that is not the least of its times, operations that are none. `where` opens the message.
    """
    if not isinstance(body, Mapping) or not body:
        raise RingstepError(f"{where}: the profile is empty: a job that failed, or was not profiled")
    summary = _mapping(body.get("execution_summary"), f"{where}: execution_summary")
    times = read_times(summary.get("all_inference_times"), f"{where}: all_inference_times")
    headline = _number(summary.get("estimated_inference_time"), f"{where}: estimated_inference_time")
    if headline <= 0:
        raise RingstepError(f"{where}: estimated_inference_time is {headline:g}: no measurement")
    # The service's headline is the least of its times; half a unit for a service that rounds.
    if not min(times) - 1 <= headline <= max(times) + 1:
        raise RingstepError(f"{where}: estimated_inference_time {headline:g} lies outside of its own times, "
                            f"{min(times):g} to {max(times):g} us: not one run's figures")  # fmt: skip
    return {
        "times_us": times,
        "first_load_us": _optional(summary.get("first_load_time"), f"{where}: first_load_time"),
        "warm_load_us": _optional(summary.get("warm_load_time"), f"{where}: warm_load_time"),
        "peak_bytes": _peak(summary, where),
        "ops": read_ops(body.get("execution_detail", []), f"{where}: execution_detail"),
    }


def read_times(value: Any, where: str) -> tuple[float, ...]:
    """Times in microseconds. Raises RingstepError unless there is at least one, and all are times."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise RingstepError(f"{where}: no times: nothing was measured")
    if len(value) > MAX_ITERATIONS:
        raise RingstepError(f"{where}: {len(value)} times, at most {MAX_ITERATIONS} are read")
    times = tuple(_number(time, where) for time in value)
    if min(times) <= 0:
        raise RingstepError(f"{where}: a time of {min(times):g} us: no measurement")
    return times


def read_ops(value: Any, where: str) -> tuple[Op, ...]:
    """Operations of a profile. Raises RingstepError for what is none."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MAX_OPS:
        raise RingstepError(f"{where}: no list of at most {MAX_OPS} operations")
    ops = []
    for index, entry in enumerate(value):
        at = f"{where}[{index}]"
        entry = _mapping(entry, at)
        name, kind, unit = (entry.get(key, "") for key in ("name", "type", "compute_unit"))
        if not isinstance(name, str) or not isinstance(kind, str) or unit not in UNITS:
            raise RingstepError(f"{at}: no operation: want name, type and compute_unit ({', '.join(UNITS)})")
        us = _optional(entry.get("execution_time"), at) or 0.0
        cycles = _optional(entry.get("execution_cycles"), at, longest=2.0**63) or 0.0
        ops.append(Op(name, kind, unit, us, int(cycles)))
    return tuple(ops)


def shares(ops: Iterable[Op], label: Any) -> dict[str, float]:
    """Each label's share of the time (of the cycles, where there are no times), largest first; they sum to 1."""
    ops = list(ops)
    cost = (lambda op: op.us) if any(op.us for op in ops) else (lambda op: op.cycles)
    total = sum(cost(op) for op in ops)
    found: dict[str, float] = {}
    for op in ops:
        found[label(op)] = found.get(label(op), 0.0) + cost(op)
    if not total:
        return {}
    return {name: value / total for name, value in sorted(found.items(), key=lambda item: -item[1])}


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RingstepError(f"{where}: expected an object, found {shown(value)}")
    return value


def _number(value: Any, where: str, longest: float = LONGEST_US) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise RingstepError(f"{where}: {shown(value)} is no number")
    if not 0 <= value <= longest:
        raise RingstepError(f"{where}: {shown(value)} is out of range")
    return float(value)


def _optional(value: Any, where: str, longest: float = LONGEST_US) -> float | None:
    if value is None:
        return None
    number = _number(value, where, longest)
    return number or None  # the service writes 0 for what it did not measure


def _peak(summary: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    bounds = summary.get("inference_memory_peak_range")
    if bounds is None:
        single = _optional(summary.get("estimated_inference_peak_memory"), f"{where}: peak memory", 2.0**63)
        return None if single is None else (int(single), int(single))
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        raise RingstepError(f"{where}: inference_memory_peak_range is no pair of bounds")
    low, high = (int(_number(bound, f"{where}: inference_memory_peak_range", 2.0**63)) for bound in bounds)
    if low > high:
        raise RingstepError(f"{where}: inference_memory_peak_range: {low} to {high} are no bounds")
    return (low, high) if high > 0 else None
