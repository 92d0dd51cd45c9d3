"""Predicted latencies: few physical costs fitted to the published measurements, and how wrong they were for each.

    ms = (timed MB of weights x a  +  layers x b  +  million numbers of keys and values read or returned x c)
         x memory of the measured chip / memory of the asked one (at least 1)

`a`, `b` and `c` are not negative and fitted in relative error, once a system: this project's and AI Hub's context
binaries (qnn), Genie's (genie, which has only whole models at one context, so only `a`). Each measurement is also
predicted by a fit that has not seen it (nor its twin that costs the same): that is the error beside every prediction.
docs/latency-model.md says what this is worth. Nothing here is a measurement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringstep.errors import RingstepError
from ringstep.profiling.cost import Cost, ModelShape, Precision, head_cost, layer_cost, precision_named, step_cost
from ringstep.profiling.profile import Profile
from ringstep.profiling.published import Published, load_published

FEATURES = {"qnn": ("weights", "layers", "kv"), "genie": ("weights",)}
REFERENCE_CHIP = "sm8750"


@dataclass(frozen=True)
class Point:
    """A measurement to fit."""

    name: str
    system: str
    chip: str
    precision: str
    context: int
    cost: Cost
    ms: float


@dataclass(frozen=True)
class Fit:
    """One system's costs."""

    system: str
    costs: dict[str, float]
    """ms an MB of weights, ms a layer, ms a million numbers of keys and values."""
    points: tuple[Point, ...]
    errors: tuple[float, ...]
    """Of each point: predicted / measured - 1."""
    held_out: tuple[float, ...]
    """The same, by a fit to all points but this one (leave-one-out), and but those that cost exactly the same: a 4-bit
    layer's 8-bit twin would give it away."""
    memory_gb_s: dict[str, float]

    @property
    def median_error(self) -> float:
        """Median of the held-out errors' sizes."""
        return float(np.median(np.abs(self.held_out)))

    @property
    def worst_error(self) -> float:
        """Largest of the held-out errors' sizes."""
        return float(np.max(np.abs(self.held_out)))


@dataclass(frozen=True)
class Prediction:
    """A predicted latency of one decode step or layer."""

    predicted_ms: float
    system: str
    median_error: float
    worst_error: float
    """Leave-one-out, of all of the system's measurements."""
    nearest: str
    """The measurement most like it."""
    nearest_error: float
    extrapolated: tuple[str, ...]
    """In what it lies outside of the measurements; their error says nothing of it then."""

    @property
    def predicted_tokens_per_second(self) -> float:
        """As one step a token."""
        return 1000 / self.predicted_ms

    def line(self) -> str:
        """Everything in one line."""
        text = (f"predicted {self.predicted_ms:.1f} ms (leave-one-out error: median {100 * self.median_error:.0f} %, "
                f"worst {100 * self.worst_error:.0f} %; nearest measurement: {self.nearest}, "
                f"{100 * self.nearest_error:+.0f} %)")  # fmt: skip
        return text + (f"; extrapolated: {', '.join(self.extrapolated)}" if self.extrapolated else "")


def features(cost: Cost, system: str) -> dict[str, float]:
    """What a system's costs are multiplied by.

    Genie's weights count as kept, 4-bit ones as half a byte; see docs/latency-model.md for why the others do not.
    """
    weights = cost.weight_bytes if system == "genie" else cost.timed_bytes
    every = {"weights": weights / 1e6, "layers": float(cost.layers), "kv": (cost.kv_read + cost.kv_returned) / 1e6}
    return {name: every[name] for name in FEATURES[system]}


def slowdown(chip: str, memory_gb_s: Mapping[str, float]) -> float:
    """How much longer a chip takes than the measured one, by their memories; never less than 1: nothing says that a
    faster memory alone helps. Raises RingstepError for a chip whose memory is not known."""
    if chip not in memory_gb_s:
        raise RingstepError(f"no prediction for {chip}: its memory bandwidth is not in profiling/published.toml")
    return max(1.0, memory_gb_s[REFERENCE_CHIP] / memory_gb_s[chip])


def points_of(published: Published, system: str) -> list[Point]:
    """The measurements of a system that its costs are fitted to: on an NPU, of a known shape, of the model as it is."""
    found = []
    for profile in published.profiles:
        shape = published.shapes.get(profile.job)
        own = profile.versions["system"] == system and profile.place.unit == "npu" and "(" not in profile.subject.recipe
        if own and shape is not None:
            s = profile.subject
            cost = _cost(profile, shape)
            found.append(Point(profile.job, system, profile.place.chip, s.precision, s.context, cost,
                               profile.median_us / 1000))  # fmt: skip
    return found


def fit(points: Sequence[Point], memory_gb_s: Mapping[str, float]) -> Fit:
    """Fit one system's costs. Raises RingstepError for no more points than costs, or points of several systems."""
    systems = {point.system for point in points}
    if len(systems) != 1:
        raise RingstepError(f"want one system's measurements, these are of {', '.join(sorted(systems)) or 'none'}")
    system = systems.pop()
    names = FEATURES[system]
    if len(points) <= len(names):
        raise RingstepError(f"{len(points)} measurements of {system} cannot fit {len(names)} costs and be held out")
    # Divided by what was measured: the squares that are made small are those of relative errors.
    rows = np.array([[value * slowdown(p.chip, memory_gb_s) / p.ms for value in features(p.cost, system).values()]
                     for p in points])  # fmt: skip
    costs = _solve(rows)
    twins = [features(point.cost, system) for point in points]
    held_out = [float(row @ _solve(rows[[twin != own for twin in twins]])) - 1
                for row, own in zip(rows, twins, strict=True)]  # fmt: skip
    errors = tuple(map(float, rows @ costs - 1))
    by_name = dict(zip(names, map(float, costs), strict=True))
    return Fit(system, by_name, tuple(points), errors, tuple(held_out), dict(memory_gb_s))


@functools.cache
def fitted(system: str = "qnn") -> Fit:
    """The fit to the published measurements."""
    published = load_published()
    return fit(points_of(published, system), published.memory_gb_s)


def predict(model: Fit, cost: Cost, *, chip: str, precision: str, context: int, whole: bool = True) -> Prediction:
    """What a cost comes to on a chip. `whole`: a whole step with its head, not one layer.

    Raises RingstepError for a chip whose memory is not known.
    """
    ms = sum(model.costs[name] * value for name, value in features(cost, model.system).items())
    ms *= slowdown(chip, model.memory_gb_s)
    outside = _outside(model, cost, chip, precision, context, whole)
    nearest, error = min(
        zip(model.points, model.held_out, strict=True),
        key=lambda pair: (pair[0].precision != precision, pair[0].chip != chip, _distance(pair[0].cost, cost)),
    )
    return Prediction(ms, model.system, model.median_error, model.worst_error, nearest.name, error, outside)


def predict_step(shape: ModelShape, precision: str, context: int, layouts: dict[str, str], chip: str,
                 system: str = "qnn") -> Prediction:  # fmt: skip
    """A whole decode step of a model, the cache full. Raises RingstepError as `predict` and `step_cost`."""
    cost = step_cost(shape, precision_named(precision), context, layouts)
    return predict(fitted(system), cost, chip=chip, precision=precision, context=context)


def _cost(profile: Profile, shape: ModelShape) -> Cost:
    s = profile.subject
    precision: Precision = precision_named(s.precision)
    for layer in shape.layers:
        if layer.name == s.part:
            return layer_cost(layer, precision, s.context, s.layout)
    if s.part == "head":
        return head_cost(shape, precision)
    return step_cost(shape, precision, s.context, {layer.name: s.layout for layer in shape.layers})


def _solve(rows: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls

    return np.asarray(nnls(rows, np.ones(len(rows)))[0])


def _per_layer(cost: Cost) -> tuple[float, float]:
    layers = max(1, cost.layers)
    return cost.timed_bytes / layers, (cost.kv_read + cost.kv_returned) / layers


def _distance(a: Cost, b: Cost) -> float:
    pairs = zip(_per_layer(a), _per_layer(b), strict=True)
    return sum(abs(math.log((x + 1) / (y + 1))) for x, y in pairs)


def _reads(cost: Cost) -> float:
    return cost.kv_read / max(1, cost.layers)


def _returns_little(cost: Cost) -> bool:
    return cost.kv_returned < cost.kv_read / 2


def _outside(model: Fit, cost: Cost, chip: str, precision: str, context: int, whole: bool) -> tuple[str, ...]:
    """In what a prediction lies outside of the measurements."""
    found = []
    points = model.points
    if all(point.chip != chip for point in points):
        found.append(f"nothing was measured on {chip}, scaled by its memory")
    same = [point for point in points if point.precision == precision]
    if not same:
        found.append("nothing was measured in this precision")
    weights, kv = zip(*(_per_layer(point.cost) for point in same or points), strict=True)
    own_weights, own_kv = _per_layer(cost)
    if not min(weights) / 1.5 <= own_weights <= max(weights) * 1.5:
        least, most = min(weights) / 1e6, max(weights) / 1e6
        found.append(f"layers of {own_weights / 1e6:.0f} MB, {least:.0f} to {most:.0f} were measured")
    short = [point.cost for point in same if _returns_little(point.cost)]
    if _returns_little(cost) and _reads(cost) > 1.5 * max((_reads(c) for c in short), default=0):
        found.append("full caches of which only the new entry is returned were not measured so long")
    elif own_kv > max(kv) * 1.5:
        found.append(f"context {context}: more keys and values than were measured")
    if whole and all(point.cost.layers == 1 for point in same):
        found.append("whole steps: only single layers were measured")
    return tuple(found)
