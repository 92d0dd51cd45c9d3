"""ringstep report of folders that mean harm or are broken: a page all the same, and nothing in it runs or asks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from export_runs import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_folders import EVIL, evil_artifact, parity, write_artifact
from report_page import check_closed, read_page

MEASURED = ("parity.json", "parity_stages.json", "drift.json", "bisect.json", "profile.json", "sanitize.json")
SIZES = ("quantize/sizes.json", "quantize/report.json")


def test_markup_in_every_text_is_text(tmp_path: Path) -> None:
    folder = evil_artifact(tmp_path / "<b onclick=1>x")
    assert run("report", folder, "-q") == 0
    page = read_page(folder / "report.html")
    check_closed(page)
    assert "<script>window.owned=1</script>" in page.text and "{{ 7*7 }}" in page.text and "49" not in page.tags
    assert len(page.charts) == 11
    for chart in page.charts.values():
        assert "$$" not in json.dumps(chart)  # Bokeh would fetch a library for TeX


FILES = [*MEASURED, *SIZES, "manifest.json", "step.json", "onnx/decode.onnx"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_broken_files_are_lines(tmp_path: Path, body: bytes) -> None:
    folder = write_artifact(tmp_path / "a", quantised=True)
    for name in FILES:
        (folder / name).write_bytes(body)
    assert run("report", folder, "-q") == 0
    page = read_page(folder / "report.html")
    check_closed(page)
    problems = page.text[page.text.index("Could not be read\n") :]
    for name in FILES:
        assert name in problems, name
    assert str(tmp_path) not in page.text


@pytest.mark.parametrize("body", ["null", "[]", "{}", '{"stages": 1e999, "a": NaN}', "[[[1]]]", '"text"', "7"])
def test_json_of_another_shape_shows_nothing(tmp_path: Path, body: str) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "quantize").mkdir()
    for name in [*MEASURED, *SIZES]:
        (folder / name).write_text(body)
    assert run("report", folder, "-q") == 0
    page = read_page(folder / "report.html")
    assert page.charts == {} and "Not measured yet" in page.text


def test_pipes_and_huge_files_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "parity.json").write_text("[]")
    pipes, huge = ["drift.json", "bisect.json"], ["parity_stages.json", "profile.json"]
    for name in pipes:
        os.mkfifo(folder / name)
    for name in huge:
        with (folder / name).open("wb") as stream:
            stream.truncate(65_000_000)  # a hole: takes no disk
    assert run("report", folder, "-q") == 0
    text = read_page(folder / "report.html").text
    for name in pipes:
        assert f"{name} is not an ordinary file" in text
    for name in huge:
        assert f"{name} is 65000000 bytes, far more than it can need" in text


def test_very_many_positions_stay_a_page(tmp_path: Path) -> None:
    report = parity("ort", False, 60.0, 20_000)
    report["positions"][11_234]["snr_db"] = 3.25  # what counts must survive the thinning
    folder = write_artifact(tmp_path / "a", parity__json=[report] * 3)
    assert run("report", folder, "-q") == 0
    path = folder / "report.html"
    page = read_page(path)
    assert path.stat().st_size < 4_000_000
    assert "59,600 more rows" in page.text
    assert max(len(table.rows) for table in page.tables) == 400
    assert any("3.25" in json.dumps(chart) for chart in page.charts.values())


def test_numbers_that_are_none(tmp_path: Path) -> None:
    report = parity("ort", False, 60.0, 6)
    odd = ["NaN", "Infinity", "-Infinity", "1e400", str(10**400), "true"]
    text = json.dumps([report])
    for position, number in zip(report["positions"], odd, strict=True):
        text = text.replace(f'"snr_db": {position["snr_db"]},', f'"snr_db": {number},')
    folder = write_artifact(tmp_path / "a", parity__json=text)
    assert run("report", folder, "-q") == 0
    page = read_page(folder / "report.html")
    assert "dB" not in page.table("engine", "position", "token").columns
    for _, script in page.scripts:
        assert "NaN" not in script or "Bokeh" in script


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
                   st.sampled_from([300.0, -300.0, 1e300, EVIL]))  # fmt: skip
KEYS = st.sampled_from([
    "summary", "positions", "caches", "answer", "engine", "simulated", "snr_db", "min", "top1", "layer", "position",
    "stages", "stage", "before", "teacher_forced", "free_running", "slope_db_per_100", "depth", "nodes", "first",
    "verdict", "warnings", "failures", "windows", "feedings", "qdq", "parameters", "path", "shape", "bits", "bytes",
    "sinks", "changes", "key_db", "value_db", "decode.onnx", "token", "kl", "mean", "passed", "threshold_db",
])  # fmt: skip
JSON = st.recursive(LEAVES, lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=6)), max_leaves=30)  # fmt: skip


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("any") / "a"
    (folder / "quantize").mkdir(parents=True)
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*MEASURED, *SIZES], JSON)))
def test_any_json_gives_a_page(stable: Path, files: dict[str, Any]) -> None:
    from exporters.report_html.page import report_of

    for name in [*MEASURED, *SIZES]:
        (stable / name).write_text(json.dumps(files.get(name, {})))
    assert report_of(stable).html.endswith("</html>")


def test_links_out_of_the_folder_show_no_other_file(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a", profile__json=None)
    (tmp_path / "secret.json").write_text('{"word": "opensesame"}')
    (folder / "profile.json").symlink_to(tmp_path / "secret.json")
    assert run("report", folder, "-q") == 0
    page = read_page(folder / "report.html")
    assert "opensesame" not in page.text and "leads out of the folder" in page.text


def test_json_inside_a_page_cannot_end_its_element() -> None:
    from exporters.report_html.page import script_json

    value = {EVIL: ["</SCRIPT>", "<!--", "]]>", "\u2028\u2029", "&lt;", "\ud800"]}
    found = script_json(value)
    assert not set(found) & set("<>&\u2028\u2029") and json.loads(found) == value and found.isascii()
    with pytest.raises(ValueError):
        script_json([float("nan")])
