import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_runs import Build, contents, raises, stage, writes

from ringstep import stage as module
from ringstep.child import anonymous_bytes
from ringstep.errors import RingstepError
from ringstep.hashing import sha256_file
from ringstep.manifest import LOCK, Manifest, open_folder
from ringstep.stage import library_versions, run_stage, source_hash


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def chain(folder: Path, a: int = 1, b: int = 2, c: int = 3) -> list[str]:
    """Three toy stages, each reading what the one before wrote; returns the names of those that ran."""
    ran = []

    def reading(source: str, target: str, factor: int) -> Build:
        def build(temporary: Path) -> None:
            ran.append(target)
            text = (folder / source).read_text() if source else "1"
            (temporary / target).write_text(str(int(text) * factor % 1000))

        return build

    with open_folder(folder) as manifest:
        inputs: dict[str, str] = {}
        for source, target, factor in (("", "one", a), ("one", "two", b), ("two", "three", c)):
            build = reading(source, target, factor)
            record = run_stage(
                manifest, target, inputs=inputs, options={"factor": factor}, versions={}, build=build
            )
            inputs = record.hashes
    return ran


def test_a_stage_runs_once_and_is_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "artifact"
    record = stage(folder, writes({"x": "1", "sub/y": "22"}, {"ops": 3}), steps=1)
    assert not record.skipped and record.facts == {"ops": 3} and record.seconds >= 0
    assert set(contents(folder)) == {"x", "sub/y", "manifest.json", LOCK}
    assert record.outputs["sub/y"].bytes == 2
    assert record.hashes["x"] == sha256_file(folder / "x")
    again = stage(folder, raises(AssertionError("must not run")), steps=1)
    assert again.skipped and again == record
    assert Manifest.load(folder).stages["a"] == record


def test_what_was_asked_for_survives(tmp_path: Path) -> None:
    with open_folder(tmp_path) as manifest:
        manifest.model = "org/model"
        manifest.checkpoint = {"model.safetensors": "0" * 64}
        manifest.options, manifest.versions = {"bits": 4}, library_versions("numpy", "no-such-library")
        manifest.save()
    loaded = Manifest.load(tmp_path)
    assert (loaded.model, loaded.options) == ("org/model", {"bits": 4})
    assert loaded.versions["no-such-library"] == "none" and loaded.versions["numpy"][0].isdigit()
    assert loaded.checkpoint == {"model.safetensors": "0" * 64}


@pytest.mark.parametrize("what", ["inputs", "options", "versions"])
def test_any_change_of_the_key_runs_again(tmp_path: Path, what: str) -> None:
    arguments: dict[str, Any] = {"inputs": {"w": "1"}, "options": {"w": "1"}, "versions": {"w": "1"}}
    with open_folder(tmp_path) as manifest:
        run_stage(manifest, "a", **arguments, build=writes({"x": "1"}))
        assert run_stage(manifest, "a", **arguments, build=writes({"x": "1"})).skipped
        arguments[what] = {"w": "2"}
        assert not run_stage(manifest, "a", **arguments, build=writes({"x": "2"})).skipped


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda o: st.dictionaries(st.text(), o)
    )
)
@settings(max_examples=50, deadline=None)
def test_the_key_does_not_depend_on_order(value: Any) -> None:
    one = module._key("a", {}, {"x": 1, "y": value}, {})
    assert (
        one
        == module._key("a", {}, {"y": value, "x": 1}, {})
        == module._key("a", {}, {"y": value, "x": 1}, {})
    )
    assert one != module._key("a", {"y": "1"}, {"x": 1, "y": value}, {})
    assert one != module._key("b", {}, {"x": 1, "y": value}, {})


@pytest.mark.parametrize("size", [10, 3 << 20])
@pytest.mark.parametrize("keep_time", [False, True])
def test_a_corrupted_output_of_the_same_size_is_built_again(
    tmp_path: Path, size: int, keep_time: bool
) -> None:
    build = writes({"x": bytes(size)})
    stage(tmp_path, build)
    assert stage(tmp_path, build).skipped
    before = (tmp_path / "x").stat()
    with (tmp_path / "x").open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(b"!")
    if keep_time:
        os.utime(tmp_path / "x", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not stage(tmp_path, build).skipped
    assert (tmp_path / "x").read_bytes() == bytes(size)


def test_a_missing_output_is_built_again(tmp_path: Path) -> None:
    stage(tmp_path, writes({"x": "1"}))
    (tmp_path / "x").unlink()
    assert not stage(tmp_path, writes({"x": "1"})).skipped
    (tmp_path / "x").unlink()
    os.mkfifo(tmp_path / "x")  # hashing this would wait forever
    assert not stage(tmp_path, writes({"x": "1"})).skipped


def test_a_changed_option_redoes_only_what_depends_on_it(tmp_path: Path) -> None:
    assert chain(tmp_path) == ["one", "two", "three"]
    assert chain(tmp_path) == []
    assert chain(tmp_path, c=5) == ["three"]
    assert chain(tmp_path, b=3, c=5) == ["two", "three"]
    assert chain(tmp_path, b=1003, c=5) == ["two"]  # the same bytes came out: nothing to redo behind it
    assert (tmp_path / "three").read_text() == "15"


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), max_size=4))
@settings(max_examples=15, deadline=None)
def test_a_folder_with_a_past_ends_like_a_fresh_one(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("past")
    for a, b, c in runs:
        chain(folder, a, b, c)
        assert [(folder / name).read_text() for name in ("one", "two", "three")] == [
            str(a),
            str(a * b),
            str(a * b * c),
        ]


def test_outputs_of_an_earlier_run_go(tmp_path: Path) -> None:
    stage(tmp_path, writes({"keep": "1", "old/deep/x": "1", "file": "1"}), v=1)
    (tmp_path / "old" / "notes").write_text("a user's own")
    stage(tmp_path, writes({"keep": "2", "file/inside": "2"}), v=2)
    assert set(contents(tmp_path)) == {"keep", "file/inside", "old/notes", "manifest.json", LOCK}
    assert not (tmp_path / "old" / "deep").exists()


def test_a_file_that_moves_to_another_stage_drops_the_old_record(tmp_path: Path) -> None:
    stage(tmp_path, writes({"x": "1", "only/of/a": "1"}), name="a")
    stage(tmp_path, writes({"c": "1"}), name="c")
    stage(tmp_path, writes({"x": "2", "y": "2"}), name="b")
    assert set(Manifest.load(tmp_path).stages) == {"b", "c"}
    # What else the old one wrote has no owner any more.
    assert set(contents(tmp_path)) == {"x", "y", "c", "manifest.json", LOCK}
    stage(tmp_path, writes({"z": "1"}), name="a")
    assert (tmp_path / "x").read_text() == "2"


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_a_failed_build_leaves_everything_as_it_was(tmp_path: Path, error: BaseException) -> None:
    stage(tmp_path, writes({"x": "1"}), v=1)
    before = contents(tmp_path)
    with pytest.raises(type(error)):
        stage(tmp_path, raises(error), v=2)
    assert contents(tmp_path) == before and not list(tmp_path.glob(".a.tmp*"))
    assert stage(tmp_path, raises(error), v=1).skipped


def test_a_folder_where_a_file_belongs(tmp_path: Path) -> None:
    """It is the user's: nothing is removed, nothing moved."""
    with open_folder(tmp_path) as manifest:
        (tmp_path / "b.bin").mkdir()
        with pytest.raises(RingstepError, match=r"b\.bin: a folder, where stage one writes a file"):
            run_stage(manifest, "one", inputs={}, options={}, versions={}, build=writes({"a.bin": "a", "b.bin": "b"}))
        assert not (tmp_path / "a.bin").exists() and "one" not in manifest.stages
    assert not [path for path in tmp_path.iterdir() if ".tmp" in path.name]


def test_facts_that_are_no_json_undo_the_stage(tmp_path: Path) -> None:
    stage(tmp_path, writes({"x": "1"}), v=1)
    before = contents(tmp_path)
    for facts in ({"snr": float("inf")}, {"path": tmp_path}):
        with pytest.raises((ValueError, TypeError)):
            stage(tmp_path, writes({"x": "2"}, facts), v=2)
        assert contents(tmp_path) == before


def test_ctrl_c_while_files_move_waits_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(source).name == "x":
            signal.raise_signal(signal.SIGINT)
        real(source, target)

    with open_folder(tmp_path):
        pass
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path, writes({"x": "1", "y": "1"}))
    monkeypatch.undo()
    assert stage(tmp_path, raises(AssertionError("must not run"))).skipped


def test_a_full_disk_is_one_line_and_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(tmp_path, writes({"x": "1"}), v=1)
    before = contents(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(
        RingstepError, match=f"{re.escape(str(tmp_path))}: the disk is full, stage a was undone$"
    ):
        stage(tmp_path, raises(full), v=2)
    assert contents(tmp_path) == before

    def fsync(handle: int) -> None:
        raise full

    with monkeypatch.context() as patch, pytest.raises(RingstepError, match="disk is full"):
        patch.setattr(os, "fsync", fsync)
        stage(tmp_path, writes({"x": "2"}), v=2)
    assert contents(tmp_path) == before

    usage = module.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(RingstepError, match="disk is full"):
        patch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=0))
        stage(tmp_path, raises(RuntimeError("a library's own words")), v=2)
    assert contents(tmp_path) == before

    with (
        open_folder(tmp_path) as manifest,
        pytest.raises(RingstepError, match=r"stage a needs 1\d+ bytes of disk, \d+ are"),
    ):
        run_stage(
            manifest, "a", inputs={}, options={}, versions={}, build=writes({"x": "3"}), needs_bytes=10**18
        )


def test_a_file_too_large_for_the_file_system_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match="stage a was undone, its files are larger than the file system"):
        stage(tmp_path, raises(OSError(errno.EFBIG, "File too large")))
    assert set(contents(tmp_path)) == {"manifest.json", LOCK}


CHILD = """
import sys, time
from pathlib import Path
from ringstep.manifest import open_folder
from ringstep.stage import run_stage

def one(folder):
    (folder / "one").write_text("1")

def two(folder):
    (folder / "two").write_text("half")
    print("in two", flush=True)
    time.sleep(60)

with open_folder(sys.argv[1]) as manifest:
    inputs = run_stage(manifest, "one", inputs={}, options={}, versions={}, build=one).hashes
    run_stage(manifest, "two", inputs=inputs, options={}, versions={}, build=two)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_resumes_at_its_stage(tmp_path: Path, number: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout
    try:
        assert child.stdout.readline() == "in two\n"
        with pytest.raises(RingstepError, match="another export"), open_folder(tmp_path):
            pass
    finally:
        child.send_signal(number)
        child.wait(10)
        child.stdout.close()
    assert bool(list(tmp_path.glob(".two.tmp-*"))) == (number == signal.SIGKILL)
    assert not (tmp_path / "two").exists()
    with open_folder(tmp_path) as manifest:
        assert not list(tmp_path.glob(".two.tmp-*"))
        one = run_stage(manifest, "one", inputs={}, options={}, versions={}, build=raises(AssertionError()))
        assert one.skipped
        two = run_stage(
            manifest, "two", inputs=one.hashes, options={}, versions={}, build=writes({"two": "2"})
        )
    assert not two.skipped and (tmp_path / "two").read_text() == "2"


def test_a_run_killed_before_its_first_record_resumes(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / ".ringstep-manifest.tmp-123").write_text("{")
    (tmp_path / ".one.tmp-123").mkdir()
    stage(tmp_path, writes({"x": "1"}))
    assert set(contents(tmp_path)) == {"x", "manifest.json", LOCK}


def test_a_planted_temporary_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("!")
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / ".a.tmp-1").symlink_to(tmp_path / "outside")
    stage(tmp_path / "artifact", writes({"x": "1"}))
    assert (tmp_path / "outside" / "precious").exists()


def test_misuse_is_refused(tmp_path: Path) -> None:
    stage(tmp_path, writes({"x": "1"}))
    with pytest.raises(RuntimeError, match="open_folder"):
        run_stage(Manifest.load(tmp_path), "a", inputs={}, options={}, versions={}, build=writes({}))
    with pytest.raises(ValueError, match="stage name"):
        stage(tmp_path, writes({}), name="../a")


@pytest.mark.parametrize("name", ["manifest.json", ".hidden", ".ringstep.lock", "a\nb"])
def test_a_stage_may_not_write_everywhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(RingstepError, match="bad path"):
        stage(tmp_path, writes({name: "1"}))


def test_a_stage_may_not_leave_links(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match="not an ordinary file"):
        stage(tmp_path / "artifact", lambda folder: (folder / "x").symlink_to(tmp_path))


def test_peak_memory_is_of_the_whole_tree(tmp_path: Path) -> None:
    code = "import time; x = bytearray(b'1') * (128 << 20); time.sleep(1)"

    def build(folder: Path) -> None:
        block = bytearray(b"1") * (96 << 20)
        subprocess.run([sys.executable, "-c", code], check=True)
        del block

    before = anonymous_bytes(os.getpid())
    record = stage(tmp_path, build)
    # More than the process alone; freed memory that the block reuses is already in `before`.
    assert record.peak_rss_anon_bytes > before + (120 << 20)
    assert not any(thread.name.endswith("(sample)") for thread in threading.enumerate())


def test_a_repeat_is_fast(tmp_path: Path) -> None:
    build = writes({f"{index}": bytes(100_000) for index in range(20)})
    stage(tmp_path, build)
    start = time.perf_counter()
    assert stage(tmp_path, build).skipped
    assert time.perf_counter() - start < 0.5


def test_source_hash() -> None:
    assert source_hash("ringstep/errors.py") == source_hash("ringstep/errors.py") != source_hash("ringstep")
    with pytest.raises(RingstepError):
        source_hash("ringstep/none.py")
