"""`ringstep profiles`: what the store holds, compared, exported, imported, and gated."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import click

from ringstep import completion, console
from ringstep.options import as_json, common

DB = Path("artifacts/profiles.db")
BASELINE = Path("artifacts/baselines/profiles.json")
db_option = click.option("--db", type=click.Path(path_type=Path), default=DB, show_default=True, metavar="PATH",
                         help="The profile store.")  # fmt: skip


def percent(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """A finite number, not below 0: every comparison with NaN would pass."""
    if not math.isfinite(value) or value < 0:
        raise click.BadParameter(f"{value:g} is no rise in percent, such as 5")
    return value


@click.group()
def profiles() -> None:
    """What phones measured: list, show, compare, export, import, gate."""


@profiles.command("list")
@click.option("--model", metavar="NAME", help="Only of this model.")
@click.option("--device", metavar="NAME", shell_complete=completion.device, help="Only on this device, or chip.")
@click.option("--precision", metavar="NAME", help="Only of this precision, such as w4a16.")
@click.option("--part", metavar="NAME", help="Only step, head, or a kind of layer such as sliding.")
@click.option("--context", type=click.IntRange(0), help="Only at this context.")
@click.option("--unit", type=click.Choice(["npu", "gpu", "cpu"]), help="Only where this unit was asked for.")
@db_option
@as_json
@common
def list_(db: Path, json_: bool, **filters: Any) -> int:
    """List profiles by model and device; -v adds jobs, layouts and dates."""
    from ringstep.profiling import show, store

    with store.open_store(db) as opened:
        found = store.numbered(opened, **filters)
    if json_:
        rows = [show.described(number, profile) for number, profile in found.items()]
        big = ("ops", "times_us", "by_type", "by_block", "by_layer")
        console.print_json([{key: value for key, value in row.items() if key not in big}
                            | {"iterations": len(row["times_us"])} for row in rows])  # fmt: skip
    elif found:
        show.print_list(found)
    else:
        wanted = ", ".join(f"--{name} {value}" for name, value in filters.items() if value is not None)
        missing = "is not there yet: `ringstep profile` and `ringstep profiles import` make it"
        if not db.exists():
            console.line(f"{db} {missing}")
        else:
            console.line(f"no profile in {db} matches {wanted}" if wanted else f"{db} is empty")
    return 0


@profiles.command("show")
@click.argument("ref")
@db_option
@as_json
@common
def show_(ref: str, db: Path, json_: bool) -> int:
    """Show all of the profile REF: its number, or its job id (the beginning will do)."""
    from ringstep.profiling import show, store

    with store.open_store(db) as opened:
        number = store.find_id(opened, ref)
        profile = store.get(opened, number)
    if json_:
        console.print_json(show.described(number, profile))
    else:
        show.print_profile(number, profile)
    return 0


@profiles.command()
@click.argument("a")
@click.argument("b")
@db_option
@as_json
@common
def compare(a: str, b: str, db: Path, json_: bool) -> int:
    """Compare the profiles A and B: is B slower or faster than A beyond the noise of their iterations?"""
    from ringstep.profiling import show, stats, store

    with store.open_store(db) as opened:
        pair = [(number, store.get(opened, number)) for number in (store.find_id(opened, ref) for ref in (a, b))]
    left, right = (dataclasses.asdict(p.subject) | dataclasses.asdict(p.place) for _, p in pair)
    different = {key: [left[key], right[key]] for key in left if left[key] != right[key]}
    (_, first), (_, second) = pair
    ratio = stats.median_ratio(first.times_us, second.times_us)
    if json_:
        both = {name: show.described(number, profile) for name, (number, profile) in zip("ab", pair, strict=True)}
        noise = ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high
        console.print_json({"ratio": ratio, "within_noise": None if ratio.low is None else noise,
                            "different": different, **both})  # fmt: skip
    else:
        show.print_comparison(pair, ratio, different)
    return 0


@profiles.command()
@click.argument("form", type=click.Choice(["csv", "json"]))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Default: stdout.")
@db_option
@as_json
@common
def export(form: str, out: Path | None, db: Path, json_: bool) -> int:
    """Write all profiles: csv has a row of figures each, json has all that there is and can be imported."""
    from ringstep.errors import RingstepError
    from ringstep.files import new_file
    from ringstep.profiling import exchange, store

    if json_ and out is None:
        raise RingstepError("--json says what was written to a file: add --out FILE, or `export json` without it")
    with store.open_store(db) as opened:
        found = store.numbered(opened)
    text = exchange.to_csv(found) if form == "csv" else exchange.to_json(list(found.values()))
    if out is None:
        sys.stdout.write(text)
        return 0
    with new_file(out) as file:
        file.write(text.encode())
    if json_:
        console.print_json({"profiles": len(found), "file": str(out)})
    else:
        console.line(f"{len(found)} profile{'s' * (len(found) != 1)} in {out}")
    return 0


@profiles.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", metavar="NAME", help="Of AI Hub's JSON, with the next ones: what was measured.")
@click.option("--recipe", metavar="NAME", help="Architecture, such as spark2_5.")
@click.option("--part", metavar="NAME", help="step, head, or a kind of layer such as sliding.")
@click.option("--count", type=click.IntRange(1), help="How often the part stands in the step. Of step and head: 1.")
@click.option("--tokens", type=click.IntRange(1), help="Tokens a call. Default: 1.")
@click.option("--layout", metavar="NAME", help="Cache layout, such as ring, or ring+append of a step.")
@click.option("--precision", metavar="NAME", help="Such as w4a16.")
@click.option("--context", type=click.IntRange(0), help="In tokens.")
@click.option("--device", metavar="NAME", shell_complete=completion.device, help="The phone.")
@click.option("--runtime", type=click.Choice(["qnn", "onnx", "tflite"]), help="Default: qnn.")
@click.option("--unit", type=click.Choice(["npu", "gpu", "cpu"]), help="The unit asked for. Default: npu.")
@click.option("--job", metavar="ID", help="Its job. Default: the file's hash, so that it comes in once.")
@db_option
@as_json
@common
def import_(file: Path, db: Path, json_: bool, **described: Any) -> int:
    """Import FILE, all of it or nothing: JSON as exported, or AI Hub's own profile JSON and what it was of.

    What is there already stays as it is. A profile of AI Hub's JSON has not been checked for parity.
    """
    from ringstep.profiling import exchange, store

    found = exchange.read_file(file, described)
    with store.open_store(db, write=True) as opened:
        stored = store.add_all(opened, found)
    new, known = ([number for number, is_new in stored if is_new is wanted] for wanted in (True, False))
    if json_:
        console.print_json({"added": new, "known": known})
    else:
        was_there = f"; {len(known)} were there already: {', '.join(map(str, known[:8]))}" if known else ""
        added = f": {', '.join(map(str, new[:8]))}{', ...' * (len(new) > 8)}" if new else ""
        console.line(f"{len(new)} profile{'s' * (len(new) != 1)} added{added}{was_there}")
    return 0


@profiles.command("gate")
@click.option("--baseline", type=click.Path(path_type=Path), default=BASELINE, show_default=True,
              help="What to judge against.")  # fmt: skip
@click.option("--max-rise", type=float, callback=percent, default=5.0, show_default=True,
              help="Percent that a median may rise.")  # fmt: skip
@click.option("--require-all", is_flag=True, help="Fail too where the baseline has what was not measured again.")
@click.option("--update-baseline", is_flag=True, help="Make the newest profiles the baseline instead of judging them.")
@db_option
@as_json
@common
def gate_(baseline: Path, max_rise: float, require_all: bool, update_baseline: bool, db: Path, json_: bool) -> int:
    """Leave with 1 when a phone has become slower than the baseline beyond noise, or computes wrong.

    Slower is a median whose rise exceeds --max-rise even at the lower bound of its 95 % interval. Leaves with 1 also
    when nothing was measured since the baseline.
    """
    from ringstep.profiling import gate, show, store

    with store.open_store(db) as opened:
        found = store.find(opened)
    if update_baseline:
        old = gate.read_baseline(baseline) if baseline.exists() else []
        entries = gate.updated(old, found)
        gate.write_baseline(baseline, entries)
        changed = len({p.job for p in entries} - {p.job for p in old})
        if json_:
            console.print_json({"baseline": str(baseline), "entries": len(entries), "changed": changed})
        else:
            console.line(f"{baseline}: {len(entries)} entr{'y' if len(entries) == 1 else 'ies'}, {changed} of them new")
        return 0
    entries = gate.read_baseline(baseline)
    judged = gate.judge(entries, found, max_rise)
    passed = gate.passed(judged, require_all)
    known = {(p.subject, p.place) for p in entries}
    beside = sum(key not in known for key in gate.newest_of(found))
    if json_:
        console.print_json({"passed": passed, "max_rise": max_rise, "without_baseline": beside, "entries": [
            {"verdict": one.verdict, "note": one.note, "ratio": one.ratio, "subject": one.baseline.subject,
             "place": one.baseline.place, "baseline_job": one.baseline.job, "baseline_us": one.baseline.median_us,
             "job": one.now.job if one.now else None, "us": one.now.median_us if one.now else None}
            for one in judged]})  # fmt: skip
    else:
        show.print_judged(judged, max_rise)
        console.line(summary(judged, passed, beside))
    missing = sum(one.verdict == "not measured" for one in judged)
    if missing:
        console.warn(f"{missing} of the baseline's {len(judged)} not measured since")
    return 0 if passed else console.GATE_FAILED


def summary(judged: Any, passed: bool, beside: int) -> str:
    """The last line, such as "failed: 1 slower, 2 same"."""
    counts: dict[str, int] = {}
    for one in judged:
        counts[one.verdict] = counts.get(one.verdict, 0) + 1
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    rest = f"; {beside} measured without a baseline (--update-baseline adds them)" if beside else ""
    return f"{'passed' if passed else 'failed'}: {found}{rest}"
