"""What a profile must be to count as a measurement, wherever it comes from."""

from __future__ import annotations

import datetime
import math

from ringstep.contract import INT64_MAX, shown
from ringstep.errors import RingstepError
from ringstep.profiling.profile import LONGEST_US, MAX_OPS, UNITS, Profile, read_times

SHORTEST_US = 1.0
"""The service's clock counts microseconds."""
RUNTIMES = ("qnn", "onnx", "tflite")
TARGETS = ("npu", "gpu", "cpu")
MAX_NAME = 300


def checked(profile: Profile, where: str) -> Profile:
    """The profile, or RingstepError (which `where` opens) for one that no phone can have made."""
    p, s = profile, profile.subject

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise RingstepError(f"{where}: {message}")

    for holder in (s, p.place):
        for name, text in vars(holder).items():
            if isinstance(text, str):
                _text(text, f"{where}: {name}", empty=name in ("recipe", "layout", "chip"))
    _text(p.job, f"{where}: job")
    for key, text in p.versions.items():
        _text(key, f"{where}: versions")
        _text(text, f"{where}: versions: {key}", empty=True)
    for name, least_count in (("count", 1), ("tokens", 1), ("context", 0)):
        value = getattr(s, name)
        require(least_count <= value <= INT64_MAX, f"{name} is {shown(value)}, want {least_count} or more")
    require(p.place.runtime in RUNTIMES, f"runtime {shown(p.place.runtime)} is none of {', '.join(RUNTIMES)}")
    require(p.place.unit in TARGETS, f"unit {shown(p.place.unit)} is none of {', '.join(TARGETS)}")
    require(p.origin in ("aihub", "published", "synthetic"), f"origin {shown(p.origin)} is unknown")
    least = min(read_times(p.times_us, f"{where}: times_us"))
    require(least >= SHORTEST_US, f"times_us: a time of {least:g} us: no measurement")
    for name in ("first_load_us", "warm_load_us"):
        load = getattr(p, name)
        require(load is None or 0 < load <= LONGEST_US, f"{name}: {shown(load)} is no time")
    if p.peak_bytes is not None:
        low, high = p.peak_bytes
        require(0 <= low <= high <= INT64_MAX, f"peak_bytes: {low} to {high} are no bounds")
    # Outputs that cannot be compared at all fail without an SNR.
    fits = p.parity == "failed" or (p.parity == "unchecked") == (p.snr_db is None)
    require(fits, f"parity is {p.parity}, snr_db {shown(p.snr_db)}")
    require(p.snr_db is None or math.isfinite(p.snr_db), f"snr_db: {shown(p.snr_db)} is no number")
    _created(p, where)
    _ops(p, where)
    return p


def moment(created: str) -> datetime.datetime:
    """The date of a profile to sort by; those without come first."""
    if not created:
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)
    when = datetime.datetime.fromisoformat(created)
    return when.astimezone(datetime.UTC) if when.tzinfo else when.replace(tzinfo=datetime.UTC)


def _created(profile: Profile, where: str) -> None:
    created = profile.created
    try:
        when = moment(created)
    except (ValueError, OverflowError):
        raise RingstepError(f"{where}: created: {shown(created)} is no date (want 2026-01-31T12:00:00Z)") from None
    if not created and profile.origin != "published":
        raise RingstepError(f"{where}: created: a measurement without a date")
    # A date to come would count as the newest measurement for ever.
    if when > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1):
        raise RingstepError(f"{where}: created: {shown(created)} is yet to come")


def _ops(profile: Profile, where: str) -> None:
    if len(profile.ops) > MAX_OPS:
        raise RingstepError(f"{where}: {len(profile.ops)} operations, at most {MAX_OPS} are kept")
    for index, op in enumerate(profile.ops):
        plain = type(op.name) is type(op.type) is str and type(op.us) is float and type(op.cycles) is int
        if not plain or op.unit not in UNITS or not 0 <= op.us <= LONGEST_US or not 0 <= op.cycles <= INT64_MAX:
            raise RingstepError(f"{where}: ops[{index}] is no operation: name, type, unit, us, cycles")
    if not _encodable("".join(f"{op.name}{op.type}" for op in profile.ops)):
        raise RingstepError(f"{where}: ops: a name that is no text")


def _text(text: str, where: str, empty: bool = False) -> None:
    if not (text or empty) or len(text) > MAX_NAME or not _encodable(text) or not text.isprintable():
        raise RingstepError(f"{where}: {shown(text)} is no name (printable, at most {MAX_NAME} characters)")


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
        return True
    except UnicodeEncodeError:
        return False
