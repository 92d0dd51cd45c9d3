"""Charts by Bokeh, whose JavaScript comes in its wheel: each is drawn to the width it finds and recoloured by page.js.

Colours are set in the page, light or dark; here every glyph carries a tag, `c0` for the first series, `limit` for a
threshold. Titles and keys are HTML, for they must wrap on a phone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exporters.report_html.parts import Chart, Key

POINTS = 1000  # of a line; a screen has no more columns
LABEL = 34  # characters of a bar's name


@dataclass(frozen=True)
class Line:
    """A series over x; None leaves a gap. `marks` are the x where something is to be pointed at."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int
    simulated: bool = False
    dashed: bool = False
    points: bool = False
    marks: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Bars:
    """A series of bars, a value for each name; None leaves one out."""

    label: str
    values: Sequence[float | None]
    colour: int
    simulated: bool = False


def plain_label(label: str) -> str:
    """A label that Bokeh takes for nothing but text: no TeX, which it would fetch a library for, no templates."""
    kept = "".join(" " if c in "$@{}\\<>" else c for c in label)
    return kept if len(kept) <= LABEL else kept[: LABEL - 1] + "…"


def lines(title: str, series: Sequence[Line], *, note: str = "", x: str = "position", unit: str = "dB",
          form: str = ".1f", limit: float | None = None, log: bool = False, ticks: dict[float, str] | None = None,
          names: dict[float, str] | None = None) -> Chart | None:  # fmt: skip
    """Lines over a numeric x, `ticks` naming places of its axis, `names` its values; None when there is no point."""
    from bokeh.models import BasicTicker, ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter
    from bokeh.models.annotations import Span
    from bokeh.plotting import figure

    series = [thinned(s) for s in series if any(v is not None for v in s.y)]
    if not series:
        return None
    scale: Any = {"x_axis_type": "log", "y_axis_type": "log"} if log else {}
    plot = figure(height=270, sizing_mode="stretch_width", toolbar_location=None, tools="", **scale)
    every = sorted({at for s in series for at in s.x})
    values = [v for s in series for v in s.y if v is not None]
    columns: dict[str, list[Any]] = {"x": every, "y": [values[0]] * len(every)}
    known = (ticks or {}) | (names or {})
    columns["name"] = [plain_label(known[at]) if at in known else f"{at:g}" for at in every]
    tooltips = [(x, "@name")]
    for index, s in enumerate(series):
        at = dict(zip(s.x, s.y, strict=False))
        data = ColumnDataSource({"x": list(s.x), "y": [math.nan if v is None else v for v in s.y]})
        drawn = plot.line("x", "y", source=data, line_width=2, line_dash="dashed" if s.dashed else "solid")
        drawn.glyph.tags = [f"c{s.colour}"]
        if s.points or len(s.x) == 1:
            plot.scatter("x", "y", source=data, size=6).glyph.tags = [f"c{s.colour}"]
        marks = [(m, at[m]) for m in s.marks if at.get(m) is not None]
        if marks:
            spots = ColumnDataSource({"x": [m[0] for m in marks], "y": [m[1] for m in marks]})
            plot.scatter("x", "y", source=spots, size=10, fill_alpha=0, line_width=2).glyph.tags = ["mark"]
        columns[f"s{index}"] = ["–" if (v := at.get(e)) is None else f"{v:{form}} {unit}".strip() for e in every]
        tooltips.append((plain_label(s.label), f"@s{index}"))
    # One line that nobody sees answers for all, so that a finger gets one box with every series.
    probe: Any = plot.line("x", "y", source=ColumnDataSource(columns), line_alpha=0)
    if len(every) == 1:
        probe = plot.scatter("x", "y", source=ColumnDataSource(columns), size=12, alpha=0)
    probe.level = "underlay"
    plot.add_tools(HoverTool(renderers=[probe], tooltips=tooltips, mode="vline" if len(every) > 1 else "mouse",
                             line_policy="nearest", point_policy="follow_mouse", limit=1))  # fmt: skip
    if limit is not None:
        span = Span(location=limit, dimension="width", line_dash="dotted", line_width=2)
        span.tags = ["limit"]
        plot.add_layout(span)
        values.append(limit)
    if log:
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    else:
        low, high = min(values), max(values)
        room = max(high - low, 1e-9 + abs(high) * 0.02) * 0.08
        plot.y_range.start, plot.y_range.end = low - room, high + room  # type: ignore[attr-defined]
    if not log:
        plot.xaxis.ticker = BasicTicker(desired_num_ticks=5, min_interval=1)  # positions and layers are whole
    if ticks:
        plot.xaxis.ticker = FixedTicker(ticks=sorted(ticks))
        plot.xaxis.major_label_overrides = {k: plain_label(v) for k, v in ticks.items()}
    keys = [Key(s.label, s.colour, s.dashed, s.simulated) for s in series]
    return finished(plot, title, note, keys, 270)


def bars(title: str, names: Sequence[str], series: Sequence[Bars], *, note: str = "", unit: str = "",
         texts: Sequence[Sequence[str]] | None = None, whole: bool = False, simulated: bool = False,
         ) -> Chart | None:  # fmt: skip
    """Horizontal bars from 0, a group for each name from the top down.

    `texts` are the values as written, by series; `whole` values are counts; `simulated` says that some of them are.
    """
    from bokeh.models import BasicTicker, ColumnDataSource, FactorRange, HoverTool
    from bokeh.plotting import figure
    from bokeh.transform import dodge

    series = [s for s in series if any(v is not None for v in s.values)]
    if not series or not names:
        return None
    factors = distinct([plain_label(name) or "–" for name in names])
    step = 26 if len(series) == 1 else 14 * len(series) + 8
    height = 56 + step * len(factors)
    plot = figure(height=height, sizing_mode="stretch_width", toolbar_location=None, tools="",
                  y_range=FactorRange(factors=factors[::-1]))  # fmt: skip
    lowest = min(v for s in series for v in s.values if v is not None)
    largest = max(v for s in series for v in s.values if v is not None)
    thick = 0.78 / len(series)
    for index, s in enumerate(series):
        rows = [(f, v, texts[index][i] if texts else f"{v:,.6g} {unit}".strip())
                for i, (f, v) in enumerate(zip(factors, s.values, strict=True)) if v is not None]  # fmt: skip
        data = ColumnDataSource({"name": [r[0] for r in rows], "value": [r[1] for r in rows],
                                 "text": [r[2] for r in rows]})  # fmt: skip
        offset = (len(series) - 1) * thick / 2 - index * thick
        drawn = plot.hbar(y=dodge("name", offset, range=plot.y_range), right="value", left=0, source=data,
                          height=thick * 0.9, line_alpha=0)  # fmt: skip
        drawn.glyph.tags = [f"c{s.colour}"]
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=[("", "@name"), (plain_label(s.label), "@text")]))
    plot.x_range.start = min(0.0, lowest)  # type: ignore[attr-defined]
    plot.x_range.end = (largest if largest > 0 else 1.0) * 1.04  # type: ignore[attr-defined]
    plot.ygrid.visible = False
    plot.xaxis.ticker = BasicTicker(desired_num_ticks=5, min_interval=1 if whole else 0)
    keys = [Key(s.label, s.colour, False, s.simulated) for s in series]
    return finished(plot, title, note, keys, height, simulated)


def finished(plot: Any, title: str, note: str, keys: list[Key], height: int, simulated: bool = False) -> Chart:
    """The parts that all charts share, and the chart as JSON."""
    from bokeh.embed import json_item

    plot.min_border_right, plot.min_border_left = 12, 4
    plot.outline_line_color = None
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    plot.axis.minor_tick_line_color = None
    plot.axis.major_label_text_font_size = "12px"
    plot.axis.major_label_text_font = "system-ui, sans-serif"
    plot.toolbar.logo = None
    item: dict[str, Any] = dict(json_item(plot))
    return Chart(title, note, keys, height, item, simulated or any(k.simulated for k in keys))


def thinned(line: Line) -> Line:
    """A line of at most POINTS points: of each stretch the lowest stays, for it is the one that counts."""
    if len(line.x) <= POINTS:
        return line
    stretch = -(-len(line.x) // POINTS)
    keep = []
    for at in range(0, len(line.x), stretch):
        group = range(at, min(at + stretch, len(line.x)))
        keep.append(min(group, key=lambda i: math.inf if (v := line.y[i]) is None else v))
    marks = set(line.marks) & {line.x[i] for i in keep}
    return dataclasses.replace(line, x=[line.x[i] for i in keep], y=[line.y[i] for i in keep], marks=sorted(marks))


def distinct(names: list[str]) -> list[str]:
    """Names that differ, as a categorical axis needs: a repeated one gets its number."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name} ({seen[name]})"
        while label in found:
            label += "′"
        found.append(label)
    return found
