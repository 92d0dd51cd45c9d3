"""What a page is made of: cards, tables, charts and lines. Nothing here is HTML; the template escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringstep import console
from ringstep.parity.metrics import SILENT_DB

ROWS = 400  # of a table; what lies beyond is counted, not shown


@dataclass(frozen=True)
class Cell:
    """A table's cell: what it shows, what it sorts by, and how it looks (`good`, `bad`, `simulated`, `code`)."""

    text: str
    sort: float | str = ""
    look: str = ""
    href: str = ""
    share: float | None = None
    """0 to 1: a bar behind the figure."""

    @property
    def numeric(self) -> bool:
        """Whether it sorts by a number."""
        return isinstance(self.sort, int | float)


@dataclass(frozen=True)
class Table:
    """A table that sorts by any column; `hidden` rows were left out."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    hidden: int = 0
    closed: bool = False
    """Folded away until it is asked for."""

    @property
    def narrow(self) -> bool:
        """Whether half a desk is enough, by the characters of the longest cells."""
        widths = [max([len(name) + 2, *(min(30, len(row[i].text)) for row in self.rows)]) + 2
                  for i, name in enumerate(self.columns)]  # fmt: skip
        return not self.closed and sum(widths) <= 70

    is_chart = False

    def numeric(self, index: int) -> bool:
        """Whether a column holds numbers, which align right."""
        cells = [row[index] for row in self.rows if row[index].text]
        return bool(cells) and all(cell.numeric for cell in cells)


@dataclass(frozen=True)
class Key:
    """One entry of a chart's key: the series' label and its colour (an index of the palette)."""

    label: str
    colour: int
    dashed: bool = False
    simulated: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart: Bokeh's own JSON, with a key and a description in HTML, which wraps on a phone."""

    title: str
    note: str
    key: list[Key]
    height: int
    item: dict[str, Any]
    simulated: bool = False
    narrow = True
    is_chart = True


@dataclass(frozen=True)
class Card:
    """One figure of the summary at the top."""

    label: str
    value: str
    note: str = ""
    look: str = ""


@dataclass
class Section:
    """A part of an artifact's page; `missing` says which command would fill it."""

    id: str
    title: str
    lead: str = ""
    lines: list[tuple[str, str]] = field(default_factory=list)
    """(look, text): `good`, `bad`, `note`."""
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(what is not there, the command that makes it)."""

    @property
    def blocks(self) -> list[tuple[str, Chart | Table]]:
        """Charts, then tables, each `half` a desk's width where two of them share a row, else `whole`."""
        parts: list[Chart | Table] = [*self.charts, *self.tables]
        found: list[tuple[str, Chart | Table]] = []
        at = 0
        while at < len(parts):
            pair = parts[at : at + 2]
            if len(pair) == 2 and all(part.narrow for part in pair):
                found += [("half", part) for part in pair]
                at += 2
            else:
                found.append(("whole", parts[at]))
                at += 1
        return found

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show but what is missing."""
        return not (self.lines or self.charts or self.tables)


@dataclass
class Page:
    """One artifact: its name, a line under it, cards and sections."""

    id: str
    name: str
    subtitle: str
    cards: list[Card]
    sections: list[Section]
    command_target: str = ""


def table(title: str, columns: Sequence[str], rows: Sequence[list[Cell]], closed: bool = False,
          left_out: int = 0) -> Table:  # fmt: skip
    """A table of at most ROWS rows without its empty columns; `left_out` counts rows that were not made at all."""
    kept = [i for i in range(len(columns)) if any(row[i].text for row in rows[:ROWS])]
    shown = [[row[i] for i in kept] for row in rows[:ROWS]]
    return Table(title, [columns[i] for i in kept], shown, max(0, len(rows) - ROWS) + left_out, closed)


def plain(value: str, look: str = "") -> Cell:
    """A cell of text."""
    return Cell(value, value.lower(), look)


def figure(value: float | None, form: str = "{:.1f}", look: str = "") -> Cell:
    """A cell of a number; empty for None, which sorts below all."""
    return Cell("", float("-inf")) if value is None else Cell(form.format(value), value, look)


def decibels(value: float | None, look: str = "") -> Cell:
    """A cell of an SNR in dB; 300 and -300 stand for what has none."""
    if value is None or abs(value) < SILENT_DB:
        return figure(value, "{:.1f}", look)
    return Cell("identical" if value > 0 else "not finite", value, look if value > 0 else "bad")


def count(value: float | None) -> Cell:
    """A cell of a whole number."""
    return figure(value, "{:,.0f}")


def size(value: float | None, largest: float | None = None) -> Cell:
    """A cell of bytes, with a bar where the column's largest is given."""
    if value is None:
        return figure(None)
    return Cell(console.human_bytes(value), value, share=value / largest if largest else None)


def seconds(value: float | None, largest: float | None = None) -> Cell:
    """A cell of a duration, with a bar where the column's largest is given."""
    if value is None:
        return figure(None)
    return Cell(console.human_seconds(value), value, share=value / largest if largest else None)
