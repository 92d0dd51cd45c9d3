import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_runs import contents, stage, writes

from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.manifest import Manifest, StageRecord, changed_files, open_folder
from ringstep.stage import run_stage


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("!")
    with pytest.raises(RingstepError, match=r"not ringstep's \(thesis\.tex\)"), open_folder(tmp_path):
        pass
    assert set(contents(tmp_path)) == {"thesis.tex"}
    with pytest.raises(RingstepError, match="not a folder"), open_folder(tmp_path / "thesis.tex"):
        pass
    with pytest.raises(RingstepError, match="no artifact; give the folder of an export"):
        Manifest.load(tmp_path)


def test_changed_files_are_named(tmp_path: Path) -> None:
    stage(tmp_path, writes({"x": "1", "sub/y": "22"}))
    assert changed_files(Manifest.load(tmp_path)) == []
    (tmp_path / "x").write_text("123")
    (tmp_path / "sub" / "y").unlink()
    lines = changed_files(Manifest.load(tmp_path))
    assert sorted(line.removeprefix(str(tmp_path)) for line in lines) == [
        "/sub/y is missing, export again", "/x has 3 bytes where manifest.json says 1, export again",
    ]  # fmt: skip


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))


BAD_PATHS = ["/etc/passwd", "../secret", "a/../../secret", "", ".", "./x", "a//b", "..", "a\0b", "\ud800"]
BAD_PATHS += ["..\\secret", ".ringstep.lock", "manifest.json", "link/secret", "leaf"]


@pytest.mark.parametrize("bad", BAD_PATHS)
def test_hostile_paths_are_refused_on_load(tmp_path: Path, bad: str) -> None:
    folder = tmp_path / "artifact"
    stage(folder, writes({"x": "1"}))
    (tmp_path / "secret").write_text("!")
    (folder / "link").symlink_to(tmp_path)
    (folder / "leaf").symlink_to(tmp_path / "secret")
    outputs = {bad: {"sha256": "0" * 64, "bytes": 1}}
    edit(folder, lambda data: data["stages"]["a"].update(outputs=outputs))
    with pytest.raises(RingstepError, match=r"bad path|leads out"):
        Manifest.load(folder)
    with pytest.raises(RingstepError, match=r"bad path|leads out"):
        stage(folder, writes({"x": "2"}))
    assert (tmp_path / "secret").read_text() == "!"


def test_a_link_planted_after_loading_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "y").write_text("!")
    stage(folder, writes({"sub/y": "1"}), v=1)
    with open_folder(folder) as manifest:
        (folder / "sub" / "y").unlink()
        (folder / "sub").rmdir()
        (folder / "sub").symlink_to(tmp_path / "secret")
        for files in ({"x": "1"}, {"a": "1", "sub/y": "1"}):
            with pytest.raises(RingstepError, match="leads out"):
                run_stage(manifest, "a", inputs={}, options={"v": 2}, versions={}, build=writes(files))
            assert not (folder / "a").exists()
    assert contents(tmp_path / "secret") == {"y": b"!"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), r"version 2; this ringstep reads up to 1"),
        (lambda d: d.update(version=True), "version True"),
        (lambda d: d.update(version="1"), "version '1'"),
        (lambda d: d.update(format="webapp"), "not written by ringstep"),
        (lambda d: d.update(folder="/"), "key 'folder' is unknown"),
        (lambda d: d.update(locked=1), "key 'locked' is unknown"),
        (lambda d: d.pop("stages"), "key 'stages' is missing"),
        (lambda d: d.update(stages=[]), "stages has the wrong type"),
        (lambda d: d.update(checkpoint={"a": 1}), "checkpoint must hold strings"),
        (lambda d: d["stages"].update(a=3), "not an object"),
        (lambda d: d["stages"].update(b=d["stages"]["a"]), "bad name"),
        (lambda d: d["stages"]["a"].pop("key"), "key 'key' is missing"),
        (lambda d: d["stages"]["a"].update(seconds="1"), "seconds has the wrong type"),
        (lambda d: d["stages"]["a"].update(seconds=float("nan")), "NaN is not a number"),
        (lambda d: d["stages"]["a"].update(peak_rss_anon_bytes=True), "wrong type"),
        (lambda d: d["stages"]["a"].update(peak_rss_anon_bytes=10**400), "peak_rss_anon_bytes is no size"),
        (lambda d: d["stages"]["a"].update(seconds=-1), "seconds is no size"),
        (lambda d: d["stages"]["a"]["outputs"].update(x={"sha256": "", "bytes": -1}), "bytes is no size"),
        (lambda d: d["stages"]["a"]["outputs"].update(x={"sha256": 1, "bytes": 1}), "sha256 has the wrong"),
        (lambda d: d["stages"]["a"]["outputs"].update(x=1), "not an object"),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    stage(tmp_path, writes({"x": "1"}))
    edit(tmp_path, change)
    with pytest.raises(RingstepError, match=message):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000])
def test_garbage_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(RingstepError, match=r"manifest\.json"):
        stage(tmp_path, writes({"x": "1"}))
    assert (tmp_path / "manifest.json").read_bytes() == text


def test_a_manifest_or_contract_that_is_a_device_is_refused(tmp_path: Path) -> None:
    for name, load in (("manifest.json", Manifest.load), ("step.json", StepSpec.load)):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(RingstepError, match="is not an ordinary file"):
            load(tmp_path)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_manifest_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    manifest = Manifest(folder, stages={"a": StageRecord("a", "k", {}, {}, {}, {}, 1.5, 0, {})})
    manifest.save()
    text = bytearray((folder / "manifest.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    (folder / "manifest.json").write_bytes(text)
    try:
        Manifest.load(folder).save()
    except RingstepError as error:
        assert "manifest.json" in str(error)
