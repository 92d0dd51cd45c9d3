"""What `ringstep parity --stages` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ringstep import console

STRETCHES = 10


def print_stages(reports: dict[str, dict[str, Any]]) -> None:
    """Two tables over all artifacts (folder to report), a row a stage; then what failed and what was not run."""
    several = len(reports) > 1
    decibels, tokens = [], []
    for folder, body in reports.items():
        name = [Path(folder).name] if several else []
        for stage in body["stages"]:
            decibels.append(name + decibel_row(stage))
            tokens.append(name + token_row(stage))
    first = (["artifact"] if several else []) + ["stage"]
    references = list(dict.fromkeys(body["reference"] for body in reports.values()))
    columns = ["type", "tokens", "min dB", "in all", "step dB", "caches", "max err"]
    console.table(f"against {', '.join(references)}: logits and caches in dB", first + columns, decibels)
    columns = ["top-1 %", "AMBIGUOUS", "different", "top-5 %", "KL", "greedy"]
    print()
    console.table("tokens", first + columns, tokens)
    for folder, body in reports.items():
        at = f"{Path(folder).name}: " if several else ""
        for stage in body["stages"]:
            console.line(at + verdict(stage))
        for missing, reason in body["absent"].items():
            console.line(f"{at}{missing}: not run, {reason}")


def label(stage: dict[str, Any]) -> str:
    """A stage's name."""
    return stage["stage"] + (" (sim)" if stage["simulated"] else "")


def decibel_row(stage: dict[str, Any]) -> list[str]:
    """How far a stage's numbers are from the reference's, and from those of the stage before."""
    s, before = stage["summary"], stage["before"]
    caches = f"{s['caches_db']['min']:.1f}" if s["caches_db"] else ""
    return [label(stage), s["scheme"] or s["dtype"].replace("float", "fp"), str(s["tokens"]),
            f"{s['snr_db']['min']:.1f}", f"{s['snr_db']['pooled']:.1f}", f"{before['summary']['snr_db']['pooled']:.1f}",
            caches, percent(s["max_rel"])]  # fmt: skip


def token_row(stage: dict[str, Any]) -> list[str]:
    """How often a stage's first tokens are the reference's."""
    s, answer = stage["summary"], stage["greedy"]
    greedy = f"{answer['same']} of {answer['tokens']}" if answer else ""
    mark = "" if not answer or answer["verdict"] == "equal" else ", " + said(answer["verdict"])
    return [label(stage), f"{100 * s['top1']:.1f}", str(s["ambiguous"]), str(s["different"]), f"{100 * s['top5']:.1f}",
            f"{s['kl']['mean']:.0e}", greedy + mark]  # fmt: skip


def percent(share: float) -> str:
    """A share in percent with two digits."""
    return f"{100 * share:.2g} %"


def said(verdict: str) -> str:
    """A verdict as the table has it: a near tie stands out."""
    return "AMBIGUOUS" if verdict == "ambiguous" else verdict


def verdict(stage: dict[str, Any]) -> str:
    """Passed or not, and why."""
    s = stage["summary"]
    notes = [f"at least {s['threshold_db']:.0f} dB {'in all' if s['scheme'] else 'everywhere'}"]
    notes += [f"{s['ambiguous']} AMBIGUOUS"] * (s["ambiguous"] > 0)
    notes += [f"{s['different']} different"] * (s["different"] > 0)
    notes += ["simulated"] * s["simulated"]
    said = "passed" if s["passed"] else "FAILED: " + "; ".join(s["failures"])
    return f"{stage['stage']}: {said} ({', '.join(notes)})"


def print_stage_positions(body: dict[str, Any]) -> None:
    """SNR of every position, a column a stage; a position whose first token is another one is marked."""
    stages = body["stages"]
    cells: dict[int, dict[str, str]] = {}
    tokens: dict[int, int] = {}
    for stage in stages:
        for p in stage["positions"]:
            mark = {"equal": "", "ambiguous": " ?", "different": " !"}[p["top1"]]
            cells.setdefault(p["position"], {})[stage["stage"]] = f"{p['snr_db']:.1f}{mark}"
            tokens[p["position"]] = p["token"]
    rows = [[at, tokens[at], *(own.get(s["stage"], "") for s in stages)] for at, own in sorted(cells.items())]
    title = "logits in dB (? AMBIGUOUS first token, ! different)"
    console.table(title, ["position", "token", *(s["stage"] for s in stages)], rows)


def print_stage_layers(body: dict[str, Any]) -> None:
    """SNR of every layer's keys and values, a column a stage."""
    stages = body["stages"]
    cells: dict[int, dict[str, str]] = {}
    for stage in stages:
        for c in stage["caches"]:
            cells.setdefault(c["layer"], {})[stage["stage"]] = f"{c['key_db']:.1f}/{c['value_db']:.1f}"
    rows = [[layer, *(own.get(s["stage"], "") for s in stages)] for layer, own in sorted(cells.items())]
    console.table("cache entries, keys/values in dB by layer", ["layer", *(s["stage"] for s in stages)], rows)


def print_drift(body: dict[str, Any], positions: bool) -> None:
    """Both curves of a drift report by stretches of positions, or by position, and the verdict."""
    curves = {name: dict(zip(body[name]["position"], body[name]["snr_db"], strict=True))
              for name in ("teacher_forced", "free_running") if "position" in body[name]}  # fmt: skip
    at = sorted(set().union(*curves.values()))
    step = 1 if positions else max(1, -(-len(at) // STRETCHES))
    rows = []
    for part in (at[i : i + step] for i in range(0, len(at), step)):
        name = str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
        rows.append([name, *(f"{np.median([c[p] for p in part if p in c]):.1f}" for c in curves.values())])
    names = [name.replace("_", " ") for name in curves]
    title = f"logits in dB against {body['reference']}" + ("" if positions else ", medians")
    console.table(title, ["positions", *names], rows)
    for name, found in body["trends"].items():
        slope, fall = found["slope"], found["fall"]
        console.line(f"{name.replace('_', ' ')}: {slope['db_per_100']:+.1f} dB for each 100 tokens (95 %: "
                     f"{slope['low']:+.1f} to {slope['high']:+.1f}), largest step {-fall['db']:+.1f} dB at position "
                     f"{fall['position']}")  # fmt: skip
    free = body["free_running"]
    console.line(f"the first {free['same']} of {free['tokens']} tokens are the original's [{said(free['verdict'])}]")
    verdict = "passed, no drift" if body["passed"] else "FAILED, it drifts: " + "; ".join(body["failures"])
    console.line(f"{body['engine']}: {verdict}" + (" (simulated)" if body["simulated"] else ""))
