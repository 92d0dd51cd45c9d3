"""The checks of tests/profiling against the real service, for who has an account.

They cost minutes of phones, so they run only where RINGSTEP_LIVE names a device that AI Hub has, and the client is
configured: RINGSTEP_LIVE=galaxy-s25 python -m pytest tests/live
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from exporters.cli import cli
from ringstep import console
from ringstep.errors import RingstepError

DEVICE = os.environ.get("RINGSTEP_LIVE", "")
SPARK = Path(__file__).parent.parent / "data" / "spark2_5_tiny"


def configured() -> bool:
    """Whether the client has a token; its configuration is read, nothing is sent."""
    from ringstep.profiling.hub import open_client

    try:
        open_client()
    except RingstepError:
        return False
    return True


pytestmark = pytest.mark.skipif(not DEVICE or not configured(), reason="needs RINGSTEP_LIVE=DEVICE and an account")


def run(*args: object) -> int:
    console.settings.quiet = console.settings.verbose = False
    return console.run(cli, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live") / "artifact"
    options = ("--context", "64", "--chunk", "4", "--no-parity", "--out", folder)
    assert run("-q", "export", SPARK, "--device", DEVICE, *options) == 0
    return folder


def results(capsys: Any, code: int, *args: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run("-q", *args, "--json") == code
    return list(json.loads(capsys.readouterr().out))


def test_layers_on_the_phone_say_what_the_reference_says(artifact: Path, capsys: Any) -> None:
    asked = ("profile", artifact, "--device", DEVICE, "--layers", "sliding,full,head", "--db", artifact / "p.db")
    first = results(capsys, 0, *asked)
    for r in first:
        assert r["profile"]["parity"] == "passed" and r["profile"]["origin"] == "aihub"
        assert 0 < r["profile"]["min_us"] <= r["profile"]["median_us"] <= r["profile"]["p95_us"]
        assert r["profile"]["on_cpu"] == 0
    again = results(capsys, 0, *asked)
    assert [r["jobs"] for r in again] == [r["jobs"] for r in first], "nothing is submitted a second time"


def noted(artifact: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())["aihub"]["jobs"]
    return jobs


def test_interrupted_while_it_waits_and_taken_up(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringstep.profiling import jobs

    asked = ("-q", "profile", artifact, "--device", DEVICE, "--layers", "head", "--again", "--db", artifact / "p.db")
    poll = jobs.poll
    monkeypatch.setattr(jobs, "poll", lambda hub, job: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(*asked) == 2
    before = {job["id"] for job in noted(artifact).values()}
    monkeypatch.setattr(jobs, "poll", poll)
    assert run("-q", "jobs", "resume", artifact) == 0
    assert {job["id"] for job in noted(artifact).values()} == before, "nothing is submitted a second time"


def test_a_lost_answer_makes_no_second_job(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringstep.profiling import jobs
    from ringstep.profiling.hub import Unreachable

    send, lost = jobs.send, []

    def losing(hub: Any, job: Any) -> Any:
        made = send(hub, job)
        if not lost:
            lost.append(made.job_id)
            raise Unreachable("the answer is lost")
        return made

    monkeypatch.setattr(jobs, "send", losing)
    asked = ("-q", "profile", artifact, "--device", DEVICE, "--layers", "head", "--again", "--db", artifact / "p.db")
    assert run(*asked) == 0
    assert lost[0] in {job["id"] for job in noted(artifact).values()}, "found by its name"


def test_a_baseline_of_the_phone_passes_its_own_gate(artifact: Path) -> None:
    baseline = artifact / "baseline.json"
    gate = ("-q", "profiles", "gate", "--db", artifact / "p.db", "--baseline", baseline)
    assert run(*gate, "--update-baseline") == 0
    asked = ("--device", DEVICE, "--layers", "head", "--again", "--db", artifact / "p.db")
    assert run("-q", "profile", artifact, *asked) == 0
    assert run(*gate, "--max-rise", "50") == 0


def test_the_service_compiles_links_and_shares(artifact: Path, capsys: Any) -> None:
    asked = ("profile", artifact, "--device", DEVICE, "--compile", "hub", "--db", artifact / "p.db")
    step, prefill = results(capsys, 0, *asked)
    assert [job["kind"] for job in step["jobs"]][-2:] == ["link", "inference"]
    assert step["profile"]["parity"] == prefill["profile"]["parity"] == "passed"


def test_places(artifact: Path, capsys: Any) -> None:
    asked = ("place", artifact, "--device", DEVICE, "--layers", "head", "--db", artifact / "p.db")
    assert all(r["profile"] for r in results(capsys, 0, *asked))


def test_the_device_table_can_be_held_against_the_live_list(capsys: Any) -> None:
    assert run("devices", "--refresh", "--json") == 0
    assert json.loads(capsys.readouterr().out)
