"""What was built: sizes, KV memory, bits, operations, the compiler, timings, versions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from exporters.inspect import ranges
from exporters.memory import CONTEXTS, fixed_bytes, kv_table, on_devices
from exporters.report_html import charts
from exporters.report_html.measured import strings
from exporters.report_html.parts import Cell, Section, count, figure, plain, seconds, size, table
from exporters.report_html.read import Artifact, get, items, number, text
from ringstep import console
from ringstep.errors import RingstepError

BARS = 40  # names in one chart
GRAPHS = (("decode.traced.onnx", "as traced"), ("decode.float.onnx", "sanitised"))


def sizes(artifact: Artifact) -> Section:
    """Every file that the export wrote."""
    section = Section("files", "Files")
    manifest = artifact.manifest
    if manifest is None:
        section.missing.append(("the list of files", "ringstep export MODEL --out {target}"))
        return section
    files = {path: (out.bytes, record.name) for record in manifest.stages.values()
             for path, out in record.outputs.items()}  # fmt: skip
    total = sum(number or 0 for number, _ in files.values())
    section.lead = f"{len(files)} files, {console.human_bytes(total)}"
    largest = max((b for b, _ in files.values()), default=0)
    rows = [[plain(text(path), "code"), size(b, largest), plain(text(stage))]
            for path, (b, stage) in sorted(files.items(), key=lambda f: -f[1][0])]  # fmt: skip
    section.tables.append(table("", ["file", "size", "written by"], rows))
    return section


def memory(artifact: Artifact) -> Section:
    """KV bytes by context, as exported and with a full cache in every layer; the caches by kind."""
    section = Section("memory", "KV memory")
    spec = artifact.spec
    if spec is None:
        section.missing.append(("KV memory by context", "ringstep export MODEL --out {target}"))
        return section
    by_context = kv_table(spec)
    at, hybrid, flat = ([row[name] for row in by_context] for name in ("context", "hybrid", "flat"))
    windows = sorted({c.window for c in spec.caches if c.window is not None})
    if windows:
        count_windows = sum(c.window is not None for c in spec.caches)
        spans = ", ".join(map(str, windows))
        section.lead = (f"{count_windows} of {len(spec.caches)} layers keep a window of {spans} tokens; "
                        "the rest keep the whole context")  # fmt: skip
    else:
        section.lead = "Every layer keeps the whole context: no window saves memory here"
    megabytes = [[v / 1e6 for v in hybrid], [v / 1e6 for v in flat]]
    names = ["as exported", "every layer full"] if windows else ["as exported"]
    series = [charts.Line(name, [float(c) for c in at], mb, i, points=True, dashed=i == 1)
              for i, (name, mb) in enumerate(zip(names, megabytes, strict=False))]  # fmt: skip
    ticks = {float(c): short_count(c) for c in CONTEXTS}
    chart = charts.lines("KV memory by context", series, note="MB, both axes logarithmic", x="context", unit="MB",
                         form=",.2f", log=True, ticks=ticks)  # fmt: skip
    section.charts += [chart] if chart and max(flat, default=0) > 0 else []
    rows = [[count(c), size(h), size(f), figure(f / h if h else None, "{:.2f}x")]
            for c, h, f in zip(at, hybrid, flat, strict=True)]  # fmt: skip
    section.tables.append(table("By context", ["context", "as exported", "every layer full", "saved"], rows))
    rows = [[count(k["context"]), size(k["hybrid_16bit"]), size(k["flat_16bit"]), size(k["hybrid_8bit"]),
             size(k["flat_8bit"])] for k in by_context]  # fmt: skip
    columns = ["context", "16 bit", "16 bit, every layer full", "8 bit", "8 bit, every layer full"]
    section.tables.append(table("By context and bits of an element", columns, rows))
    if artifact.manifest is not None:
        fixed = fixed_bytes(spec, artifact.manifest)
        rows = [[plain(d["device"]), size(d["memory_bytes"]),
                 *(figure(100 * c["share"], "{:,.0f} %", "" if c["fits"] else "bad") for c in d["contexts"])]
                for d in on_devices(spec, artifact.manifest)]  # fmt: skip
        title = (f"Share of a phone's memory at a context: caches, {console.human_bytes(fixed['graphs'])} of graphs "
                 f"({fixed['from']}) and {console.human_bytes(fixed['table'])} of table")  # fmt: skip
        section.tables.append(table(title, ["phone", "memory", *map(short_count, CONTEXTS)], rows))
    kinds: dict[tuple[Any, ...], list[Any]] = {}
    for c in spec.caches:
        kinds.setdefault((c.kind, c.length, c.window, c.kv_heads, c.head_dim, c.dtype), []).append(c)
    rows = [[plain(ranges([c.layer for c in cs])), plain(kind), count(length), figure(window, "{:,.0f}"), count(heads),
             count(dim), plain(dtype), size(sum(c.nbytes for c in cs))]
            for (kind, length, window, heads, dim, dtype), cs in kinds.items()]  # fmt: skip
    columns = ["layers", "kind", "length", "window", "KV heads", "head dim", "type", "size"]
    section.tables.append(table(f"Caches at context {spec.context:,}", columns, rows))
    return section


def short_count(value: int) -> str:
    """4096 as 4k."""
    return f"{value // 1024}k" if value % 1024 == 0 else str(value)


def bits(artifact: Artifact) -> Section:
    """Bits a weight by layer, and what the quantiser found."""
    section = Section("bits", "Weights and bits")
    found = artifact.json("quantize/sizes.json")
    report = artifact.json("quantize/report.json")
    if not isinstance(found, dict):
        if artifact.spec and not artifact.spec.scheme:
            section.lead = f"Weights are kept as {artifact.spec.dtype}"
            section.lines.append(("note", f"all weights are {artifact.spec.dtype}: nothing was quantised"))
        section.missing.append(("bits by layer", "ringstep export MODEL --device DEVICE --precision w8a16"))
        return section
    for name, body in list(found.items())[:4]:
        by_layer(section, text(name), body)
    for line in strings(get(report, "warnings")):
        section.lines.append(("warn", line))
    rows = [[count(number(s.get("position"))), plain(text(s.get("text") or s.get("token")), "code"),
             count(number(s.get("layer"))), figure(number(s.get("ratio")), "{:,.0f}x")]
            for s in items(get(report, "sinks"))]  # fmt: skip
    if rows:
        section.tables.append(table("Attention sinks", ["position", "token", "layer", "times the rest"], rows))
    raised = items(get(artifact.json("quantize/auto.json"), "raised"))
    if raised:
        rows = [[plain(text(p.get("path")), "code"), count(number(p.get("low"))), count(number(p.get("high"))),
                 size(number(p.get("extra_bytes"))), figure(number(p.get("db")))] for p in raised]  # fmt: skip
        section.tables.append(table("Raised by auto", ["linear", "bits", "raised to", "more", "dB then"], rows))
    return section


def by_layer(section: Section, name: str, body: Any) -> None:
    """One format's chart of bits by layer and its table of parameters."""
    layers: dict[str, list[tuple[float, float]]] = {}
    rows = []
    for p in items(get(body, "parameters")):
        path, own, stored = text(p.get("path")), number(p.get("bits")), number(p.get("bytes"))
        rows.append([plain(path, "code"), plain(" x ".join(text(d) for d in p.get("shape") or [])
                                                if isinstance(p.get("shape"), list) else ""),
                     plain(text(p.get("stored"))), figure(own, "{:.3f}"), size(stored)])  # fmt: skip
        if own and stored:
            parts = path.split(".")
            layer = f"layer {parts[1]}" if parts[0] == "layers" and len(parts) > 2 else path
            layers.setdefault(layer, []).append((8 * stored, 8 * stored / own))
    average = {layer: sum(b for b, _ in p) / sum(w for _, w in p) for layer, p in layers.items()}
    whole, on_disk = number(get(body, "bits")), number(get(body, "file_bytes"))
    if whole is not None:
        size_text = f", {console.human_bytes(on_disk)} on disk" if on_disk is not None else ""
        section.lines.append(("note", f"{name}: {whole:.3f} bits a weight{size_text}"))
    names = list(average)[:BARS]
    chart = charts.bars(f"Bits a weight by layer: {name}", names, [charts.Bars("bits", [average[n] for n in names], 0)],
                        note="scales and zero points counted",
                        texts=[[f"{average[n]:.3f} bits a weight" for n in names]])  # fmt: skip
    section.charts += [chart] if chart else []
    if rows:
        columns = ["parameter", "shape", "stored as", "bits a weight", "size"]
        section.tables.append(table(f"Parameters: {name}", columns, rows, closed=True))


def operations(artifact: Artifact) -> Section:
    """Operations by kind before and after sanitising, and what each pass changed."""
    section = Section("operations", "Operations")
    scheme = bool(artifact.spec and artifact.spec.scheme) or (artifact.folder / "onnx/decode.float.onnx").exists()
    last = "quantised" if scheme else "sanitised"
    found: list[tuple[str, Counter[str]]] = []
    for file, name in (*GRAPHS, ("decode.onnx", last)):
        counts = count_operations(artifact, Path("onnx") / file)
        if counts:
            found.append((name, counts))
    if not found:
        section.missing.append(("the graph", "ringstep export MODEL --format onnx --out {target}"))
    else:
        compare_operations(section, found, npu_operations(artifact))
    if len(found) == 1:
        section.missing.append(("the graph before it was sanitised", "ringstep export MODEL --out {target}"))
    passes = artifact.json("sanitize.json")
    rows = []
    for file, body in passes.items() if isinstance(passes, dict) else []:
        changes = get(body, "changes")
        for name, what in changes.items() if isinstance(changes, dict) else []:
            example = text(get(what, 0, "what"))
            times = float(len(what)) if isinstance(what, list) else number(what)
            rows.append([plain(text(file), "code"), plain(text(name), "code"), count(times), plain(example)])
    if rows:
        section.tables.append(table("Passes that changed something", ["graph", "pass", "changes", "for example"], rows))
    return section


def compare_operations(section: Section, found: list[tuple[str, Counter[str]]], npu: Counter[str]) -> None:
    """A chart and a table of counts by kind, the most frequent first."""
    totals = [(name, sum(counts.values())) for name, counts in found]
    section.lead = ", ".join(f"{total:,} {name}" for name, total in totals)
    kinds = sorted({k for _, counts in found for k in counts}, key=lambda k: (-max(c[k] for _, c in found), k))
    shown = kinds[:BARS]
    series = [charts.Bars(name, [float(counts[k]) for k in shown], i) for i, (name, counts) in enumerate(found)]
    names = [text(k, 40) for k in shown]
    chart = charts.bars("Operations by kind, one decode step", names, series, unit="nodes", whole=True)
    section.charts += [chart] if chart else []
    columns = ["operation", *(name for name, _ in found)]
    rows = [[plain(text(k), "code"), *(count(float(counts[k])) for _, counts in found)] for k in kinds]
    if len(found) > 1:
        columns.append("change")
        for row, k in zip(rows, kinds, strict=True):
            change = float(found[-1][1][k] - found[0][1][k])
            row.append(Cell(f"{change:+,.0f}" if change else "", change))
    if npu:
        columns.append("on the NPU")
        for row, k in zip(rows, kinds, strict=True):
            row.append(count(float(npu[k])) if k in npu else figure(None))
    section.tables.append(table("By kind", columns, rows))


def count_operations(artifact: Artifact, file: Path) -> Counter[str]:
    """Operations by kind of an ONNX file, those of inner graphs and functions too; its weights are not read."""
    path = artifact.folder / file
    if not path.exists():
        return Counter()
    from sanitize.wire import read_skeleton

    counts: Counter[str] = Counter()
    try:
        model = read_skeleton(path)
    except (RingstepError, OSError) as error:
        artifact.problems[file.as_posix()] = artifact.short(str(error))
        return counts
    todo: list[Any] = [model.graph, *model.functions]
    while todo:
        for node in todo.pop().node:
            counts[node.op_type] += 1
            for attribute in node.attribute:
                todo += [attribute.g] * attribute.HasField("g") + list(attribute.graphs)
    return counts


def npu_operations(artifact: Artifact) -> Counter[str]:
    """Operations that the compiler placed on the NPU, by kind, over the parts of the decode graph."""
    counts: Counter[str] = Counter()
    for name, record in (artifact.manifest.stages if artifact.manifest else {}).items():
        found = record.facts.get("npu_ops") if name.startswith("qnn-decode") else None
        for kind, value in found.items() if isinstance(found, dict) else []:
            counts[kind] += int(number(value) or 0)
    return counts


def kinds_of(counts: Any) -> float | None:
    """The sum of counts by kind."""
    return sum(number(v) or 0.0 for v in counts.values()) if isinstance(counts, dict) else None


def compiled(artifact: Artifact) -> Section:
    """What Qualcomm's compiler made of each graph."""
    section = Section("compiled", "Compiled for the NPU")
    rows, whole = [], []
    for name, record in (artifact.manifest.stages if artifact.manifest else {}).items():
        if not name.startswith("qnn-"):
            continue
        facts = record.facts
        section.lead = f"{text(facts.get('chip'))} by {text(facts.get('version'))}"
        total = kinds_of(facts.get("npu_ops"))
        rows.append([plain(text(name), "code"), count(total), size(number(facts.get("binary_bytes"))),
                     seconds(record.seconds), size(number(facts.get("peak_bytes")))])  # fmt: skip
        whole += [total is not None and total == kinds_of(facts.get("source_ops"))]
    if rows:
        if all(whole):
            section.lines.append(("good", "every operation runs on the NPU, none on the CPU"))
        columns = ["graph", "NPU operations", "context binary", "compiled in", "compiler's memory"]
        section.tables.append(table("", columns, rows))
    else:
        section.missing.append(("a context binary", "ringstep export MODEL --device DEVICE"))
    return section


def timings(artifact: Artifact) -> Section:
    """How long each stage of the export took on the machine that ran it, and its memory."""
    section = Section("timings", "Export timings")
    records = list(artifact.manifest.stages.values()) if artifact.manifest else []
    if not records:
        section.missing.append(("timings", "ringstep export MODEL --out {target}"))
        return section
    total, peak = sum(r.seconds for r in records), max(r.peak_rss_anon_bytes for r in records)
    section.lead = f"{console.human_seconds(total)} in all, at most {console.human_bytes(peak)} of memory"
    names, took = [text(r.name, 40) for r in records][:BARS], [r.seconds for r in records][:BARS]
    chart = charts.bars("Seconds by stage", names, [charts.Bars("time", took, 0)],
                        note="on the machine that exported, not on a phone",
                        texts=[[console.human_seconds(t) for t in took]])  # fmt: skip
    section.charts += [chart] if chart else []
    written = [sum(o.bytes for o in r.outputs.values()) for r in records]
    rows = [[plain(text(r.name), "code"), seconds(r.seconds), size(r.peak_rss_anon_bytes), size(b)]
            for r, b in zip(records, written, strict=True)]  # fmt: skip
    section.tables.append(table("", ["stage", "time", "peak memory", "written"], rows))
    return section


def without_folder(model: str) -> str:
    """A model as it was named; of an absolute path its last part."""
    return text(Path(model).name if Path(model).is_absolute() else model)


def versions(artifact: Artifact) -> Section:
    """What it was made from, and with what."""
    section = Section("versions", "Made from, made with")
    manifest = artifact.manifest
    if manifest is None:
        return section
    rows = [[plain("model"), plain(without_folder(manifest.model), "code")]]
    rows += [[plain(f"checkpoint {text(k)}"), plain(text(v), "code")] for k, v in manifest.checkpoint.items()]
    rows += [[plain(text(k)), plain(text(v) if not isinstance(v, dict) else text(", ".join(map(str, v))), "code")]
             for k, v in manifest.options.items() if v is not None]  # fmt: skip
    section.tables.append(table("Made from", ["option", "value"], rows))
    rows = [[plain(text(k)), plain(text(v), "code")] for k, v in manifest.versions.items()]
    section.tables.append(table("Versions", ["package", "version"], rows))
    return section
