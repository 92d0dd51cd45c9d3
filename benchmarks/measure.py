"""Run a command as a fresh process and measure time and memory of its whole process tree (Linux only)."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import struct_rusage
from typing import Any, TypeVar

from ringstep.child import anonymous_bytes, descendants

_T = TypeVar("_T")

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
SAMPLE_SECONDS = 0.02
LOG_LINES = 15
REASON_CHARS = 160
# Nothing may be fetched while the clock runs, and nobody's terminal colours may reach a log.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Run:
    """What one run of a command took."""

    seconds: float
    """Wall time from starting the process to its end."""
    cpu_seconds: float
    """Processor time of the process and the children it waited for, user and system."""
    anon_bytes: int
    """Peak of the sum of RssAnon over the process tree, sampled every 20 ms: memory that nothing can reclaim."""
    max_rss_bytes: int
    """ru_maxrss: the kernel's exact peak RSS of the largest single process; mapped files count."""


class RunFailed(SystemExit):
    """A command that failed; `reason` is one line, with its own last one in it."""

    def __init__(self, command: str, reason: str, log: Path) -> None:
        tail = log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
        super().__init__("\n".join([*tail, f"{command}: {reason}; log: {log}"]))
        last = next((line.strip() for line in reversed(tail) if line.strip()), "")
        self.reason = f"{reason}; {last[:REASON_CHARS]}"


def run(command: Sequence[str | Path], log: Path, limit_bytes: float = math.inf) -> Run:
    """Run a command in the log's folder, stdout and stderr in `log`; RunFailed when it fails.

    It is killed when its processes together hold more than `limit_bytes` of anonymous memory.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: the child ends too
    os.sync()  # the previous run's dirty pages are not this run's work
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **OFFLINE},
            cwd=log.parent,  # not the repository: `python -m` would find our packages beside the peer's
            start_new_session=True,
        )
        try:
            anon, status, usage = watch(process.pid, limit_bytes)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if anon > limit_bytes:
        raise RunFailed(str(command[0]), f"killed at {anon / 1e9:.1f} GB of memory after {seconds:.0f} s", log)
    if process.returncode:
        raise RunFailed(str(command[0]), f"exit code {process.returncode}", log)
    return Run(seconds, usage.ru_utime + usage.ru_stime, anon, usage.ru_maxrss * 1024)


def watch(pid: int, limit_bytes: float) -> tuple[int, int, struct_rusage]:
    """Wait for a child; return the tree's peak RssAnon in bytes, the wait status and the rusage.

    The child leads a session of its own, which is killed when the tree passes the limit.
    """
    peak = 0
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return peak, status, usage
        peak = max(peak, sum(map(anonymous_bytes, [pid, *descendants(pid)])))
        if peak > limit_bytes:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(SAMPLE_SECONDS)


def read(path: Path) -> str:
    """Return a file's text, "" when it is gone."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def at_least_one(text: str) -> int:
    """A number of rounds, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1")
    return int(text)


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rotated(items: Sequence[_T], by: int) -> list[_T]:
    """Return the items starting with another one each round, so that no one always runs first."""
    return [*items[by % len(items) :], *items[: by % len(items)]]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds of ours / theirs: what a busy round does to both cancels."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, memory in bytes, system."""
    model = re.search(r"^model name\s*:\s*(.+)$", read(Path("/proc/cpuinfo")), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[1] if model else "unknown",
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "load": os.getloadavg()[0],
    }
