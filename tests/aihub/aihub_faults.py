"""Faults that a test arms in the stand-in for AI Hub: each with a kind, a pattern, and how often it strikes.

Faults of requests; the pattern is searched in "METHOD /path":

    status        answer with `code` (and `detail`, `retry_after`) instead of doing anything: 401, 429, 503, 500
    drop          read half of the request's body, then reset the connection; nothing was done
    drop_answer   do what was asked, then reset the connection without an answer
    slow_answer   wait `seconds` before answering
    truncate      announce the whole body and send half of it: the client can tell
    shorten       send half of the body as if it were all: the client cannot tell
    content_type  answer with the header Content-Type: `type`

Faults of jobs; the pattern is searched in "KIND NAME" when the job is accepted, and the job keeps them over a restart:

    fail      fail with `reason`, and `log` in the hub log
    slow      take `seconds`
    never     never end
    profile   `how`: empty_times, zero_times, headline (not among the times), no_detail, not_found (result is a 404)
    outputs   `how`: none (no data set), missing, names, shapes, noise, nan
    on_cpu    put `count` operations of the profile on the CPU
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any

OF_REQUESTS = ("status", "drop", "drop_answer", "slow_answer", "truncate", "shorten", "content_type")
OF_JOBS = ("fail", "slow", "never", "profile", "outputs", "on_cpu")


@dataclass
class Fault:
    """One armed fault."""

    kind: str
    match: str
    times: int | None
    """Strikes left; None: for good."""
    skip: int
    """Matches let by before the first strike."""
    value: dict[str, Any] = field(default_factory=dict)


class Faults:
    """The armed faults. Safe from several threads."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []
        self.struck: list[tuple[str, str]] = []
        """Kind and text of every strike, in order."""
        self.lock = threading.Lock()

    def arm(self, kind: str, match: str = "", times: int | None = 1, skip: int = 0, **value: Any) -> None:
        """Arm a fault. `match` is a regular expression; `value` what the kind takes. ValueError for no such kind."""
        if kind not in OF_REQUESTS + OF_JOBS:
            raise ValueError(f"no fault {kind!r}")
        with self.lock:
            self.armed.append(Fault(kind, match, times, skip, value))

    def disarm(self, kind: str = "") -> None:
        """Disarm the faults of a kind, "" for all."""
        with self.lock:
            self.armed = [fault for fault in self.armed if kind and fault.kind != kind]

    def take(self, text: str, *kinds: str) -> Fault | None:
        """The first armed fault of these kinds that strikes here, used up by one."""
        with self.lock:
            for fault in self.armed:
                if fault.kind not in kinds or fault.times == 0 or not re.search(fault.match, text):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                self.struck.append((fault.kind, text))
                return fault
        return None

    def of_job(self, text: str) -> dict[str, dict[str, Any]]:
        """What strikes a job that is accepted now: kind to value."""
        found = {kind: self.take(text, kind) for kind in OF_JOBS}
        return {kind: fault.value for kind, fault in found.items() if fault}
