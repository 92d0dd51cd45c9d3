"""The regression gate: has a phone become slower than the baseline by more than the noise of its iterations?

A baseline is a file of profiles without their operations. The newest profile of the same subject at the same place is
judged against it: it is slower when even the lower bound of the ratio's 95 % interval exceeds 1 + the rise allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ringstep.errors import RingstepError
from ringstep.files import new_file
from ringstep.profiling.checks import moment
from ringstep.profiling.exchange import read_file, to_json
from ringstep.profiling.profile import Place, Profile, Subject
from ringstep.profiling.stats import MIN_ITERATIONS, Ratio, median_ratio

Verdict = Literal["slower", "parity failed", "unclear", "same", "faster", "not measured"]
FAILING: tuple[Verdict, ...] = ("slower", "parity failed")
Key = tuple[Subject, Place]


@dataclass(frozen=True)
class Judged:
    """One entry of the baseline.

    "unclear" is a rise that may exceed what is allowed, or may be noise; "faster" lies below 1 with its whole interval.
    """

    verdict: Verdict
    baseline: Profile
    now: Profile | None
    ratio: Ratio | None
    """Median now over the baseline's."""
    note: str = ""


def judge(baseline: Sequence[Profile], found: Iterable[Profile], max_rise: float) -> list[Judged]:
    """Judge the newest profiles of phones among `found`, in the baseline's order; `max_rise` in percent.

    A profile that is the baseline's own, or older than it, is no new measurement.
    """
    newest = newest_of(found)
    return [_judge(entry, newest.get((entry.subject, entry.place)), max_rise) for entry in baseline]


def passed(judged: Sequence[Judged], every: bool = False) -> bool:
    """Whether nothing failed and something was judged at all; with `every`, each entry."""
    measured = [one.verdict != "not measured" for one in judged]
    return not any(one.verdict in FAILING for one in judged) and (all(measured) if every else any(measured))


def newest_of(profiles: Iterable[Profile]) -> dict[Key, Profile]:
    """The latest measurement of each subject and place; published and synthetic figures are none."""
    phones = [profile for profile in profiles if profile.origin == "aihub"]
    return {(p.subject, p.place): p for p in sorted(phones, key=lambda p: moment(p.created))}


def read_baseline(path: Path) -> list[Profile]:
    """The baseline's profiles. Raises RingstepError without it, and for entries that no phone has measured."""
    if not path.exists():
        raise RingstepError(f"{path} is not there: `ringstep profiles gate --update-baseline` makes a baseline of the "
                            "newest profiles")  # fmt: skip
    profiles = read_file(path)
    keys: set[Key] = set()
    for profile in profiles:
        _require_phone(profile, f"{path}: {profile.job}")
        if (key := (profile.subject, profile.place)) in keys:
            raise RingstepError(f"{path}: {profile.job}: a second entry for the same graph and device")
        keys.add(key)
    if not profiles:
        raise RingstepError(f"{path} has no entries: `ringstep profiles gate --update-baseline` adds them")
    return profiles


def updated(baseline: Sequence[Profile], found: Iterable[Profile]) -> list[Profile]:
    """The baseline with the newest profiles in place of theirs, and those of its entries that have none.

    Raises RingstepError where there is nothing to take, and for a newest profile whose parity failed.
    """
    newest = newest_of(found)
    if not newest:
        raise RingstepError("no profile of a phone to make a baseline of; synthetic and published figures are none")
    for profile in newest.values():
        _require_phone(profile, f"job {profile.job}")
    old: Mapping[Key, Profile] = {(p.subject, p.place): p for p in baseline}
    later = {key: p for key, p in newest.items() if key not in old or moment(p.created) >= moment(old[key].created)}
    return [dataclasses.replace(profile, ops=()) for profile in {**old, **later}.values()]


def write_baseline(path: Path, profiles: Sequence[Profile]) -> None:
    """Write a baseline, all or nothing. Raises RingstepError."""
    with new_file(path) as file:
        file.write(to_json(profiles).encode())


def _judge(baseline: Profile, now: Profile | None, max_rise: float) -> Judged:
    if now is None:
        return Judged("not measured", baseline, None, None, "no profile in the store")
    if now.job == baseline.job or moment(now.created) < moment(baseline.created):
        return Judged("not measured", baseline, now, None, "nothing newer than the baseline")
    ratio, limit = median_ratio(baseline.times_us, now.times_us), 1 + max_rise / 100
    if now.parity == "failed":
        return Judged("parity failed", baseline, now, ratio, snr(now))
    notes = ["parity unchecked"] if now.parity == "unchecked" else []
    if now.on_cpu:
        notes.append(f"{len(now.on_cpu)} operations on the CPU")
    if ratio.low is None or ratio.high is None:
        few = min(len(baseline.times_us), len(now.times_us))
        notes.insert(0, f"cannot judge the noise of {few} iterations (want {MIN_ITERATIONS}): plain ratio")
        verdict: Verdict = "slower" if ratio.value > limit else "unclear"
    elif ratio.low > limit:
        verdict = "slower"
    else:
        verdict = "unclear" if ratio.high > limit else "faster" if ratio.high < 1 else "same"
    return Judged(verdict, baseline, now, ratio, "; ".join(notes))


def snr(profile: Profile) -> str:
    """The SNR in words."""
    return "no output to compare" if profile.snr_db is None else f"{profile.snr_db:.1f} dB"


def _require_phone(profile: Profile, where: str) -> None:
    if profile.origin != "aihub":
        raise RingstepError(f"{where}: {profile.origin} figures are no baseline: only a phone's profile is")
    if profile.parity == "failed":
        raise RingstepError(f"{where}: parity failed ({snr(profile)}): what computes wrong is no baseline")
