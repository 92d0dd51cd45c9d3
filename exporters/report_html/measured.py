"""What was measured: parity by position and layer, stages, drift, bisect, a profile."""

from __future__ import annotations

from typing import Any

from exporters.report_html import charts
from exporters.report_html.parts import ROWS, Cell, Section, count, decibels, figure, plain, table
from exporters.report_html.read import PARITY, Artifact, get, items, number, numbers, text
from ringstep.parity.metrics import SILENT_DB

VERDICTS = {"equal": "good", "ambiguous": "warn", "different": "bad"}


def engine_name(body: Any) -> str:
    """An engine's name, `simulated` said where it is."""
    return text(get(body, "engine"), 40) or "engine"


def is_simulated(body: Any) -> bool:
    """Whether figures are of a simulator; an engine named so is one whatever the file says."""
    return get(body, "simulated") is True or "sim" in text(get(body, "engine"), 40)


def drawn(value: float | None) -> float | None:
    """An SNR as a chart takes it: none where it is identical or not finite."""
    return None if value is None or abs(value) >= SILENT_DB else value


def parity(artifact: Artifact, reports: Any = None) -> Section:
    """Every engine against the original: the summary, SNR by position, SNR by layer, answers."""
    section = Section("parity", "Parity with the original")
    reports = items(artifact.json(PARITY) if reports is None else reports)
    if not reports:
        section.missing.append(("parity with the original", "ringstep parity {target}"))
        return section
    section.lead = f"against {text(get(reports[0], 'summary', 'reference')) or 'the original'}"
    rows, positions, layers, limits = [], [], [], set()
    for index, report in enumerate(reports[:8]):
        s = report.get("summary")
        name, simulated = engine_name(s), is_simulated(s)
        rows.append(summary_row(s, name, simulated))
        verdict(section, s, name)
        limit = number(get(s, "threshold_db"))
        limits |= set() if limit is None else {limit}
        found = [(at, p) for p in items(report.get("positions")) if (at := number(p.get("position"))) is not None]
        wrong = [at for at, p in found if p.get("top1") in ("different", "ambiguous")]
        positions.append(charts.Line(name, [at for at, _ in found], [drawn(number(p.get("snr_db"))) for _, p in found],
                                     index, simulated, marks=wrong))  # fmt: skip
        caches = [(at, c) for c in items(report.get("caches")) if (at := number(c.get("layer"))) is not None]
        for key, dashed in (("key_db", False), ("value_db", True)):
            what = "keys" if key == "key_db" else "values"
            layers.append(charts.Line(f"{name} {what}", [at for at, _ in caches],
                                      [drawn(number(c.get(key))) for _, c in caches], index, simulated, dashed,
                                      points=len(caches) < 60))  # fmt: skip
    columns = ["engine", "verdict", "type", "tokens", "min dB", "median", "pooled", "limit", "worst cache", "top-1 %",
               "top-5 %", "KL"]  # fmt: skip
    section.tables.append(table("Engines", columns, rows))
    limit = limits.pop() if len(limits) == 1 else None
    chart = charts.lines("Logits SNR by position", positions, limit=limit,
                         note="dB; the dotted line is the limit, a ring marks another first token"
                         if limit is not None else "dB; a ring marks another first token")  # fmt: skip
    section.charts += [chart] if chart else []
    chart = charts.lines("Cache SNR by layer", layers, x="layer", note="dB, keys and values")
    section.charts += [chart] if chart else []
    answers(section, reports)
    windows(section, reports)
    details(section, reports)
    if not any(is_simulated(r.get("summary")) for r in reports):
        section.missing.append(("parity on the simulated NPU", "ringstep parity {target} --engine qnn-sim"))
    return section


def summary_row(s: Any, name: str, simulated: bool) -> list[Cell]:
    """One engine's row of the summary."""
    passed = get(s, "passed")
    pooled = get(s, "snr_db", "pooled") if get(s, "scheme") else None
    share = [number(get(s, "top1")), number(get(s, "top5"))]
    worst = "passed" if passed is True else "FAILED" if passed is False else ""
    kind = text(get(s, "scheme") or get(s, "dtype"), 40).replace("float", "fp")
    return [
        plain(name, "simulated" if simulated else ""), plain(worst, "good" if passed else "bad" if worst else ""),
        plain(kind), count(number(get(s, "tokens"))), decibels(number(get(s, "snr_db", "min"))),
        decibels(number(get(s, "snr_db", "median"))), decibels(number(pooled)),
        figure(number(get(s, "threshold_db")), "{:.0f}"), decibels(number(get(s, "caches_db", "min"))),
        *(figure(None if v is None else 100 * v) for v in share), figure(number(get(s, "kl", "mean")), "{:.1e}"),
    ]  # fmt: skip


def verdict(section: Section, s: Any, name: str) -> None:
    """Why an engine failed, in its own words."""
    failures = get(s, "failures")
    for failure in failures[:5] if isinstance(failures, list) else []:
        section.lines.append(("bad", f"{name}: {text(failure, 300)}"))


def answers(section: Section, reports: list[dict[str, Any]]) -> None:
    """What each engine answered beside the original."""
    rows = []
    for report in reports[:8]:
        answer = report.get("answer")
        if isinstance(answer, dict):
            s, says = report.get("summary"), text(answer.get("verdict"), 40)
            said = [text(answer.get(key), 600) for key in ("prompt", "reference_text", "text")]
            rows.append([plain(engine_name(s), "simulated" if is_simulated(s) else ""), *map(plain, said),
                         plain(says, VERDICTS.get(says, ""))])  # fmt: skip
    if rows:
        section.tables.append(table("Answers", ["engine", "prompt", "original", "this artifact", "verdict"], rows))


def windows(section: Section, reports: list[dict[str, Any]]) -> None:
    """The window gate: every way in which a text was fed."""
    for report in reports[:8]:
        s, gate = report.get("summary"), report.get("windows")
        feedings = items(get(gate, "feedings"))
        if feedings:
            label = " (simulated)" if is_simulated(s) else ""
            title = f"Window gate: {engine_name(s)}{label}, {text(get(gate, 'mode'), 40)}"
            generic(section, title, feedings)
            for line in strings(get(gate, "failures"), 5):
                section.lines.append(("bad", f"{engine_name(s)}: {line}"))


def details(section: Section, reports: list[dict[str, Any]]) -> None:
    """Every position and every cache, folded away."""
    rows, caches, left_out = [], [], 0
    for report in reports[:8]:
        s = report.get("summary")
        name, look = engine_name(s), "simulated" if is_simulated(s) else ""
        positions = items(report.get("positions"))
        left_out += max(0, len(positions) - ROWS)
        for p in positions[:ROWS]:
            top1 = text(p.get("top1"), 40)
            top5 = number(p.get("top5"))
            rows.append([plain(name, look), count(number(p.get("position"))), count(number(p.get("token"))),
                         decibels(number(p.get("snr_db"))), plain(top1, VERDICTS.get(top1, "")),
                         figure(None if top5 is None else 100 * top5, "{:.0f}"),
                         figure(number(p.get("kl")), "{:.1e}")])  # fmt: skip
        for c in items(report.get("caches")):
            caches.append([plain(name, look), count(number(c.get("layer"))), decibels(number(c.get("key_db"))),
                           decibels(number(c.get("value_db")))])  # fmt: skip
    if caches:
        section.tables.append(table("Every cache", ["engine", "layer", "keys dB", "values dB"], caches, closed=True))
    if rows:
        columns = ["engine", "position", "token", "dB", "top-1", "top-5 %", "KL"]
        section.tables.append(table("Every position", columns, rows, True, left_out))


def stages(artifact: Artifact) -> Section:
    """SNR after each stage, so that the one that costs is seen."""
    section = Section("stages", "SNR by stage")
    body = artifact.json("parity_stages.json")
    found = items(get(body, "stages"))[:20]
    if not found:
        section.missing.append(("SNR by stage", "ringstep parity {target} --stages"))
        return section
    section.lead = f"each stage against {text(get(body, 'against') or get(body, 'reference')) or 'the original'}"
    names = [text(s.get("stage"), 40) for s in found]
    labels = [f"{n} (simulated)" if is_simulated(s) else n for n, s in zip(names, found, strict=True)]
    rows, lowest, middle = [], [], []
    for name, s in zip(names, found, strict=True):
        summary = s.get("summary")
        low, median = number(get(summary, "snr_db", "min")), number(get(summary, "snr_db", "median"))
        lowest.append(drawn(low))
        middle.append(drawn(median))
        top1 = number(get(summary, "top1"))
        rows.append([plain(name, "simulated" if is_simulated(s) else ""), plain(engine_name(s)),
                     count(number(get(summary, "tokens"))), decibels(low), decibels(median),
                     decibels(number(get(s, "before", "summary", "snr_db", "min"))),
                     decibels(number(get(summary, "caches_db", "min"))), figure(None if top1 is None else 100 * top1),
                     figure(number(get(summary, "kl", "mean")), "{:.1e}")])  # fmt: skip
    bars = [charts.Bars("median", middle, 0), charts.Bars("lowest", lowest, 1)]
    chart = charts.bars("Logits SNR by stage", labels, bars, simulated=any(is_simulated(s) for s in found),
                        texts=[[decibels(v).text for v in bar.values] for bar in bars],
                        note="dB; a stage without a bar is identical")  # fmt: skip
    section.charts += [chart] if chart else []
    position = []
    for i, (label, s) in enumerate(zip(names, found, strict=True)):
        db = [drawn(v) for v in numbers(s.get("snr_db"))]
        position.append(charts.Line(label, [float(at) for at in range(len(db))], db, i, is_simulated(s)))
    chart = charts.lines("Logits SNR by position and stage", position, note="dB")
    section.charts += [chart] if chart else []
    layer = []
    for i, (label, s) in enumerate(zip(names, found, strict=True)):
        caches = [(at, c) for c in items(s.get("caches")) if (at := number(c.get("layer"))) is not None]
        worst = [lower(number(c.get("key_db")), number(c.get("value_db"))) for _, c in caches]
        layer.append(charts.Line(label, [at for at, _ in caches], [drawn(v) for v in worst], i, is_simulated(s)))
    chart = charts.lines("Cache SNR by layer and stage", layer, x="layer", note="dB, the worse of keys and values")
    section.charts += [chart] if chart else []
    columns = ["stage", "engine", "tokens", "min dB", "median", "from the stage before", "worst cache", "top-1 %", "KL"]
    section.tables.append(table("", columns, rows))
    return section


def lower(a: float | None, b: float | None) -> float | None:
    """The lower of two that may be missing."""
    return min((v for v in (a, b) if v is not None), default=None)


def drift(artifact: Artifact) -> Section:
    """Whether the error grows along a long text."""
    section = Section("drift", "Drift over a long text")
    body = artifact.json("drift.json")
    x, y = numbers(get(body, "teacher_forced", "position")), numbers(get(body, "teacher_forced", "snr_db"))
    if not isinstance(body, dict):
        section.missing.append(("drift over 300 tokens", "ringstep parity {target} --drift"))
        return section
    name, simulated, slope = engine_name(body), is_simulated(body), number(body.get("slope_db_per_100"))
    pairs = [(a, b) for a, b in zip(x, y, strict=False) if a is not None]
    series = [charts.Line("the original's text", [a for a, _ in pairs], [drawn(b) for _, b in pairs], 0, simulated)]
    known = [(a, b) for a, b in pairs if drawn(b) is not None]
    if slope is not None and len(known) > 1:
        middle = sum(a for a, _ in known) / len(known)
        mean = sum(b or 0.0 for _, b in known) / len(known)
        ends = [known[0][0], known[-1][0]]
        series.append(charts.Line("trend", ends, [mean + slope * (a - middle) / 100 for a in ends], 1, simulated, True))
    x, y = numbers(get(body, "free_running", "position")), numbers(get(body, "free_running", "snr_db"))
    own = [(a, b) for a, b in zip(x, y, strict=False) if a is not None]
    series.append(charts.Line("its own text", [a for a, _ in own], [drawn(b) for _, b in own], 2, simulated))
    chart = charts.lines("Logits SNR along the text", series, note=f"dB, {name}")
    section.charts += [chart] if chart else []
    for line in strings(body.get("failures")):
        section.lines.append(("bad", line))
    passed = body.get("passed")
    if slope is not None:
        look = "good" if passed is True else "bad" if passed is False else "note"
        label = " (simulated)" if simulated else ""
        section.lines.append((look, f"{name}{label}: {slope:+.2f} dB in 100 tokens"))
    free = body.get("free_running")
    if isinstance(free, dict):
        same, says = number(free.get("same")), text(free.get("verdict"), 40)
        agree = "" if same is None else f", the first {same:,.0f} tokens are the same"
        section.lines.append((VERDICTS.get(says, "note"), f"left to itself: {says or 'no verdict'}{agree}"))
    return section


def bisect(artifact: Artifact) -> Section:
    """Where along the depth the artifact leaves the original."""
    section = Section("bisect", "Where it diverges")
    body = artifact.json("bisect.json")
    if not isinstance(body, dict):
        section.missing.append(("SNR along the depth", "ringstep bisect {target}"))
        return section
    name, simulated = engine_name(body), is_simulated(body)
    section.lead = f"{name} against {text(body.get('reference')) or 'the original'}"
    if body.get("verdict"):
        section.lines.append(("note", text(body.get("verdict"), 600)))
    depth = items(body.get("depth"))
    chart = charts.lines("SNR along the depth", [charts.Line(name, [float(i) for i in range(len(depth))],
                         [drawn(number(d.get("snr_db"))) for d in depth], 0, simulated, points=len(depth) < 60)],
                         x="block", note="dB, the output of each block",
                         names={float(i): text(d.get("tensor"), 40) for i, d in enumerate(depth)})  # fmt: skip
    section.charts += [chart] if chart else []
    first = body.get("first")
    if isinstance(first, dict):
        rows = [[plain(heading(k)), db_or_value(k, v)] for k, v in first.items() if v not in (None, "", [], {})]
        section.tables.append(table("First to diverge", ["what", "value"], rows))
    for line in strings(body.get("warnings")):
        section.lines.append(("warn", line))
    for title, key in (("Blocks", "depth"), ("Nodes of the worst block", "nodes"), ("By stage", "stages")):
        generic(section, title, items(body.get(key)))
    return section


def profile(artifact: Artifact) -> Section:
    """A phone's profile, whatever figures it brings."""
    section = Section("profile", "Profile")
    body = artifact.json("profile.json")
    if not isinstance(body, dict | list):
        section.missing.append(("a phone's profile", ""))
        return section
    if isinstance(body, list):
        generic(section, "Profile", items(body))
        return section
    simulated = is_simulated(body)
    if simulated:
        section.lines.append(("note", "simulated: these are no phone's times"))
    scalars = [[plain(text(k)), value_cell(v)] for k, v in body.items() if not isinstance(v, dict | list)]
    if scalars:
        section.tables.append(table("", ["figure", "value"], scalars))
    for key, value in body.items():
        generic(section, text(key), items(value))
    return section


def strings(value: Any, limit: int = 20) -> list[str]:
    """The first texts of a list, each one line."""
    return [text(item, 400) for item in value[:limit] if isinstance(item, str)] if isinstance(value, list) else []


def generic(section: Section, title: str, found: list[dict[str, Any]]) -> None:
    """Objects as a table with a column for each of their first keys; nested values are counted."""
    keys: list[str] = []
    for item in found[:50]:
        keys += [k for k in item if k not in keys]
    keys = keys[:10]
    if keys:
        rows = [[db_or_value(k, item.get(k)) for k in keys] for item in found]
        section.tables.append(table(title, [heading(k) for k in keys], rows, closed=len(rows) > 40))


def value_cell(value: Any) -> Cell:
    """A number as a number, a list of texts as one, anything else as text."""
    found = number(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return plain(text("; ".join(value[:5]), 300))
    if found is None:
        return plain(text(value, 300))
    return Cell(f"{found:,.0f}" if found == int(found) else f"{found:,.4g}", found)


def db_or_value(key: str, value: Any) -> Cell:
    """A cell by its column's name: NAME_db is an SNR."""
    found = number(value)
    return decibels(found) if key.endswith("_db") and found is not None else value_cell(value)


def heading(key: str) -> str:
    """A key as a column's name: snr_db as "snr dB"."""
    return text(key.replace("_", " ").removesuffix(" db") + " dB" * key.endswith("_db"), 60)
