"""ringstep report in Chromium: drawn, sortable, silent, at a phone's and a desk's width, light and dark.

tests/browser/look.mjs drives it; `make env` installs the browser by npm. Screenshots stay in build/report-screenshots.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from export_runs import run
from report_folders import evil_artifact, write_artifact

ROOT = Path(__file__).parents[2]
BROWSER = ROOT / "tests" / "browser"
SHOTS = ROOT / "build" / "report-screenshots"
NO_BROWSER = 77
VIEWS = [(360, "light"), (360, "dark"), (1200, "light"), (1200, "dark")]
GROUNDS = {"light": "rgb(245, 246, 248)", "dark": "rgb(14, 17, 22)"}


def absent(reason: str) -> Any:
    """Skip, or fail where a browser is promised."""
    if os.environ.get("RINGSTEP_NEED_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


def look(page: Path, wanted: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """What Chromium saw of a page, a view each."""
    if shutil.which("node") is None or not (BROWSER / "node_modules").is_dir():
        absent("no browser: needs node, and npm install in tests/browser (make env does it)")
    home = ROOT / "build" / "browser"  # where the package unpacks its browser, once
    home.mkdir(parents=True, exist_ok=True)
    ran = subprocess.run(["node", BROWSER / "look.mjs", page, SHOTS, *(f"{w}-{s}" for w, s in wanted)],
                         capture_output=True, text=True, timeout=500,
                         env=os.environ | {"TMPDIR": str(home)})  # fmt: skip
    if ran.returncode == NO_BROWSER:
        absent(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr[-3000:]
    views: list[dict[str, Any]] = json.loads(ran.stdout)["views"]
    assert [(v["width"], v["scheme"]) for v in views] == wanted
    return views


def check(views: list[dict[str, Any]], page: Path, charts: int) -> None:
    """What holds of every page."""
    for view in views:
        assert view["errors"] == [] and view["requests"] == [page.resolve().as_uri()], view
        assert view["overflow"] == 0, "the page must not scroll sideways"
        assert view["background"] == GROUNDS[view["scheme"]]
        assert view["owned"] is None and view["images"] == 0 and view["scripts"] == 2
        assert len(view["plots"]) == charts
        for plot in view["plots"]:
            assert plot["inked"] > 1500 and 250 < plot["width"] < view["width"], plot
        assert view["sorted"]["wrong"] == [] and view["sorted"]["clicks"] > 2 * view["tables"]
        assert view["recoloured"], "charts must follow the colour scheme"
        assert Path(view["screenshot"]).stat().st_size > 20_000


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    write_artifact(tmp_path / "full", quantised=True)
    page = tmp_path / "report.html"
    assert run("report", tmp_path / "full", "-o", page, "-q") == 0
    views = look(page, VIEWS)
    check(views, page, 11)
    for view in views:
        assert "ort" in view["hover"] and "dB" in view["hover"], "a pointer over the first chart must be answered"


def test_a_hostile_page_in_a_browser(tmp_path: Path) -> None:
    folder = evil_artifact(tmp_path / "evil")
    page = tmp_path / "hostile.html"
    assert run("report", folder, "-o", page, "-q") == 0
    check(look(page, VIEWS[1:3]), page, 11)
