"""`ringstep parity` without an artifact: the gate over tiny models, and its baseline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringstep import console

if TYPE_CHECKING:
    from exporters.gate import Row

SHOWN = ("weights", "logits", "caches", "windows")


def gate(update: bool, only: Sequence[str], json_: bool) -> int:
    """Run the gate, print it, and with `update` write the baseline after showing what changes; returns the exit code.

    An update holds rows to thresholds alone, and writes nothing when one is missed.
    """
    from exporters.gate import BASELINE, against, as_json, differences, has_simulator, load_baseline, run_gate
    from exporters.gate import save_baseline as save
    from exporters.tiny import GATED

    start, models = time.perf_counter(), list(only) or list(GATED)
    # One that cannot be read is refused before minutes are spent; where there is no simulator its rows are left alone.
    baseline, simulate = load_baseline(), has_simulator()
    if not simulate:
        console.warn("no simulator on this machine: its rows are left out")
    with console.progress("tiny models of every recipe", len(models)) as tick:
        rows = run_gate(models, simulate=simulate, tick=tick)
    changed = differences(rows, {key: own for key, own in baseline.items() if key in {row.key for row in rows}})
    if not update:
        against(rows, baseline)
    passed = not any(row.failures for row in rows)
    seconds = time.perf_counter() - start
    if json_:
        console.print_json({"passed": passed, "seconds": seconds, "rows": as_json(rows), "changed": changed})
    else:
        show(rows, seconds)
        if update:
            by_row: dict[str, dict[str, str]] = {}
            for key, name, old, new in changed:
                by_row.setdefault(key, {})[name] = change(old, new)
            cells = [(key, *(own.get(name, "") for name in SHOWN)) for key, own in by_row.items()]
            console.table("changes of the baseline, dB", ["row", *SHOWN], cells)
            if not changed:
                console.line("nothing changes by 0.05 dB or more")
    if update and passed:
        # Without --only and with a simulator what was not run is gone.
        whole = simulate and not only
        save(rows, {} if whole else baseline)
        console.say(f"written: {BASELINE.name}")
    elif update:
        console.say(f"{BASELINE.name} left as it was: a threshold is missed")
    return 0 if passed else console.GATE_FAILED


def change(old: float | None, new: float | None) -> str:
    """A measure before and after, in dB."""
    if old is None or new is None:
        return f"{number(new)} new" if old is None else f"{number(old)} gone"
    return f"{number(old)} > {number(new)}"


def number(value: float | None) -> str:
    """dB with one decimal; nothing where there is none."""
    return "" if value is None else f"{value:.1f}"


def show(rows: Sequence[Row], seconds: float) -> None:
    """The table, then what failed."""
    cells = [(row.model, row.precision, row.engine, *(number(row.db.get(name)) for name in SHOWN),
              "FAILED" if row.failures else "passed") for row in rows]  # fmt: skip
    columns = ["model", "type", "engine", *SHOWN, ""]
    console.table("tiny models, dB (qnn-sim: simulated)", columns, cells)
    failed = [row for row in rows if row.failures]
    for row in failed:
        console.line(f"{row.key}: FAILED: {'; '.join(row.failures)}")
    verdict = f"{len(failed)} of {len(rows)} rows FAILED" if failed else f"{len(rows)} rows passed"
    console.line(f"{verdict} in {console.human_seconds(seconds)}")
