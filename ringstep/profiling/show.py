"""Profiles in the terminal: the list, one in full, two side by side, the gate's verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringstep import console
from ringstep.profiling.gate import Judged
from ringstep.profiling.op_names import place_of
from ringstep.profiling.profile import Op, Profile, shares
from ringstep.profiling.stats import MIN_ITERATIONS, Ratio

SHOWN = 10  # rows of a table of shares; -v and --json have all
_BARS = "▁▂▃▄▅▆▇█"


def described(number: int, profile: Profile) -> dict[str, Any]:
    """A profile for --json: everything, and what is computed from it."""
    figures = {"median_us": profile.median_us, "min_us": profile.min_us, "p95_us": profile.p95_us}
    return {"id": number, **dataclasses.asdict(profile), **figures, "units": profile.units,
            "on_cpu": len(profile.on_cpu), "shares_by": shares_by(profile.ops), "by_type": by_type(profile.ops),
            "by_block": by_block(profile.ops), "by_layer": by_layer(profile.ops)}  # fmt: skip


def by_type(ops: Sequence[Op]) -> dict[str, float]:
    """Shares of the kinds of operation; they sum to 1."""
    return shares(ops, lambda op: op.type)


def by_block(ops: Sequence[Op]) -> dict[str, float]:
    """Shares of the blocks of the layers, all layers together, and of what stands outside of them."""
    return shares(ops, lambda op: place_of(op.name)[1])


def by_layer(ops: Sequence[Op]) -> dict[str, float]:
    """Shares of the layers by number; "" outside of them."""
    return shares(ops, lambda op: "" if (layer := place_of(op.name)[0]) is None else str(layer))


def shares_by(ops: Sequence[Op]) -> str:
    """What the shares are of: "time", or "cycles" where the runtime gives no times, "" where it gives neither."""
    return "time" if any(op.us for op in ops) else "cycles" if any(op.cycles for op in ops) else ""


def ms(us: float | None) -> str:
    """Microseconds as milliseconds with four digits."""
    if us is None:
        return "-"
    value = us / 1e3
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


def ran_on(profile: Profile) -> str:
    """Units in short: "NPU", "NPU+CPU!"; the mark is what fell to the CPU unasked. "?" without operations."""
    units = "+".join(unit for unit in profile.units if unit != "UNSPECIFIED")
    return (units + ("!" if profile.on_cpu else "")) or "?"


def parity(profile: Profile) -> str:
    """The SNR in dB where parity passed, else what is wrong with the latency."""
    if profile.parity == "unchecked":
        return "unchecked"
    snr = "" if profile.snr_db is None else f"{profile.snr_db:.1f}"
    return f"FAILED {snr}".strip() if profile.parity == "failed" else snr


def title(profile: Profile) -> str:
    """What was measured, on one line."""
    s, p = profile.subject, profile.place
    what = f"{s.model} {s.part} {s.precision} {s.layout}".strip()
    return f"{what}, context {s.context}, {s.tokens} token{'s' * (s.tokens != 1)}, on {p.device} ({p.runtime} {p.unit})"


def warn_placement(number: int, profile: Profile) -> None:
    """Say loudly what ran on the CPU although another unit was asked for."""
    if not profile.on_cpu:
        return
    share = shares(profile.ops, lambda op: op.unit).get("CPU", 0.0)
    names = ", ".join(op.name or op.type for op in profile.on_cpu[:3])
    more = f" and {len(profile.on_cpu) - 3} more" if len(profile.on_cpu) > 3 else ""
    of = f" and {100 * share:.1f} % of the {shares_by(profile.ops)}" if shares_by(profile.ops) else ""
    console.warn(f"PROFILE {number} FELL TO THE CPU: {len(profile.on_cpu)} of {len(profile.ops)} operations{of} ran "
                 f"there, though {profile.place.unit.upper()} was asked for: {names}{more}")  # fmt: skip


def print_list(profiles: Mapping[int, Profile]) -> None:
    """A table for each model, place and origin; a figure without iterations has no minimum and p95."""
    groups: dict[str, list[tuple[int, Profile]]] = {}
    for number, profile in profiles.items():
        where = profile.place
        made = "" if profile.origin == "aihub" else f", {_origin(profile)}"
        name = f"{profile.subject.model} on {where.device}, {where.runtime} {where.unit}, ms{made}"
        groups.setdefault(name, []).append((number, profile))
    columns = ["id", "part", "precision", "ctx", "median", "min", "p95", "n", "on", "SNR dB"]
    for name, members in groups.items():
        rows = []
        for number, p in members:
            spread = [ms(p.min_us), ms(p.p95_us)] if len(p.times_us) > 1 else ["-", "-"]
            rows.append([number, _part(p), p.subject.precision, p.subject.context, ms(p.median_us), *spread,
                         len(p.times_us), ran_on(p), parity(p)])  # fmt: skip
        console.table(name, columns, rows)
        if console.settings.verbose:
            print()
            console.table("", ["id", "job", "times in the step", "created"],
                          [[number, p.job, p.subject.count, p.created]
                           for number, p in members])  # fmt: skip
        print()
    for number, profile in profiles.items():
        warn_placement(number, profile)


def print_profile(number: int, profile: Profile) -> None:
    """Everything of one profile."""
    p = profile
    rows: list[tuple[str, object]] = [("job", p.job), ("measured", p.created or "-"), ("origin", _origin(p)),
            ("recipe", p.subject.recipe or "-"), ("times in the step", p.subject.count), ("chip", p.place.chip or "-"),
            ("parity", _parity_words(p))]  # fmt: skip
    if len(p.times_us) > 1:
        rows.append(("median", f"{ms(p.median_us)} ms of {len(p.times_us)} iterations"))
        rows.append(("min, p95", f"{ms(p.min_us)}, {ms(p.p95_us)} ms"))
        rows.append(("in order", f"{sparkline(p.times_us)} ({ms(p.min_us)} to {ms(max(p.times_us))} ms)"))
    else:
        rows.append(("time", f"{ms(p.median_us)} ms, a single figure: its noise is not known"))
    rows.append(("load first, warm", f"{ms(p.first_load_us)}, {ms(p.warm_load_us)} ms"))
    rows.append(("peak memory", _memory(p)))
    rows += [(f"version of {name}", version) for name, version in p.versions.items()]
    console.table(f"{number}: {title(p)}", ["", ""], rows)
    if not p.ops:
        console.line("no operations in it: where it ran is not known")
        return
    of = shares_by(p.ops)
    unit_shares = shares(p.ops, lambda op: op.unit) if of else {}
    print()
    console.table("", ["ran on", "operations", f"% of {of}" if of else ""],
                  [(unit, count, _percent(unit_shares.get(unit))) for unit, count in p.units.items()])  # fmt: skip
    if of:
        _print_shares("kind of operation", of, by_type(p.ops))
        _print_shares("block, of all layers", of, by_block(p.ops))
        layers = by_layer(p.ops)
        if len(layers) > 2:
            _print_shares("layer", of, {layer or "outside": share for layer, share in layers.items()})
    warn_placement(number, p)


def print_comparison(pair: Sequence[tuple[int, Profile]], ratio: Ratio, different: Mapping[str, Any]) -> None:
    """Two profiles side by side and whether they differ."""
    (a_id, a), (b_id, b) = pair
    console.line(f"A is {a_id}: {title(a)}, {a.job}")
    console.line(f"B is {b_id}: {title(b)}, {b.job}")
    if different:
        console.line(f"they differ in {', '.join(different)}")
    for name, p in (("A", a), ("B", b)):
        if p.origin != "aihub":
            console.warn(f"{name} is {_origin(p)}")
        if p.parity != "passed":
            console.warn(f"{name}: parity {p.parity}: its latency may be of a graph that computes wrong")

    def spread(p: Profile, value: float) -> float | None:
        return value if len(p.times_us) > 1 else None

    figures = [("median ms", a.median_us, b.median_us), ("min ms", spread(a, a.min_us), spread(b, b.min_us)),
               ("p95 ms", spread(a, a.p95_us), spread(b, b.p95_us)),
               ("first load ms", a.first_load_us, b.first_load_us), ("warm load ms", a.warm_load_us, b.warm_load_us)]
    rows: list[list[object]] = [[name, ms(x), ms(y), f"{y / x:.3f}" if x and y else "-"] for name, x, y in figures]
    rows.insert(3, ["iterations", len(a.times_us), len(b.times_us), ""])
    rows += [["peak memory", _memory(a), _memory(b), ""], ["ran on", ran_on(a), ran_on(b), ""],
             ["SNR dB", parity(a), parity(b), ""], ["origin", a.origin, b.origin, ""]]  # fmt: skip
    console.table("", ["", "A", "B", "B/A"], rows)
    if a.ops and b.ops and shares_by(a.ops) and shares_by(b.ops):
        left, right = by_type(a.ops), by_type(b.ops)
        kinds = sorted({*left, *right}, key=lambda kind: -max(left.get(kind, 0), right.get(kind, 0)))
        kinds = kinds if console.settings.verbose else kinds[:SHOWN]
        shared = [(kind, _percent(left.get(kind, 0.0)), _percent(right.get(kind, 0.0))) for kind in kinds]
        columns = ["kind of operation", f"A, % of {shares_by(a.ops)}", f"B, % of {shares_by(b.ops)}"]
        print()
        console.table("", columns, shared)
    print()
    console.line(difference(ratio, (len(a.times_us), len(b.times_us))))
    for number, profile in pair:
        warn_placement(number, profile)


def difference(ratio: Ratio, counts: tuple[int, int]) -> str:
    """What the ratio of B's median to A's comes to, in a sentence."""
    change = f"B's median is {ratio.value:.3f} of A's"
    if ratio.low is None or ratio.high is None:
        few = f"{min(counts)} iteration{'s' * (min(counts) != 1)} on a side, fewer than {MIN_ITERATIONS}"
        return f"{change}; no interval: {few}, so whether that is noise cannot be said"
    interval = f"95 % interval {ratio.low:.3f} to {ratio.high:.3f}"
    if ratio.low <= 1 <= ratio.high:
        return f"no difference beyond noise: {change}, {interval}"
    return f"B is {'slower' if ratio.value > 1 else 'faster'}: {change}, {interval}"


def print_judged(judged: Sequence[Judged], max_rise: float) -> None:
    """The gate's table."""
    rows = []
    for one in judged:
        s, p = one.baseline.subject, one.baseline.place
        interval = "" if not one.ratio or one.ratio.low is None else f"{one.ratio.low:.3f} to {one.ratio.high:.3f}"
        measured = one.now if one.ratio else None
        rows.append((one.verdict.upper() if one.verdict in ("slower", "parity failed") else one.verdict,
                     f"{s.model} {_part(one.baseline)} {s.precision} {s.context}, {p.device} {p.unit}"
                     + (f": {one.note}" if one.note else ""),
                     ms(one.baseline.median_us), ms(measured.median_us) if measured else "-",
                     f"{one.ratio.value:.3f}" if one.ratio else "-", interval or "-"))  # fmt: skip
    console.table(f"Medians in ms, a rise of {max_rise:g} % allowed",
                  ["", "graph and device", "before", "now", "ratio", "95 % interval"], rows)  # fmt: skip


def sparkline(times: Sequence[float], width: int = 40) -> str:
    """Times as bars in the order of running, each the mean of its share of them; the lowest is the least time."""
    low, high = min(times), max(times)
    means = [float(part.mean()) for part in np.array_split(np.asarray(times), min(width, len(times)))]
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / (high - low or 1.0) * top)] for value in means)


def _origin(profile: Profile) -> str:
    return {"aihub": "aihub: measured on the device", "published": "published: measured by others",
            "synthetic": "synthetic: made up, no measurement"}[profile.origin]  # fmt: skip


def _parity_words(profile: Profile) -> str:
    if profile.parity == "passed":
        return f"passed, {parity(profile)} dB"
    if profile.parity == "unchecked":
        return "unchecked: this latency may be of a graph that computes wrong"
    found = "no output to compare" if profile.snr_db is None else f"{profile.snr_db:.1f} dB"
    return f"FAILED, {found}: this latency is of a graph that computes wrong"


def _part(profile: Profile) -> str:
    s = profile.subject
    return f"{s.part} {s.layout}".strip() + (f", {s.tokens} tokens" if s.tokens > 1 else "")


def _memory(profile: Profile) -> str:
    if profile.peak_bytes is None:
        return "-"
    low, high = map(console.human_bytes, profile.peak_bytes)
    return low if low == high else f"{low} to {high}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _print_shares(name: str, of: str, found: Mapping[str, float]) -> None:
    items = list(found.items())
    if not console.settings.verbose and len(items) > SHOWN:
        rest = items[SHOWN:]
        items = [*items[:SHOWN], (f"{len(rest)} more (-v shows all)", sum(share for _, share in rest))]
    print()
    console.table("", [name, f"% of {of}"], [(label, _percent(share)) for label, share in items])
