"""benchmarks/measure.py: what a measured command ends with is told, and too much memory is its end."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    # By path: the folder has modules named like our packages.
    spec = importlib.util.spec_from_file_location("measure", ROOT / "benchmarks" / "measure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_memory_is_that_of_all_processes_together(measure: ModuleType, tmp_path: Path) -> None:
    fill = "import time; held = b'x' * 100_000_000; time.sleep(0.5)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {fill!r}]); {fill}; p.wait()"
    taken = measure.run([sys.executable, "-c", code], tmp_path / "log")
    # max_rss_bytes starts from the peak of the process that starts it, whatever that is here.
    assert 200e6 < taken.anon_bytes < 300e6 and taken.seconds > 0.5


def test_a_command_past_its_limit_is_killed_and_said_so(measure: ModuleType, tmp_path: Path) -> None:
    code = "import time\nheld = []\nwhile True: held.append(b'x' * 10_000_000); time.sleep(0.01)"
    with pytest.raises(measure.RunFailed) as failed:
        measure.run([sys.executable, "-c", code], tmp_path / "log", 200e6)
    assert failed.value.reason.startswith("killed at 0.2 GB of memory after")


def test_a_failed_command_says_its_last_line(measure: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(measure.RunFailed, match=r"log: .*log") as failed:
        measure.run([sys.executable, "-c", "print('reading'); raise SystemExit('no such model')"], tmp_path / "log")
    assert failed.value.reason == "exit code 1; no such model"
