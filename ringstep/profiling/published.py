"""Figures that others measured and published (published.toml), as profiles of origin "published", read strictly."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringstep.contract import shown
from ringstep.errors import RingstepError, did_you_mean
from ringstep.profiling.cost import LAYOUTS, LayerShape, ModelShape
from ringstep.profiling.profile import LONGEST_US, Place, Profile, Subject

_TOML = Path(__file__).with_name("published.toml")
_FIGURE = re.compile(r"\d{1,7}(\.\d{1,6})?", re.ASCII)
MODEL_KEYS = {"label", "recipe", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocab", "kinds"}
TABLE_KEYS = {"model", "device", "chip", "system", "source", "rows"}
ROW_KEYS = {"row", "part", "layout", "context", "precision"}


@dataclass(frozen=True)
class Published:
    """What published.toml holds."""

    profiles: tuple[Profile, ...]
    rounding_us: dict[str, float]
    """By `Profile.job`: half of the last published digit, in microseconds. The true figure lies within it."""
    shapes: dict[str, ModelShape]
    """What was run, by `Profile.job`; none where the shape is not known."""
    memory_gb_s: dict[str, float]
    """Peak of a chip's memory by the chip's name, in GB/s."""
    gates: dict[str, tuple[float, float, float]]
    """What ExecuTorch's tests demand at least on sm8750, by model: tokens a second, dB, perplexity."""


@functools.cache
def load_published(path: Path = _TOML) -> Published:
    """Read the file. Raises RingstepError for a missing or unknown key, a wrong type, a figure that is none."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RingstepError(f"{path.name}: {error}") from error
    body = _keys(data, {"chip", "model", "table", "gate"}, set(), path.name)
    memory = {}
    for name, chip in _mapping(body["chip"], f"{path.name}: chip").items():
        where = f"{path.name}: chip.{name}"
        memory[name] = _number(_keys(chip, {"memory_gb_s"}, set(), where)["memory_gb_s"], where)
    models = _mapping(body["model"], f"{path.name}: model")
    by_key = {key: _shape(model, f"{path.name}: model.{key}") for key, model in models.items()}
    profiles, rounding, shapes = [], {}, {}
    for profile, half, shape in _profiles(body["table"], by_key, path.name):
        if profile.job in rounding:
            raise RingstepError(f"{path.name}: {profile.job} is there twice")
        profiles.append(profile)
        rounding[profile.job] = half
        if shape is not None:
            shapes[profile.job] = shape
    gates = {}
    for model, figures in _mapping(body["gate"], f"{path.name}: gate").items():
        where = f"{path.name}: gate.{model}"
        if not isinstance(figures, list) or len(figures) != 3:
            raise RingstepError(f"{where}: want tokens a second, dB and perplexity")
        rate, snr, perplexity = (_number(figure, where) for figure in figures)
        gates[model] = (rate, snr, perplexity)
    return Published(tuple(profiles), rounding, shapes, memory, gates)


def dense_layer(name: str, count: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, rotated: int,
                window: int | None = None, gated: bool = False) -> LayerShape:  # fmt: skip
    """A layer with query, key, value, output, gate, up and down projections, and a scalar gate a head if `gated`."""
    queries, keys = heads * head_dim, kv_heads * head_dim
    weights = hidden * (2 * queries + 2 * keys + 3 * inner + (heads if gated else 0))
    rows = queries + 2 * keys + 2 * hidden + 2 * inner + (heads if gated else 0)
    return LayerShape(name, count, weights, rows, heads, kv_heads, head_dim, rotated, window)


def _shape(model: Any, where: str) -> ModelShape:
    body = _keys(model, MODEL_KEYS, {"gated"}, where)
    sizes = {key: _whole(body[key], f"{where}: {key}") for key in
             ("hidden", "inner", "heads", "kv_heads", "head_dim", "vocab")}  # fmt: skip
    layers = []
    for name, kind in _mapping(body["kinds"], f"{where}: kinds").items():
        kind = _keys(kind, {"count", "rotated"}, {"window"}, f"{where}: kinds.{name}")
        numbers = {key: _whole(value, f"{where}: kinds.{name}: {key}") for key, value in kind.items()}
        layers.append(dense_layer(
            name, numbers["count"], sizes["hidden"], sizes["inner"], sizes["heads"], sizes["kv_heads"],
            sizes["head_dim"], numbers["rotated"], numbers.get("window"), body.get("gated") is True,
        ))  # fmt: skip
    return ModelShape(_text(body["label"], where), _text(body["recipe"], where), sizes["hidden"], sizes["vocab"],
                      tuple(layers))  # fmt: skip


Read = tuple[Profile, float, ModelShape | None]


def _profiles(tables: Any, shapes: Mapping[str, ModelShape], file: str) -> Iterator[Read]:
    if not isinstance(tables, list):
        raise RingstepError(f"{file}: [[table]] is missing")
    for number, table in enumerate(tables):
        where = f"{file}: table {number}"
        table = _keys(table, TABLE_KEYS, set(), where)
        if not isinstance(table["rows"], list):
            raise RingstepError(f"{where}: rows is no list")
        for index, row in enumerate(table["rows"]):
            at = f"{where}: row {index}"
            row = _keys(row, ROW_KEYS, {"model", "label", "ms", "tokens_per_second", "calls", "unit", "variant"}, at)
            yield _profile(table, row, shapes, at)


def _profile(table: Mapping[str, Any], row: Mapping[str, Any], shapes: Mapping[str, ModelShape],
             where: str) -> Read:  # fmt: skip
    key = _text(row.get("model") or table["model"], where)
    shape = shapes.get(key)
    if key and shape is None:
        raise RingstepError(f"{where}: unknown model {key!r}{did_you_mean(key, shapes)}")
    label = shape.label if shape else _text(row.get("label"), where)
    calls = _whole(row.get("calls", 1), f"{where}: calls")
    us, half = _time(row, calls, where)
    part, layout = _text(row["part"], where), _text(row["layout"], where)
    if layout not in ("", *LAYOUTS):
        raise RingstepError(f"{where}: unknown layout {layout!r}{did_you_mean(layout, LAYOUTS)}")
    unit = row.get("unit", "npu")
    if unit not in ("npu", "gpu", "cpu"):
        raise RingstepError(f"{where}: unit is {shown(unit)}, want npu, gpu or cpu")
    counts = {layer.name: layer.count for layer in shape.layers} if shape else {}
    variant = f" ({_text(row['variant'], where)})" if "variant" in row else ""
    context = _whole(row["context"], f"{where}: context")
    recipe = f"{shape.recipe}{variant}" if shape else ""
    subject = Subject(label, recipe, part, counts.get(part, calls), 1, layout, _text(row["precision"], where),
                      context)  # fmt: skip
    # Genie and ExecuTorch run QNN's context binaries too.
    place = Place(_text(table["device"], where), _text(table["chip"], where), "qnn", unit)
    system = _text(table["system"], where)
    job = f"{_text(table['source'], where)}: {_text(row['row'], where)}, {subject.precision}"
    return Profile(subject, place, "published", job, "", (us,), {"system": system}), half, shape


def _time(row: Mapping[str, Any], calls: int, where: str) -> tuple[float, float]:
    """A call's microseconds, and by how much the rounding of the published figure may be off."""
    given = [key for key in ("ms", "tokens_per_second") if key in row]
    if len(given) != 1:
        raise RingstepError(f"{where}: want either ms or tokens_per_second")
    text = row[given[0]]
    if not isinstance(text, str) or not _FIGURE.fullmatch(text) or float(text) <= 0:
        raise RingstepError(f'{where}: {given[0]} is {shown(text)}, want a figure as text, such as "1.689"')
    value, half = float(text), 0.5 * 10.0 ** -len(text.partition(".")[2])
    if given[0] == "ms":
        us, off = value * 1000 / calls, half * 1000 / calls
    else:
        us = 1e6 / value
        off = 1e6 / (value - half) - us
    if not 0 < us <= LONGEST_US:
        raise RingstepError(f"{where}: {us:g} us is out of range")
    return us, off


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RingstepError(f"{where}: expected a table, found {shown(value)}")
    return value


def _keys(value: Any, needed: set[str], optional: set[str], where: str) -> Mapping[str, Any]:
    body = _mapping(value, where)
    for key in body:
        if key not in needed | optional:
            raise RingstepError(f"{where}: unknown key {key!r}{did_you_mean(key, needed | optional)}")
    for key in sorted(needed):
        if key not in body:
            raise RingstepError(f"{where}: {key} is missing")
    return body


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise RingstepError(f"{where}: {shown(value)} is no short line of text")
    return value


def _whole(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 30:
        raise RingstepError(f"{where}: {shown(value)} is no whole number from 1 on")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise RingstepError(f"{where}: {shown(value)} is no positive number")
    return float(value)
