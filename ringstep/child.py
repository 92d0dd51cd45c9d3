"""Work in a child process, where a crash, a hang or a memory leak costs the parent one line of error.

Compilers and simulators of chip makers are native code that aborts, loops and allocates at will, and some of
them cannot live beside each other in one process. The child is a new interpreter, never a fork: ONNX Runtime
has threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ringstep.errors import RingstepError

POLL_SECONDS = 0.05
LOG_TAIL = 1 << 20
CAUSE_CHARS = 600


@dataclass(frozen=True)
class Outcome:
    """What a call in a child came to."""

    value: Any
    seconds: float
    """Wall time of the call, the start of the process included where it was the first."""
    peak_bytes: int
    """Most anonymous resident memory of the child so far, sampled every 50 ms."""


class Worker:
    """A child process that calls functions for its parent, one at a time; its modules' globals keep state.

    A function travels by name, so it must stand at the top level of a module that the child can import;
    arguments and results are pickled (arrays as raw bytes). Not for use from several threads at once.
    """

    def __init__(
        self,
        what: str,
        *,
        memory_bytes: int | None = None,
        log: Path | None = None,
        explain: Callable[[str], str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the child.

        `what` opens each error message. `memory_bytes` bounds its anonymous resident memory, None: what the
        machine has free now. `log` receives its stdout and stderr; without one a temporary log is kept only
        when something failed. `explain` finds the cause in a log's text, "" for none. `env` adds variables.
        """
        self.what = what
        self.memory_bytes = memory_bytes or psutil.virtual_memory().available
        self.explain = explain or last_error
        self.peak_bytes = 0
        self.keep_log = log is not None
        if log is None:
            handle, name = tempfile.mkstemp(prefix="ringstep-", suffix=".log")
            self.log = Path(name)
        else:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self.log = log
        self.pipe, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import ringstep.child as c; c.serve({theirs.fileno()})"
        )
        try:
            # A session of its own: Ctrl-C reaches the parent alone, which then ends the whole group.
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                env={**os.environ, **(env or {})},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            os.close(handle)
            theirs.close()

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Outcome:
        """Run function(*args) in the child.

        Raises RingstepError when it raises (the child lives on; a RingstepError keeps its words), and when
        the child dies, takes longer than `timeout_s` seconds or more memory than its limit (it is gone then).
        """
        if self.pipe.closed:
            raise RingstepError(f"{self.what}: its process has ended")
        start = time.monotonic()
        mark = self.log.stat().st_size
        try:
            self.pipe.send((function, args))
            while not self.pipe.poll(POLL_SECONDS):
                self._watch(mark, time.monotonic() - start, timeout_s)
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self.process.pid))
            ending, value = self.pipe.recv()
        except (EOFError, ConnectionError):
            self._end()
            self._fail(mark, death(self.process.returncode))
        except BaseException:
            self.close()
            raise
        if ending == "refused":
            raise RingstepError(f"{self.what}: {one_line(value)}")
        if ending == "raised":
            self._fail(mark, "", value)
        return Outcome(value, time.monotonic() - start, self.peak_bytes)

    def close(self) -> None:
        """End the child; its temporary log goes unless something failed."""
        self._end()
        if not self.keep_log:
            self.log.unlink(missing_ok=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self, mark: int, seconds: float, timeout_s: float) -> None:
        used = anonymous_bytes(self.process.pid)
        self.peak_bytes = max(self.peak_bytes, used)
        if used > self.memory_bytes:
            self._end()
            self._fail(mark, f"took {mib(used)} of memory, the limit is {mib(self.memory_bytes)}")
        if seconds > timeout_s:
            self._end()
            self._fail(mark, f"was not done after {timeout_s:g} s")

    def _end(self) -> None:
        if not self.pipe.closed:
            self.pipe.close()
        if self.process.poll() is None:
            # Closing the pipe may have ended it already, and with it the group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _fail(self, mark: int, reason: str, message: str = "") -> NoReturn:
        self.keep_log = True
        cause = self.explain(read_tail(self.log, mark)) or message
        text = ": ".join(part for part in (self.what, reason, one_line(cause)) if part)
        raise RingstepError(f"{text}; log: {self.log}")


def run(
    what: str,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float,
    memory_bytes: int | None = None,
    log: Path | None = None,
    explain: Callable[[str], str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run one function in a child of its own; arguments and errors are those of Worker and Worker.call."""
    with Worker(what, memory_bytes=memory_bytes, log=log, explain=explain, env=env) as worker:
        return worker.call(function, *args, timeout_s=timeout_s)


def serve(handle: int) -> None:
    """The child's side: answer requests on the pipe with this file descriptor until the parent is gone."""
    faulthandler.enable()
    pipe = Connection(handle)
    threading.Thread(target=_die_with_parent, args=(handle,), daemon=True).start()
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        reply = _answer(request)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(reply)


def _answer(request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        return pickle.dumps(("done", function(*args)), protocol=5)
    except RingstepError as error:
        return pickle.dumps(("refused", str(error)))
    except Exception as error:
        traceback.print_exc()
        return pickle.dumps(("raised", f"{type(error).__name__}: {error}"))


def _die_with_parent(handle: int) -> None:
    # No event is asked for, so only the hang-up wakes this: the parent closed the pipe, or was killed.
    watch = select.poll()
    watch.register(handle, 0)
    watch.poll()
    os.killpg(0, signal.SIGKILL)


def death(code: int) -> str:
    """Say how a process with this return code ended."""
    if code >= 0:
        return f"its process ended with code {code}"
    hint = ", perhaps by the system for lack of memory" if code == -signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-code).name}{hint}"


def last_error(log: str) -> str:
    """Return the last line of a log that speaks of an error, "" if none does."""
    for line in reversed(log.splitlines()):
        # Python's and torch's warnings speak of errors to come.
        warns = "Fatal Python error" in line or re.search(r"^W\d{4} |Warning: ", line)
        if re.search(r"error|fail|exception|abort", line, re.IGNORECASE) and not warns:
            return line
    return ""


def read_tail(path: Path, mark: int = 0) -> str:
    """Return a log's text from byte `mark` on, at most its last MiB, without terminal colours."""
    with path.open("rb") as stream:
        stream.seek(max(mark, path.stat().st_size - LOG_TAIL))
        text = stream.read().decode("utf-8", "replace")
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def one_line(text: str) -> str:
    """Fold white space and cut what is too long to read."""
    text = " ".join(text.split())
    return text if len(text) <= CAUSE_CHARS else text[: CAUSE_CHARS - 4] + " ..."


def mib(size: int) -> str:
    """Format bytes as MiB."""
    return f"{size / 2**20:.0f} MiB"


def is_running(pid: str) -> bool:
    """Whether the process whose id a file's name holds is alive; what is no id names none."""
    return pid.isdecimal() and len(pid) < 10 and psutil.pid_exists(int(pid))


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process in bytes, 0 when it is gone."""
    # Mapped weights count in RSS, but the system can drop them: only anonymous pages bring it down.
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
        found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    except OSError:
        pass
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have; [] when it is gone."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        # Elsewhere than on Linux every process of the machine must be looked at, which takes long.
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    found = [pid]
    for parent in found:  # grows while it is walked
        # What ends meanwhile has no children any more.
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found[1:]
