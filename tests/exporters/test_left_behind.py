"""What a killed run leaves in the system's temporary folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from exporters.artifact import STAGES_PREFIX, remove_left


def test_float_weights_of_killed_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive = (tmp_path / f"{STAGES_PREFIX}{pid}-x" for pid in (999_999_999, os.getpid()))
    kept = [alive, tmp_path / f"{STAGES_PREFIX}name-x", tmp_path / "other-999999999-x", tmp_path / "aim"]
    for folder in (dead, *kept):
        folder.mkdir()
        (folder / "weights.bin").touch()
    link = tmp_path / f"{STAGES_PREFIX}999999998-x"
    link.symlink_to(tmp_path / "aim")
    remove_left()
    assert not dead.exists() and link.is_symlink()
    assert all((folder / "weights.bin").exists() for folder in kept)
