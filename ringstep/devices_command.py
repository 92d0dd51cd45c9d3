"""`ringstep devices`: the device table, and where it differs from what Qualcomm AI Hub offers today."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import click

from ringstep import console
from ringstep.devices import Chip, Device, load_devices
from ringstep.options import as_json, common

# What the table records of AI Hub's attributes; those of systems, formats and other frameworks stay out of it.
KEYS = ("chipset", "hexagon", "soc-model", "htp-supports-fp16", "htp-supports-weight-sharing")
QNN = "framework:qnn"
OLDEST_ARCH = 68
FAMILY = " (Family)"

Listed = tuple[str, str, Sequence[str]]
"""Name, operating system's version and attributes of a device as AI Hub lists it."""


@dataclass(frozen=True)
class New:
    """A device that the table lacks."""

    name: str
    attributes: tuple[str, ...]
    chip: str
    """Its chip's name in the table; empty for a chip that the table lacks too."""


@dataclass(frozen=True)
class Changed:
    """A device whose attributes differ."""

    id: str
    aihub: str
    missing: tuple[str, ...]
    """What AI Hub gives and the table lacks."""
    wrong: tuple[str, ...]
    """What the table has and AI Hub does not give."""


@dataclass(frozen=True)
class Differences:
    """Between the table and AI Hub's list."""

    new: list[New]
    retired: list[str]
    """Ids of devices that AI Hub no longer has under their name."""
    changed: list[Changed]
    others: int
    """Devices that the table lacks and that have no HTP of v68 or newer."""


@click.command(short_help="List phones and chips.")
@click.option("--refresh", is_flag=True, help="Compare the table with AI Hub's list; changes nothing.")
@as_json
@common
def devices(refresh: bool, json_: bool) -> int:
    """List phones and chips: tensor processor, its on-chip memory (VTCM, MiB), RAM (GB), name in Qualcomm AI Hub."""
    found = load_devices()
    if refresh:
        with console.progress("asking AI Hub for its devices"):
            live = listed()
        differences = compare(found, live)
        if json_:
            console.print_json({"listed": len(live), "differences": differences, "toml": toml(differences.new)})
        else:
            print_differences(differences, len(live))
    elif json_:
        console.print_json(list(found.values()))
    else:
        print_devices(list(found.values()))
    return 0


def listed() -> list[Listed]:
    """What AI Hub lists now, through its client. Raises RingstepError: not installed, not configured, not reached."""
    from ringstep.profiling import hub

    client = hub.open_client()
    with hub.translated("AI Hub's list of devices"):
        return [(device.name, device.os, _attributes(device.attributes)) for device in client.get_devices()]


def compare(known: dict[str, Device], live: Sequence[Listed]) -> Differences:
    """Compare the table with AI Hub's list. Of a name with several systems the last listed counts."""
    theirs = {name: tuple(attributes) for name, _, attributes in live}
    ours = {device.aihub: device for device in known.values() if device.aihub}
    new, others = [], 0
    for name, attributes in sorted(theirs.items()):
        if name in ours or _in_family(name, attributes, known.values()):
            continue
        if _arch(attributes) < OLDEST_ARCH:
            others += 1
            continue
        chip = chip_of(attributes, known.values())
        new.append(New(name, _recorded(attributes), chip.name if chip else ""))
    changed = []
    for name, device in ours.items():
        want, have = set(_recorded(theirs.get(name, device.attributes))), set(device.attributes)
        if want != have:
            missing, wrong = tuple(sorted(want - have)), tuple(sorted(have - want))
            changed.append(Changed(device.id, name, missing, wrong))
    return Differences(new, [device.id for name, device in ours.items() if name not in theirs], changed, others)


def chip_of(attributes: Sequence[str], known: Collection[Device]) -> Chip | None:
    """The table's chip of a device with these attributes.

    A chipset must name the chip, or be that of a device which carries it, and architecture and soc_model must agree:
    a soc_model alone stands for several parts.
    """
    chipsets = _values(attributes, "chipset")
    for device in known:
        chip = device.chip
        same_part = chipsets & ({chip.name, f"qualcomm-{chip.name}"} | _values(device.attributes, "chipset"))
        same_arch = _values(attributes, "hexagon") == {chip.htp_arch}
        if same_part and same_arch and _values(attributes, "soc-model") == {str(chip.soc_model)}:
            return chip
    return None


def toml(new: Sequence[New]) -> str:
    """Entries for devices.toml, of the devices whose chip the table has."""
    entries = []
    for device in new:
        if device.chip:
            ident = re.sub(r"[^a-z0-9]+", "-", device.name.removesuffix(FAMILY).lower()).strip("-") or "device"
            lines = [f"[device.{ident}]", f"name = {_quoted(device.name.removesuffix(FAMILY))}",
                     f"chip = {_quoted(device.chip)}", f"aihub = {_quoted(device.name)}", "attributes = [",
                     *(f"  {_quoted(attribute)}," for attribute in device.attributes), "]"]  # fmt: skip
            entries.append("\n".join(lines))
    return "\n\n".join(entries)


def print_devices(found: Sequence[Device]) -> None:
    """The table."""
    rows = [(d.id, d.chip.name, d.chip.htp_arch, _yes(d.chip.fp16), _yes(d.chip.weight_sharing), d.chip.vtcm_mb,
             d.memory_gb or "-", d.aihub) for d in found]  # fmt: skip
    console.table("", ["device", "chip", "HTP", "fp16", "shares", "VTCM", "RAM", "in AI Hub"], rows)
    console.line("VTCM in MiB, RAM in GB; shares: several graphs may hold their weights once")


def print_differences(found: Differences, count: int) -> None:
    """Tables of what differs, and entries to paste into devices.toml."""
    if found.new:
        rows = [(d.name, d.chip or "not in the table", " ".join(sorted(_values(d.attributes, "hexagon"))),
                 " ".join(sorted(_values(d.attributes, "soc-model")))) for d in found.new]  # fmt: skip
        console.table("in AI Hub, not in the table", ["device", "chip", "HTP", "soc_model"], rows)
    if found.retired:
        known = load_devices()
        console.table("no longer in AI Hub", ["device", "its name was"], [(i, known[i].aihub) for i in found.retired])
    if found.changed:
        differing = [(c.id, " ".join(c.wrong), " ".join(c.missing)) for c in found.changed]
        console.table("differing attributes", ["device", "in the table", "in AI Hub"], differing)
    snippet = toml(found.new)
    if snippet:
        console.line("to add to ringstep/devices.toml:")
        print(f"\n{snippet}\n")
    counts = (f"{len(found.new)} new", f"{len(found.retired)} retired", f"{len(found.changed)} changed")
    console.line(f"AI Hub lists {count} devices: {', '.join(counts)}; {found.others} have no HTP of v68 or newer")


def _attributes(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _values(attributes: Sequence[str], key: str) -> set[str]:
    return {value for name, _, value in (attribute.partition(":") for attribute in attributes) if name == key}


def _recorded(attributes: Sequence[str]) -> tuple[str, ...]:
    return tuple(a for a in dict.fromkeys(attributes) if a.partition(":")[0] in KEYS or a == QNN)


def _arch(attributes: Sequence[str]) -> int:
    found = [re.fullmatch(r"v(\d{1,4})", value, re.ASCII) for value in _values(attributes, "hexagon")]
    return max((int(match[1]) for match in found if match), default=0)


def _in_family(name: str, attributes: Sequence[str], known: Collection[Device]) -> bool:
    """Whether this is a model of a family that the table has, with the family's chip: S24+ of S24 (Family)."""
    for device in known:
        base = device.aihub.removesuffix(FAMILY)
        if device.aihub.endswith(FAMILY) and re.match(re.escape(base) + r"(\W|$)", name):
            return bool(_values(attributes, "chipset") & _values(device.attributes, "chipset"))
    return False


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's; what could move a terminal's cursor is gone before.
    return json.dumps("".join(c if c.isprintable() else " " for c in text), ensure_ascii=False)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
