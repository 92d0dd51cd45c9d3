"""The page: sections put into the template, everything it needs inside, written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from exporters.report_html import measured, sections
from exporters.report_html.parts import Card, Cell, Page, Section, Table, figure, plain, size, table
from exporters.report_html.read import PARITY, Artifact, find_artifacts, get, items, number, read_artifact, text
from ringstep import __version__, console
from ringstep.errors import RingstepError
from ringstep.files import write_whole

FILE = "report.html"
BUILDERS: tuple[Callable[[Artifact], Section], ...] = (
    measured.parity, measured.stages, measured.drift, measured.bisect, sections.memory, sections.bits,
    sections.operations, sections.compiled, measured.profile, sections.timings, sections.sizes, sections.versions,
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """A page and what is on it; `problems` maps an artifact to what of it could not be read."""

    html: str
    artifacts: list[str]
    charts: int
    problems: dict[str, list[str]]


def report_of(folder: Path) -> Report:
    """The page of an artifact folder, or of a folder of artifacts. Raises RingstepError where there is none."""
    pages = []
    found = find_artifacts(folder)
    with console.progress("reading artifacts", len(found)) as tick:
        for index, artifact in enumerate(found):
            pages.append((artifact, page_of(artifact, f"a{index}", [build(artifact) for build in BUILDERS])))
            tick(1)
    name = text(folder.resolve().name)
    html = render(name, [page for _, page in pages], index_table(pages) if len(pages) > 1 else None)
    charts = sum(len(section.charts) for _, page in pages for section in page.sections)
    problems = {a.name: list(a.problems.values()) for a, _ in pages if a.problems}
    return Report(html, [a.name for a, _ in pages], charts, problems)


def parity_report(folder: Path, reports: Sequence[dict[str, Any]]) -> str:
    """The HTML of `ringstep parity`: the reports just made, and nothing else."""
    artifact = read_artifact(folder)
    section = measured.parity(artifact, list(reports))
    return render(artifact.name, [page_of(artifact, "a0", [section], list(reports))], None)


def page_of(artifact: Artifact, ident: str, built: list[Section], reports: Any = None) -> Page:
    """One artifact's page from its sections, what could not be read first."""
    if artifact.problems:
        lines = [("bad", line) for line in artifact.problems.values()]
        built = [Section("problems", "Could not be read", lines=lines), *built]
    for section in built:
        section.id = f"{ident}-{section.id}"
    return Page(ident, artifact.name, subtitle(artifact), cards(artifact, reports), built, artifact.name)


def subtitle(artifact: Artifact) -> str:
    """Model, architecture, device."""
    spec, manifest = artifact.spec, artifact.manifest
    parts = [model_name(artifact)]
    if spec:
        parts += [f"{text(spec.recipe)} recipe", *(text(v) for v in spec.target.values())]
    elif manifest:
        parts.append(text(manifest.options.get("device")))
    return " · ".join(part for part in parts if part)


def model_name(artifact: Artifact) -> str:
    """The model's name; of a path its last part, for a page that is passed on need not tell whose disk it was."""
    if artifact.spec and artifact.spec.model:
        return text(artifact.spec.model)
    return sections.without_folder(artifact.manifest.model) if artifact.manifest else ""


def cards(artifact: Artifact, reports: Any = None) -> list[Card]:
    """The figures that a reader looks for first."""
    spec, manifest = artifact.spec, artifact.manifest
    found = []
    for body in items(artifact.json(PARITY) if reports is None else reports)[:4]:
        s = body.get("summary")
        low, passed = number(get(s, "snr_db", "min")), get(s, "passed")
        says = "passed" if passed is True else "FAILED" if passed is False else ""
        note = f"lowest logits SNR{', simulated' if measured.is_simulated(s) else ''}"
        found.append(Card(f"{measured.engine_name(s)} {says}", "–" if low is None else f"{low:.1f} dB", note,
                          "good" if passed is True else "bad" if passed is False else ""))  # fmt: skip
    if spec:
        kind = text(spec.scheme) or spec.dtype.replace("float", "fp")
        found.append(Card("Precision", kind, f"{spec.activations} activations"))
        bytes_ = sum(c.nbytes for c in spec.caches)
        found.append(Card("KV caches", console.human_bytes(bytes_), f"at context {spec.context:,}"))
    elif manifest:
        kind = text(manifest.options.get("scheme") or manifest.options.get("dtype"))
        found.append(Card("Precision", kind.replace("float", "fp")))
    if manifest:
        files = [o.bytes for r in manifest.stages.values() for o in r.outputs.values()]
        found.append(Card("On disk", console.human_bytes(sum(files)), f"{len(files)} files"))
        took = sum(r.seconds for r in manifest.stages.values())
        found.append(Card("Exported in", console.human_seconds(took), f"{len(manifest.stages)} stages"))
    return found


def index_table(pages: list[tuple[Artifact, Page]]) -> Table:
    """A row an artifact: what it is, what it takes, how near it is to the original."""
    rows = []
    for artifact, page in pages:
        spec, manifest = artifact.spec, artifact.manifest
        options = manifest.options if manifest else {}
        disk = sum(o.bytes for r in manifest.stages.values() for o in r.outputs.values()) if manifest else None
        summaries = [r.get("summary") for r in items(artifact.json(PARITY))]
        snr: dict[bool, list[float]] = {True: [], False: []}
        for s in summaries:
            low = number(get(s, "snr_db", "min"))
            snr[measured.is_simulated(s)] += [] if low is None else [low]
        verdicts = [get(s, "passed") for s in summaries]
        says = "" if not verdicts else "passed" if all(v is True for v in verdicts) else "FAILED"
        kind = text(spec.scheme or spec.dtype) if spec else text(options.get("scheme") or options.get("dtype"))
        rows.append([
            Cell(page.name, page.name.lower(), "code", f"#{page.id}"), plain(model_name(artifact)),
            plain(text(options.get("device"))), plain(kind.replace("float", "fp")),
            figure(float(spec.context) if spec else number(options.get("context")), "{:,.0f}"), size(disk),
            size(sum(c.nbytes for c in spec.caches) if spec else None),
            figure(min(snr[False], default=None)), figure(min(snr[True], default=None)),
            plain(says, "good" if says == "passed" else "bad" if says else ""),
        ])  # fmt: skip
    columns = ["artifact", "model", "device", "type", "context", "on disk", "KV caches", "min dB", "min dB (simulated)",
               "verdict"]  # fmt: skip
    return table("", columns, rows)


def render(title: str, pages: list[Page], index: Table | None) -> str:
    """Fill the template. A browser runs only the scripts of this package: their hashes are in the page's own policy."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)  # fmt: skip
    template = environment.from_string(resource("page.html.j2"))
    charts = [c for page in pages for section in page.sections for c in section.charts]
    scripts = [bokeh_script(), resource("page.js")] if charts else [resource("page.js")]
    policy = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return template.render(title=title, pages=pages, index=index, version=__version__, policy=policy,
                           css=Markup(resource("page.css")), scripts=[Markup(s) for s in scripts],
                           data=lambda value: Markup(script_json(value)))  # fmt: skip


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin a comment."""
    found = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return found


def resource(name: str) -> str:
    """A file of this package."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def bokeh_script() -> str:
    """Bokeh's JavaScript from its wheel. Raises RuntimeError should it ever hold what ends a script element."""
    import bokeh

    found = (Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js").read_text("utf-8")
    found = "\n".join(line for line in found.splitlines() if not line.startswith("//# sourceMappingURL"))
    if "</script" in found.lower() or "<!--" in found:
        raise RuntimeError("bokeh.min.js cannot stand inside a page")
    return found


def write(path: Path, html: str) -> None:
    """Write a page, all of it or nothing. Raises RingstepError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, html, errors="replace")
    except OSError as error:
        raise RingstepError(f"{path} cannot be written: {error.strerror or error}") from None
