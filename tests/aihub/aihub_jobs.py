"""Running jobs: a thread each, which waits for what the job needs, and real work one at a time."""

from __future__ import annotations

import threading
import time
import traceback
from dataclasses import dataclass, field

from aihub_store import DONE, FAILED, Job, Store
from aihub_work import do, split_log

from ringstep.errors import RingstepError

POLL_SECONDS = 0.005
PROVISIONING, PROFILING, INFERRING = 60, 70, 80
RUNNING = {"compile": 50, "link": 100, "quantize": 90}


@dataclass
class Runner:
    """Runs the jobs of a store until close()."""

    store: Store
    job_seconds: float
    """What every job takes at least."""
    fast: bool
    stop: threading.Event = field(default_factory=threading.Event)
    working: threading.Lock = field(default_factory=threading.Lock)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, job: Job) -> None:
        """Run a job in the background."""
        thread = threading.Thread(target=self._run, args=(job,), daemon=True, name=job.id)
        self.threads.append(thread)
        thread.start()

    def resume(self) -> None:
        """Run what an earlier process left unfinished."""
        for job in list(self.store.jobs.values()):
            if not job.ended:
                self.start(job)

    def close(self) -> None:
        """Let running work end, and start no more."""
        self.stop.set()
        for thread in self.threads:
            thread.join(timeout=120)

    def _run(self, job: Job) -> None:
        if not self._wait_for_models(job):
            return
        self._become(job, RUNNING.get(job.kind, PROVISIONING))
        if "never" in job.faults:
            return
        seconds = job.faults.get("slow", {}).get("seconds", self.job_seconds)
        if self.stop.wait(max(0.0, job.created + seconds - time.time())):
            return
        if job.kind == "inference":
            self._become(job, PROFILING if job.profiling else INFERRING)
        fault = job.faults.get("fail")
        if fault is not None:
            reason = fault.get("reason", "The stand-in was told to fail.")
            self._end(job, FAILED, reason, fault.get("log", "told to fail\n"))
            return
        with self.working:
            if self.stop.is_set():
                return
            try:
                log = do(self.store, job, self.fast)
            except RingstepError as error:
                self._end(job, FAILED, *split_log(error))
            except Exception as error:  # a fault of the stand-in itself: loud, and no job that hangs
                self._end(job, FAILED, f"The stand-in broke: {type(error).__name__}: {error}", traceback.format_exc())
            else:
                self._end(job, DONE, "", log)

    def _wait_for_models(self, job: Job) -> bool:
        """Whether all models of a job are there; a job whose model was not made fails."""
        for ident in job.models:
            producer = self.store.jobs.get(self.store.models[ident].producer)
            while producer and not producer.ended:
                if self.stop.wait(POLL_SECONDS):
                    return False
            if producer and producer.state == FAILED:
                self._end(job, FAILED, f"Model {ident} was not made: job {producer.id} failed.", "")
                return False
        return True

    def _become(self, job: Job, state: int) -> None:
        job.state = state
        self.store.save()

    def _end(self, job: Job, state: int, reason: str, log: str) -> None:
        head = f"{job.kind} job {job.id} on {job.device or 'no device'}, options {job.options!r}\n"
        note = "A stand-in for AI Hub: no phone ran, all times are SYNTHETIC.\n"
        tail = f"{reason}\n" if reason else "done\n"
        with self.store.lock:
            self.store.path("jobs", job.id, "hub.log").write_text(head + note + log + tail, "utf-8")
            if job.kind == "inference":
                self.store.path("jobs", job.id, "device.log").write_text(note + tail, "utf-8")
            job.reason, job.finished, job.state = reason, time.time(), state
            self.store.save()
