"""Nothing is submitted twice and nothing lost: faults of network and service, restarts, expired uploads, kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("qai_hub")
pytest.importorskip("onnxruntime_qnn")

from profile_runs import SPARK, Desk, desk, export, run

from ringstep.profiling import jobs
from ringstep.profiling.store import find, open_store

FAILED_PARITY = 1  # what the stand-in's quick answers come to


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("jobs") / "artifact")


@pytest.fixture
def fast(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with desk(artifact, tmp_path, monkeypatch, work="fast") as made:
        yield made


def test_each_job_is_noted_before_it_is_sent(fast: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    send = jobs.send

    def watched(hub: Any, job: Any) -> Any:
        seen.append(job.key in fast.noted["jobs"])
        return send(hub, job)

    monkeypatch.setattr(jobs, "send", watched)
    fast.profile()
    assert seen == [True] * 3 and fast.once() and len(fast.server.jobs) == 3


def test_the_same_command_sends_nothing_a_second_time(fast: Desk) -> None:
    assert fast.profile() == FAILED_PARITY
    posts, puts = fast.server.requests("POST", ".*"), fast.server.requests("PUT", ".*")
    assert fast.profile() == FAILED_PARITY
    assert (fast.server.requests("POST", ".*"), fast.server.requests("PUT", ".*")) == (posts, puts)
    assert fast.profile("--again") == FAILED_PARITY
    assert len(fast.server.jobs) == 6 and fast.once()
    assert len(fast.server.models) == 3 and len(fast.server.datasets) - 6 == 3  # 6 of those are outputs


def test_again_is_new_whatever_was_asked_before(fast: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    fast.profile(layers="sliding,head")
    fast.profile("--again", layers="head")
    assert len(fast.server.jobs) == 3
    poll = jobs.poll
    monkeypatch.setattr(jobs, "poll", lambda hub, job: (_ for _ in ()).throw(KeyboardInterrupt))
    assert fast.profile("--again", layers="head") == 2
    monkeypatch.setattr(jobs, "poll", poll)
    fast.profile("--again", layers="head")  # goes on with what was interrupted
    assert len(fast.server.jobs) == 4 and fast.once()


FAULTS = {
    "an answer to a submission is lost": [("drop_answer", "POST /api/v1/jobs/", 1, {})],
    "all answers to submissions are lost at first": [("drop_answer", "POST /api/v1/jobs/", 3, {})],
    "the connection drops in the middle of an upload": [("drop", "PUT /storage/", 2, {})],
    "the connection drops while jobs are submitted": [("drop", "POST /api/v1/jobs/", 2, {})],
    "a storm of 429 on submissions": [("status", "POST /api/v1/jobs/", 12, {"code": 429})],
    "a storm of 429 on everything": [("status", "/api/v1/", 40, {"code": 429})],
    "503 on everything for a while": [("status", "/api/v1/", 30, {"code": 503})],
    "500 while waiting": [("status", "GET /api/v1/jobs/", 15, {"code": 500})],
    "answers of another type": [("content_type", "GET /api/v1/jobs/", 2, {"type": "text/html"})],
    "a result that ends early": [("truncate", "GET /storage/", 2, {})],
    "the list of jobs fails after a lost answer": [
        ("drop_answer", "POST /api/v1/jobs/", 1, {}), ("status", "GET /api/v1/job_summaries/", 9, {"code": 503})],
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_lives_through(name: str, fast: Desk) -> None:
    for kind, match, times, value in FAULTS[name]:
        fast.server.faults.arm(kind, match, times, **value)
    code = fast.profile()
    if code != FAILED_PARITY:
        assert code == 2
        fast.server.faults.disarm()
        assert fast.profile() == FAILED_PARITY
    assert fast.server.faults.struck, "the fault never struck"
    assert fast.once() and len(fast.server.jobs) == 3
    assert all(job["results"] for job in fast.noted["jobs"].values())


def test_a_token_that_is_refused_is_one_line_and_resumes(fast: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    fast.server.faults.arm("status", "/api/v1/jobs", None, code=401)
    assert fast.profile() == 2
    err = capsys.readouterr().err
    assert "token" in err and "qai-hub configure" in err and len(err.splitlines()) == 1
    fast.server.faults.disarm()
    assert fast.profile() == FAILED_PARITY and fast.once()


def test_the_service_restarts_between_submission_and_wait(fast: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    poll, count = jobs.poll, 0

    def restarting(hub: Any, job: Any) -> bool:
        nonlocal count
        count += 1
        if count == 1:
            fast.server.restart()
        return poll(hub, job)

    monkeypatch.setattr(jobs, "poll", restarting)
    assert fast.profile() == FAILED_PARITY and count > 1 and fast.once()


def test_expired_uploads_are_sent_again_and_only_they(fast: Desk) -> None:
    fast.profile(layers="sliding")
    for ident in (*fast.server.models, *[i for i, d in fast.server.datasets.items() if "inputs" in d.name]):
        fast.server.expire(ident)
    before = len(fast.server.models)
    fast.profile("--again", layers="sliding")
    assert len(fast.server.models) == before + 1 and fast.once() and len(fast.server.jobs) == 2
    assert all(job["state"] == "done" for job in fast.noted["jobs"].values())


def test_an_upload_that_expires_between_look_and_submission(fast: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    send, done = jobs.send, False

    def expiring(hub: Any, job: Any) -> Any:
        nonlocal done
        if not done:
            done = True
            fast.server.expire(hub.ledger.uploads[job.dataset].id)
        return send(hub, job)

    monkeypatch.setattr(jobs, "send", expiring)
    assert fast.profile(layers="sliding") == FAILED_PARITY
    assert fast.once() and len(fast.server.jobs) == 1


def test_a_job_that_the_service_forgot_is_said_to_be_lost(fast: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    fast.server.faults.arm("slow", "inference", None, seconds=60)
    fast.server.faults.arm("status", "GET /api/v1/jobs/", None, code=404)
    assert fast.profile(layers="head") == 1
    assert "does not know it any more" in capsys.readouterr().err


def test_ctrl_c_keeps_everything(
    fast: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poll = jobs.poll
    monkeypatch.setattr(jobs, "poll", lambda hub, job: (_ for _ in ()).throw(KeyboardInterrupt))
    assert fast.profile() == 2
    assert "the same command resumes" in capsys.readouterr().err
    monkeypatch.setattr(jobs, "poll", poll)
    assert run("-q", "jobs", "resume", fast.artifact, "--db", fast.db) == FAILED_PARITY
    assert fast.once() and len(fast.server.jobs) == 3
    assert run("-q", "jobs", "resume", fast.artifact, "--db", fast.db) == 0  # nothing is left


def test_jobs_of_an_earlier_export_are_not_mixed_up_with_this_one(
    fast: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poll = jobs.poll
    monkeypatch.setattr(jobs, "poll", lambda hub, job: (_ for _ in ()).throw(KeyboardInterrupt))
    assert fast.profile(layers="sliding") == 2
    monkeypatch.setattr(jobs, "poll", poll)
    options = ("--device", "galaxy-s25", "--context", "64", "--activations", "native", "--no-parity")
    assert run("-q", "export", SPARK, *options, "--out", fast.artifact) == 0
    capsys.readouterr()
    assert run("jobs", "resume", fast.artifact, "--db", fast.db) == FAILED_PARITY
    assert "earlier export" in capsys.readouterr().err
    noted = fast.noted["jobs"].values()
    assert [(job["state"], job["reason"]) for job in noted] == [("done", "")] * 2 and fast.once()
    with open_store(fast.db) as store:
        assert [profile.job for profile in find(store)] == [list(fast.server.jobs)[1]]


def killed_at(work: Desk, requests: int, pause: float) -> bool:
    """Run `ringstep profile` in a process and kill it once the service has seen so many requests; whether it was."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: os._exit(work.profile()))
    start = len(work.server.log)
    child.start()
    while child.is_alive() and len(work.server.log) - start < requests:
        time.sleep(0.001)
    time.sleep(pause)
    alive = child.is_alive()
    if alive:
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    return alive


def test_killed_at_twenty_moments_nothing_is_lost_or_sent_twice(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with desk(artifact, tmp_path / "whole", monkeypatch, work="fast") as work:
        work.profile()
        log = work.server.log
    submissions = [at for at, (method, path, _) in enumerate(log, 1) if (method, path) == ("POST", "/api/v1/jobs/")]
    dice, kills, orphans = random.Random(7), 0, 0
    for trial in range(20):
        with desk(artifact, tmp_path / str(trial), monkeypatch, work="fast") as work:
            # Half of them in the moment when the service has just taken a job.
            at = dice.choice(submissions) if trial % 2 else dice.randrange(1, len(log))
            kills += killed_at(work, at, 0 if trial % 2 else dice.choice([0, 0.001, 0.004, 0.01]))
            unknown = {job.id for job in work.server.jobs.values()} - {j["id"] for j in work.noted["jobs"].values()}
            orphans += len(unknown)
            assert work.profile() == FAILED_PARITY
            assert work.once() and len(work.server.jobs) == 3, trial
            listed = work.noted["jobs"].values()
            assert all(job["state"] == "done" and job["results"]["parity"] for job in listed)
    assert kills >= 15, "too few of the processes were still alive"
    assert orphans, "no process died between the service's yes and its own note of it"


def test_the_client_leaves_nothing_in_the_temporary_folder(fast: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    home = fast.db.parent / "tmp"
    home.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    fast.profile()
    assert not list(home.iterdir()) and not list(fast.artifact.glob(".aihub*"))


def test_a_cut_off_answer_is_looked_for_beyond_the_first_page(fast: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PAGE", 2)
    fast.profile()
    noted = json.loads((fast.artifact / "manifest.json").read_text())
    first = next(iter(noted["aihub"]["jobs"].values()))
    first |= {"id": "", "state": "submitting", "results": {}}
    noted["aihub"]["concluded"] = []
    (fast.artifact / "manifest.json").write_text(json.dumps(noted))
    assert fast.profile() == FAILED_PARITY
    assert fast.once() and len(fast.server.jobs) == 3
