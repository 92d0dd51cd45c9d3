"""Qualcomm's libraries for ExecuTorch: where they are looked for, and how they get there."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ringstep import qairt
from ringstep.errors import RingstepError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the names of the real one, pinned in its place."""
    file = tmp_path / "small.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("onnxruntime_qnn/libQnnHtp.so", "onnxruntime_qnn/libGenie.so", "onnxruntime_qnn/__init__.py",
                     "onnxruntime_qnn.libs/libc++-1.so.1.0", "onnxruntime_qnn.libs/../../libQnnHtp.so"):  # fmt: skip
            archive.writestr(name, name)
    monkeypatch.setattr(qairt, "WHEEL_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def test_missing_is_said_and_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("something was downloaded"))
    with pytest.raises(RingstepError, match="ringstep fetch-qairt"):
        qairt.require()
    assert not cache.exists()


def test_fetched_from_a_wheel(wheel: Path) -> None:
    """Only the libraries, side by side, where ExecuTorch looks; a path in the archive leads nowhere."""
    root = qairt.fetch(wheel)
    assert sorted(p.name for p in (root / qairt.FOLDER).iterdir()) == ["libQnnHtp.so", "libc++-1.so.1.0"]
    assert (root / qairt.FOLDER / "libQnnHtp.so").read_text() == "onnxruntime_qnn/libQnnHtp.so"
    assert qairt.require() == root.resolve()
    assert [p.name for p in root.parent.iterdir()] == [root.name], "nothing half-made stays"
    found = qairt.environment(root)
    assert found["QNN_SDK_ROOT"] == str(root) and found["LD_LIBRARY_PATH"].startswith(str(root / qairt.FOLDER))


def test_another_file_is_refused(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "other.whl"
    file.write_bytes(b"PK")
    with pytest.raises(RingstepError, match="sha256 differs"):
        qairt.fetch(file)
    with pytest.raises(RingstepError, match="no such file"):
        qairt.fetch(tmp_path / "none.whl")
    assert not list(cache.rglob("*.so")) and not qairt.fetched().exists()


def test_pip_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Looking\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(RingstepError, match=r"No matching distribution found; .*--wheel FILE"):
        qairt.fetch()


def test_two_at_once(wheel: Path) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(qairt.fetch(wheel))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [qairt.fetched()] * 8 and [p.name for p in qairt.fetched().parent.iterdir()] == [found[0].name]


def test_an_sdk_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path))
    with pytest.raises(RingstepError, match=r"QNN_SDK_ROOT: .* holds no"):
        qairt.require()
    library = tmp_path / qairt.FOLDER / qairt.COMPILER
    library.parent.mkdir(parents=True)
    library.touch()
    with pytest.raises(RingstepError, match="carries no version of QAIRT"):
        qairt.require()
    library.write_bytes(b"\0v2.49.40.260810104044\0")
    assert qairt.require() == tmp_path.resolve()


def test_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause is found in what the backend prints; a version that does not fit is named."""
    said = "x\n[ERROR] [Qnn ExecuTorch]: unknown custom config socModel 0\nmore\n[ERROR] later\n"
    library = tmp_path / qairt.FOLDER / qairt.COMPILER
    library.parent.mkdir(parents=True)
    monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path))
    library.write_bytes(b"\0v2.51.0.260929181845\0")
    assert "with QAIRT v2.51.0.260929181845, only with v2.49.40: unset QNN_SDK_ROOT" in qairt.explain(said)
    assert qairt.explain("[ERROR] first\n[ERROR] second\n") == "[ERROR] first"
    assert "does not run on this machine" in qairt.explain("Shared weights buffer isn't supported on this platform")
    assert qairt.explain("all is well\n") == ""
