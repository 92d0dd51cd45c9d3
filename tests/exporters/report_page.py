"""A report's HTML as the tests read it: by the standard library's parser, not by the code that wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "base", "hr", "embed", "source"}


@dataclass
class Table:
    """Column names, rows of texts, rows of what each cell sorts by."""

    title: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    sorts: list[list[str]] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        """The texts of a column."""
        at = self.columns.index(name)
        return [row[at] for row in self.rows]


class PageParser(HTMLParser):
    """Tags, attributes, tables, scripts; `unclosed` are tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[Table] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.stack: list[str] = []
        self.unclosed: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        self.unclosed += self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        own = {k: v or "" for k, v in attrs}
        self.attributes += [(tag, k, v) for k, v in own.items()]
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "div" and own.get("role") == "region":
            self.tables.append(Table(own["aria-label"]))
        elif tag == "th":
            self.tables[-1].columns.append("")
        elif tag == "tr" and "tbody" in self.stack:
            self.tables[-1].rows.append([])
            self.tables[-1].sorts.append([])
        elif tag == "td":
            self.tables[-1].rows[-1].append("")
            self.tables[-1].sorts[-1].append(own["data-sort"])
        elif tag == "script":
            self.scripts.append((own, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.stack or self.stack.pop() != tag:
            self.unclosed.append(tag)

    def handle_data(self, data: str) -> None:
        if "script" in self.stack:
            own, text = self.scripts[-1]
            self.scripts[-1] = (own, text + data)
            return
        if "style" not in self.stack:
            self.text += data
        if "td" in self.stack:
            self.tables[-1].rows[-1][-1] += data
        elif "th" in self.stack:
            self.tables[-1].columns[-1] += data

    @property
    def charts(self) -> dict[str, Any]:
        """Bokeh's JSON of each chart by the place it is drawn to."""
        found = [(own, text) for own, text in self.scripts if own.get("type") == "application/json"]
        return {own["data-plot"]: json.loads(text) for own, text in found}

    def table(self, *columns: str, title: str | None = None) -> Table:
        """The one table with these columns, among others."""
        found = [t for t in self.tables if set(columns) <= set(t.columns) and title in (None, t.title)]
        assert len(found) == 1, [(t.title, t.columns) for t in self.tables]
        return found[0]


def read_page(path: Path) -> PageParser:
    """Parse a page; it must nest."""
    parser = PageParser(path.read_text("utf-8"))
    assert parser.unclosed == [], parser.unclosed[:5]
    return parser


def check_closed(page: PageParser) -> None:
    """Nothing in the page can ask a network for anything, or run a script that is not ringstep's own."""
    import base64
    import hashlib

    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "formaction", "data", "background", "poster"), (tag, name, value)
        assert not name.startswith("on"), (tag, name, value)
        if name in ("href", "xlink:href"):
            assert value.startswith("#") or value == "data:,", (tag, value)
    assert not set(page.tags) & {"img", "iframe", "object", "embed", "base", "form", "video", "audio", "frame"}
    policy = next(v for tag, name, v in page.attributes if tag == "meta" and name == "content" and "default-src" in v)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "unsafe" not in rules["script-src"] and "http" not in policy
    running = [text for own, text in page.scripts if own.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    assert sorted(rules["script-src"].split()) == sorted(f"'sha256-{h}'" for h in hashes)
