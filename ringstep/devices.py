"""Phones and chips as data: what each one's tensor processor can take. The data is in devices.toml."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ringstep.errors import RingstepError, did_you_mean

_TOML = Path(__file__).with_name("devices.toml")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Chip:
    """A system on chip and the limits of its tensor processor (HTP)."""

    name: str
    """Part name in lower case, such as sm8750."""
    marketing: str
    """Name it is sold under, such as Snapdragon 8 Elite."""
    soc_model: int
    """Id that Qualcomm's compiler takes as `soc_model`."""
    htp_arch: str
    """Architecture of the tensor processor: v68 to v81."""
    vtcm_mb: int
    """On-chip memory of the tensor processor, in MiB."""
    fp16: bool
    """Runs float16 graphs."""
    float_io: bool
    """Accepts float tensors as graph inputs and outputs."""
    layernorm_16x16: bool
    """Has a LayerNorm of 16-bit activations and 16-bit weights."""
    lpbq: bool
    """Keeps int4 weights in blocks with two-level scales."""
    weight_sharing: bool
    """Holds one copy of the weights for several graphs of one context binary."""
    graph_limit_mb: int = 2048
    """What one graph may allocate, in MiB."""

    @property
    def arch(self) -> int:
        """The architecture as a number: 79 for v79."""
        return int(self.htp_arch[1:])


@dataclass(frozen=True)
class Device:
    """A phone or board."""

    id: str
    """Name on the command line, such as galaxy-s25."""
    name: str
    """Name it is sold under."""
    chip: Chip
    aihub: str = ""
    """Exact name in Qualcomm AI Hub; empty where AI Hub does not offer it."""
    attributes: tuple[str, ...] = ()
    """AI Hub's attributes of the device that say what runs on it, such as hexagon:v79."""
    memory_gb: int = 0
    """RAM in GB, the least of a family's; 0 where no single figure is published."""


def load_devices(path: Path = _TOML) -> dict[str, Device]:
    """Return every known device by id, in the file's order.

    Raises RingstepError for a missing file, bad TOML, an unknown or missing key, a wrong type or chip.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RingstepError(f"{path.name}: {error}") from error
    _refuse_unknown(data, ("chip", "device"), path.name)
    chips = {}
    for name, keys in _tables(data, "chip", path.name):
        chip = _build(Chip, {"name": name}, keys, f"{path.name}: chip.{name}")
        if not re.fullmatch(r"v\d\d", chip.htp_arch):
            raise RingstepError(f"{path.name}: chip.{name}: htp_arch is {chip.htp_arch!r}, want v79 or such")
        chips[name] = chip
    devices = {}
    for ident, keys in _tables(data, "device", path.name):
        where, chip_name = f"{path.name}: device.{ident}", keys.pop("chip", None)
        if not isinstance(chip_name, str) or chip_name not in chips:
            raise RingstepError(f"{where}: unknown chip {chip_name!r}{did_you_mean(str(chip_name), chips)}")
        devices[ident] = _build(Device, {"id": ident, "chip": chips[chip_name]}, keys, where)
    return devices


def find_device(name: str) -> Device:
    """Return the device of that name, in any case: its id, name, AI Hub name, or its chip's names.

    A chip stands for the first device that carries it. Raises RingstepError for an unknown name.
    """
    devices = list(load_devices().values())
    names = [(alias, device) for device in devices for alias in (device.id, device.name, device.aihub)]
    names += [(alias, device) for device in devices for alias in (device.chip.name, device.chip.marketing)]
    known: dict[str, Device] = {}
    for alias, device in names:
        if alias:
            known.setdefault(alias.casefold(), device)
    wanted = " ".join(name.split()).casefold()
    if wanted not in known:
        raise RingstepError(
            f"unknown device {name!r}{did_you_mean(wanted, known)}; `ringstep devices` lists them"
        )
    return known[wanted]


def _tables(data: dict[str, Any], key: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    tables = data.get(key)
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise RingstepError(f"{where}: [{key}.NAME] tables are missing or malformed")
    return list(tables.items())


def _refuse_unknown(keys: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in keys:
        if key not in known:
            raise RingstepError(f"{where}: unknown key {key!r}{did_you_mean(key, known)}")


def _build(kind: type[_T], given: dict[str, Any], keys: dict[str, Any], where: str) -> _T:
    every = dataclasses.fields(kind)  # type: ignore[arg-type]
    fields = {field.name: field for field in every if field.name not in given}
    types = get_type_hints(kind)
    _refuse_unknown(keys, tuple(fields), where)
    for name, field in fields.items():
        if name not in keys:
            if field.default is dataclasses.MISSING:
                raise RingstepError(f"{where}: {name} is missing")
        elif types[name] == tuple[str, ...]:
            keys[name] = _strings(keys[name], f"{where}: {name}")
        elif type(keys[name]) is not types[name]:  # bool is an int to isinstance
            got = type(keys[name]).__name__
            raise RingstepError(f"{where}: {name} must be {types[name].__name__}, got {got}")
    return kind(**given, **keys)


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RingstepError(f"{where} must be a list of strings")
    return tuple(value)
