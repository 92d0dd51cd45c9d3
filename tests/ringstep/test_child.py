"""A child that crashes, hangs, grows or refuses costs the parent one line; a dead parent leaves no child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from ringstep import child
from ringstep.errors import RingstepError

COUNT = 0


def twice(array: np.ndarray) -> np.ndarray:
    return array * 2


def count() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_in_native_code() -> None:
    os.write(2, b"[E:onnxruntime:, x.cc:1 f] first\n\x1b[1;31mnative error: out of VTCM\x1b[m\n")
    os.abort()


def hang() -> None:
    print("about to hang", flush=True)
    time.sleep(600)


def eat(size: int) -> None:
    held = bytearray(os.urandom(1)) * size
    time.sleep(600)
    del held


def refuse(text: str) -> None:
    raise RingstepError(text)


def raise_value_error() -> None:
    raise ValueError("bad\nvalue")


def leave() -> None:
    os._exit(7)


def unpicklable() -> object:
    return lambda: None


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_arrays_cross_both_ways() -> None:
    array = np.ones((4, 1 << 18), np.float16)
    outcome = child.run("double", twice, array, timeout_s=60)
    assert outcome.value.dtype == np.float16
    np.testing.assert_array_equal(outcome.value, array * 2)
    assert 0 < outcome.seconds < 60
    assert outcome.peak_bytes > 1 << 20


def test_worker_keeps_state_and_lives_on_after_a_refusal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with child.Worker("work", log=log) as worker:
        assert [worker.call(count, timeout_s=60).value for _ in range(2)] == [1, 2]
        with pytest.raises(RingstepError, match=r"^work: no such thing$"):
            worker.call(refuse, "no such thing", timeout_s=60)
        with pytest.raises(RingstepError, match=r"^work: ValueError: bad; log: "):
            worker.call(raise_value_error, timeout_s=60)
        with pytest.raises(RingstepError, match="pickle"):
            worker.call(unpicklable, timeout_s=60)
        assert worker.call(count, timeout_s=60).value == 3
    assert "Traceback" in log.read_text()
    assert not alive(worker.process.pid)
    with pytest.raises(RingstepError, match="has ended"):
        worker.call(count, timeout_s=60)


def test_temporary_log_goes_unless_something_failed() -> None:
    with child.Worker("work") as worker:
        worker.call(count, timeout_s=60)
    assert not worker.log.exists()
    with child.Worker("work") as worker, pytest.raises(RingstepError):
        worker.call(leave, timeout_s=60)
    assert worker.log.exists()
    worker.log.unlink()


@pytest.mark.parametrize(
    ("function", "args", "limits", "message"),
    [
        (crash, (), {}, "work: its process was killed by SIGSEGV"),
        (
            crash_in_native_code,
            (),
            {},
            "work: its process was killed by SIGABRT: native error: out of VTCM; log",
        ),
        (leave, (), {}, "work: its process ended with code 7"),
        (hang, (), {"timeout_s": 0.5}, "work: was not done after 0.5 s"),
        (eat, (600 << 20,), {"memory_bytes": 300 << 20}, "MiB of memory, the limit is 300 MiB"),
    ],
)
def test_failure_is_one_line_and_ends_the_child(
    tmp_path: Path, function, args: tuple, limits: dict, message: str
) -> None:
    log = tmp_path / "log"
    worker = child.Worker("work", log=log, memory_bytes=limits.get("memory_bytes"))
    with pytest.raises(RingstepError) as caught:
        worker.call(function, *args, timeout_s=limits.get("timeout_s", 60))
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"; log: {log}")
    assert "\n" not in str(caught.value)
    assert log.exists()
    assert not alive(worker.process.pid)
    worker.close()  # twice is harmless


def test_interrupt_ends_the_child() -> None:
    worker = child.Worker("work")
    worker.call(count, timeout_s=60)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        worker.call(hang, timeout_s=60)
    assert not alive(worker.process.pid)


@pytest.mark.parametrize("busy", [False, True])
def test_killed_parent_leaves_no_child(busy: bool) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_child as t, time\n"
        "worker = t.child.Worker('work'); worker.call(t.count, timeout_s=60)\n"
        "print(worker.process.pid, worker.log, flush=True)\n"
        + ("worker.call(t.hang, timeout_s=60)" if busy else "time.sleep(60)")
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, log = parent.stdout.readline().split()
    try:
        assert alive(int(pid))
        if busy:
            assert wait_for(lambda: "about to hang" in Path(log).read_text())
        parent.kill()
        parent.wait()
        assert wait_for(lambda: not alive(int(pid)))
    finally:
        parent.kill()
        Path(log).unlink(missing_ok=True)


def test_last_error_and_one_line() -> None:
    assert child.last_error("ok\nERROR one\nfine\n") == "ERROR one"
    assert child.last_error("all well") == ""
    assert child.one_line(" a\n b\t c ") == "a b c"
    assert len(child.one_line("x" * 5000)) == child.CAUSE_CHARS


@pytest.mark.parametrize("linux", [True, False])
def test_descendants_are_children_and_theirs(monkeypatch: pytest.MonkeyPatch, linux: bool) -> None:
    if not linux:
        monkeypatch.setattr(os.path, "exists", lambda _: False)
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        grandchild = int(parent.stdout.readline())
        try:
            assert child.descendants(parent.pid) == [grandchild]
            assert {parent.pid, grandchild} <= set(child.descendants(os.getpid()))
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert child.descendants(parent.pid) == []
