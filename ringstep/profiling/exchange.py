"""Profiles as files: JSON that loses nothing, CSV for spreadsheets, and AI Hub's own profile JSON coming in.

Files come from anywhere: one is read whole or refused in one line.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringstep.contract import build, shown
from ringstep.devices import find_device
from ringstep.errors import RingstepError
from ringstep.files import read_small
from ringstep.profiling.checks import checked
from ringstep.profiling.profile import Place, Profile, Subject, read_profile
from ringstep.tensor_file import parse_json

FORMAT = "ringstep-profiles"
VERSION = 1
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets take for the beginning of a formula


def to_json(profiles: Sequence[Profile]) -> str:
    """Profiles as JSON that `read_file` reads back to equal ones."""
    body = {"format": FORMAT, "version": VERSION, "profiles": [dataclasses.asdict(p) for p in profiles]}
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def to_csv(profiles: Mapping[int, Profile]) -> str:
    """A row a profile: figures in ms, MB and dB; iterations and operations are in the JSON alone."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rows = [_row(number, profile) for number, profile in profiles.items()]
    writer.writerow(_HEADER)
    writer.writerows([[_cell(value) for value in row] for row in rows])
    return out.getvalue()


def read_file(path: Path, described: Mapping[str, Any] | None = None) -> list[Profile]:
    """Profiles of a file: our JSON, or AI Hub's (as its client's download_profile writes) with what `described` says.

    `described` has the fields of Subject, `device`, `runtime`, `unit` and `job` by name, None where nothing was said.
    Raises RingstepError for anything else, and for a profile that is no measurement.
    """
    raw = read_small(path)
    body = parse_json(raw, str(path))
    said = {name: value for name, value in (described or {}).items() if value is not None}
    if body.get("format") == FORMAT:
        if said:
            raise RingstepError(f"{path} says itself what was measured: leave out --{', --'.join(said)}")
        return parse(body, str(path))
    if "execution_summary" in body:
        return [_from_aihub(body, path, said, hashlib.sha256(raw).hexdigest()[:12])]
    raise RingstepError(f"{path} holds no profiles: want a file of `ringstep profiles export json`, or AI Hub's JSON "
                        "with execution_summary")  # fmt: skip


def parse(body: Mapping[str, Any], where: str) -> list[Profile]:
    """Profiles of decoded JSON. Raises RingstepError naming the first bad field."""
    unknown = set(body) - {"format", "version", "profiles"}
    if body.get("format") != FORMAT or unknown:
        raise RingstepError(f"{where} is no file of profiles{f': unknown field {min(unknown)!r}' if unknown else ''}")
    if type(body.get("version")) is not int or body["version"] != VERSION:
        raise RingstepError(f"{where}: version {shown(body.get('version'))}, this ringstep reads {VERSION}")
    profiles = build(tuple[Profile, ...], body.get("profiles"), f"{where}: profiles")
    return [checked(profile, f"{where}: profiles[{index}]") for index, profile in enumerate(profiles)]


def _from_aihub(body: Mapping[str, Any], path: Path, said: Mapping[str, Any], digest: str) -> Profile:
    given = {"tokens": 1, "runtime": "qnn", "unit": "npu", "job": f"file-{digest}", **said}
    if given.get("part") in ("step", "head"):
        given.setdefault("count", 1)
    if given.get("part") == "head":
        given.setdefault("layout", "")
    names = [field.name for field in dataclasses.fields(Subject)]
    missing = [name for name in (*names, "device") if name not in given]
    if missing:
        raise RingstepError(f"{path} is AI Hub's profile, which does not say what was measured: add "
                            f"--{', --'.join(missing)}")  # fmt: skip
    device = find_device(given["device"])
    if given["device"].casefold() in (device.chip.name.casefold(), device.chip.marketing.casefold()):
        raise RingstepError(f"--device {given['device']} is a chip: name the phone that it was measured on")
    place = Place(device.id, device.chip.name, given["runtime"], given["unit"])
    # The file has no date, so it counts as measured when it came in.
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    profile = Profile(Subject(**{name: given[name] for name in names}), place, "aihub", given["job"], now,
                      **read_profile(body, str(path)))  # fmt: skip
    return checked(profile, str(path))


_HEADER = ("id", "model", "recipe", "part", "count", "tokens", "layout", "precision", "context", "device", "chip",
           "runtime", "unit", "median_ms", "min_ms", "p95_ms", "iterations", "first_load_ms", "warm_load_ms",
           "peak_low_mb", "peak_high_mb", "npu_ops", "gpu_ops", "cpu_ops", "snr_db", "parity", "origin", "job",
           "created")  # fmt: skip


def _row(number: int, p: Profile) -> tuple[Any, ...]:
    low, high = p.peak_bytes or (None, None)
    times = [_scaled(value, 1e3) for value in (p.median_us, p.min_us, p.p95_us)]
    loads = [_scaled(value, 1e3) for value in (p.first_load_us, p.warm_load_us)]
    units = [p.units.get(unit, 0) if p.ops else None for unit in ("NPU", "GPU", "CPU")]
    return (number, *dataclasses.astuple(p.subject), *dataclasses.astuple(p.place), *times, len(p.times_us), *loads,
            _scaled(low, 1e6), _scaled(high, 1e6), *units, p.snr_db, p.parity, p.origin, p.job, p.created)  # fmt: skip


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _cell(value: Any) -> Any:
    # A number may begin with a minus, a name may not.
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
