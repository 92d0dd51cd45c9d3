"""ringstep report: what the page says is what the files say, and it needs nothing from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from export_runs import run
from report_folders import CONTEXT, DIM, ENGINES, HEADS, LAYERS, SANITISED, TOKENS, TRACED, operations, write_artifact
from report_page import PageParser, check_closed, read_page

COMMANDS = [f"ringstep {c}" for c in ("parity bare", "parity bare --stages", "parity bare --drift", "bisect bare")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """full/ with every file, bare/ with none but the export's."""
    home = tmp_path_factory.mktemp("reports") / "gallery"
    home.mkdir()
    write_artifact(home / "full", quantised=True)
    nothing: dict[str, Any] = dict.fromkeys(
        ["parity__json", "parity_stages__json", "drift__json", "bisect__json", "profile__json", "sanitize__json"])
    write_artifact(home / "bare", **nothing)
    return home


@pytest.fixture(scope="module")
def full(folder: Path) -> PageParser:
    assert run("report", folder / "full", "-q") == 0
    return read_page(folder / "full" / "report.html")


@pytest.fixture(scope="module")
def bare(folder: Path) -> PageParser:
    assert run("report", folder / "bare", "-q", "-o", folder.parent / "bare.html") == 0
    return read_page(folder.parent / "bare.html")


def kv(context: int, flat: bool) -> int:
    """Keys and values of all layers in float16, counted here."""
    kept = [context - 1 if flat or window is None else min(context, window) - 1 for _, window in LAYERS]
    return sum(2 * HEADS * DIM * n * 2 for n in kept)


def test_nothing_comes_from_outside(full: PageParser, bare: PageParser) -> None:
    check_closed(full)
    check_closed(bare)


def test_memory_by_context(full: PageParser) -> None:
    table = full.table("context", "saved")
    by_context = {int(float(s[0])): [float(v) for v in s[1:3]] for s in table.sorts}
    assert set(by_context) == {CONTEXT, 1024, 4096, 8192, 32768, 131072, 1048576}
    for context, sizes in by_context.items():
        assert sizes == [kv(context, False), kv(context, True)]
    assert table.column("saved")[-1] == f"{kv(1048576, True) / kv(1048576, False):.2f}x"
    assert "3 of 4 layers keep a window of 16 tokens" in full.text


def test_operations_before_and_after(full: PageParser) -> None:
    table = full.table("operation", "as traced", "sanitised", "on the NPU")
    before, after = operations(TRACED), operations(SANITISED)
    assert {row[0] for row in table.rows} == set(before) | set(after)
    for kind, traced, sanitised, change, npu in table.rows:
        assert int(traced) == before[kind] and int(sanitised) == after[kind]
        assert int(change or 0) == after[kind] - before[kind]
        assert npu == (str(after[kind]) if after[kind] else "")
    assert full.table("graph", "pass", "changes").rows == [["decode.onnx", "fuse-gelu", "3", "two nodes became one"]]


def test_bits_by_layer(full: PageParser, bare: PageParser) -> None:
    bars = next(v for v in full.charts.values() if "layer 1" in json.dumps(v))
    assert '"value",[8.5,8.0,4.0,8.0,8.0]' in json.dumps(bars, separators=(",", ":"))
    assert "qdq: 7.010 bits a weight, 29.1 kB on disk" in full.text and "a range was cut" in full.text
    assert "nothing was quantised" in bare.text


def test_parity_figures(full: PageParser, folder: Path) -> None:
    reports = json.loads((folder / "full" / "parity.json").read_text())
    table = full.table("engine", "verdict", "worst cache")
    assert table.column("engine") == ["ort", "qnn-sim simulated"]
    for row, report in zip(table.sorts, reports, strict=True):
        own = dict(zip(table.columns, row, strict=True))
        s = report["summary"]
        assert [float(own[k]) for k in ("tokens", "min dB", "median", "limit", "worst cache", "top-1 %", "KL")] == [
            s["tokens"], s["snr_db"]["min"], s["snr_db"]["median"], 35, s["caches_db"]["min"], 100 * s["top1"],
            s["kl"]["mean"]]  # fmt: skip
    positions = full.table("engine", "position", "token")
    assert len(positions.rows) == TOKENS * len(ENGINES)
    assert positions.column("top-1").count("ambiguous") == 2
    assert full.table("prompt", "original").rows == [["qnn-sim simulated", "Where?", "Here.", "Here.", "equal"]]


def test_every_chart_is_there_and_simulated_ones_say_so(full: PageParser) -> None:
    titles = ["Logits SNR by position", "Cache SNR by layer", "Logits SNR by stage",
              "Logits SNR by position and stage", "Cache SNR by layer and stage", "Logits SNR along the text",
              "SNR along the depth", "KV memory by context",
              "Bits a weight by layer: qdq", "Operations by kind, one decode step", "Seconds by stage"]  # fmt: skip
    shown = [value for tag, name, value in full.attributes if tag == "div" and name == "aria-label"]
    shown = [value for value in shown if value in titles]
    assert shown == titles and len(full.charts) == len(titles)
    stages = full.table("stage", "engine", "tokens")
    assert stages.column("stage") == ["recipe", "onnx", "sanitised", "compiled simulated"]
    assert "qnn-sim (simulated): -0.20 dB in 100 tokens" in full.text
    for part in (text for text in full.text.split("\n") if "qnn-sim passed" in text):
        assert "simulated" in part


def test_what_is_missing_names_its_command(bare: PageParser) -> None:
    absent = bare.text[bare.text.index("Not measured yet") :]
    for command in COMMANDS:
        assert f": {command}\n" in absent + "\n", command
    assert "a phone's profile" in absent
    assert len(bare.charts) == 3  # memory, operations, timings


def test_versions_and_origin(full: PageParser) -> None:
    assert ["onnx", "1.2.3"] in full.table("package", "version").rows
    made = full.table("option", "value").rows
    assert ["model", "tiny-model"] in made and ["device", "galaxy-s25"] in made
    assert ["onnx/weights.bin", "200 kB", "onnx"] in full.table("file", "size").rows


def test_an_index_of_artifacts(folder: Path, full: PageParser, bare: PageParser, tmp_path: Path) -> None:
    out = tmp_path / "new" / "all.html"
    assert run("report", folder, "-o", out, "-q") == 0
    page = read_page(out)
    check_closed(page)
    index = page.table("artifact", "on disk")
    assert index.column("artifact") == ["bare", "full"] and index.column("verdict") == ["", "passed"]
    assert float(index.sorts[1][index.columns.index("min dB (simulated)")]) == pytest.approx(41, abs=0.2)
    assert len(page.charts) == len(full.charts) + len(bare.charts)
    links = [v for tag, name, v in page.attributes if tag == "a" and name == "href"]
    targets = {v for _, name, v in page.attributes if name == "id"}
    assert all(link[1:] in targets for link in links)
    assert len(targets) == len([v for _, name, v in page.attributes if name == "id"])


def test_json_and_what_it_refuses(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.html"
    assert run("report", folder / "full", "-o", out, "--json", "-q") == 0
    body = json.loads(capsys.readouterr().out)
    assert body == {"file": str(out), "bytes": out.stat().st_size, "artifacts": ["full"], "charts": 11, "problems": {}}
    (tmp_path / "empty").mkdir()
    bad_folders = {tmp_path / "empty": "holds no artifact", tmp_path / "none": "is not there", out: "is no folder"}
    for bad, words in bad_folders.items():
        assert run("report", bad, "-q") == 2
        captured = capsys.readouterr()
        assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_failed_write_leaves_the_old_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.html"
    out.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", str(out))

    monkeypatch.setattr("ringstep.files.os.replace", fail)
    assert run("report", folder / "bare", "-o", out, "-q") == 2
    assert out.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_parity_writes_a_page_of_its_own(folder: Path, tmp_path: Path) -> None:
    from exporters.report_html.page import parity_report, write

    reports = json.loads((folder / "full" / "parity.json").read_text())[1:]
    write(tmp_path / "p.html", parity_report(folder / "bare", reports))
    page = read_page(tmp_path / "p.html")
    check_closed(page)
    assert page.table("engine", "min dB").column("engine") == ["qnn-sim simulated"]
    assert len(page.charts) == 2 and "KV memory" not in page.text


def test_the_wheel_carries_template_style_and_script() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    package = root / "exporters" / "report_html"
    carried = {file.name for pattern in patterns for file in package.glob(pattern)}
    assert {f.name for f in package.iterdir() if f.is_file() and f.suffix != ".py"} == carried


def test_help_imports_neither_bokeh_nor_jinja() -> None:
    code = "import sys, exporters.cli; print([m for m in ('bokeh', 'jinja2', 'onnx', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
