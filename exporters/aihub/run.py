"""Carrying a request out: submit, wait, fetch, hold against the reference, store; and what to say of it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exporters.aihub.parts import HOME
from exporters.aihub.plan import Chain, Planned, Request, as_json, plan
from exporters.aihub.show import lint_of, matching
from exporters.aihub.verdict import Verdict, compare
from ringstep import console
from ringstep.contract import StepSpec, build
from ringstep.errors import RingstepError
from ringstep.files import read_text
from ringstep.manifest import Manifest
from ringstep.profiling.hub import open_client, origin, scratch
from ringstep.profiling.jobs import PROFILE, Hub, drive, fetch, log_tail, poll, read_outputs
from ringstep.profiling.ledger import Job, Ledger
from ringstep.profiling.profile import Origin, Place, Profile, Subject, read_profile
from ringstep.profiling.store import open_store

UNFETCHED = "not fetched"
MATCHES = 5  # lint findings shown beside a failed job


def carry_out(manifest: Manifest, request: Request) -> list[dict[str, Any]]:
    """Measure what a request asks for and store it; one plain result a chain. Raises RingstepError.

    `manifest` is that of an opened folder. What was submitted before is taken up, not submitted again.
    """
    spec = StepSpec.load(manifest.folder)
    ledger, database = Ledger(manifest), Path(request.db)
    client = open_client()  # before minutes go into compiling
    with open_store(database, write=True):
        pass  # before hours go into waiting
    for left in (manifest.folder / HOME / "jobs").glob(".*"):
        shutil.rmtree(left, ignore_errors=True)  # of a run that was killed while downloading
    planned = plan(manifest, spec, request)
    ledger.ask(as_json(request))  # not before: what cannot be planned is no request to go on with
    hub = Hub(client, ledger, planned.contents)
    with scratch(manifest.folder):
        with console.board("waiting for AI Hub") as show:
            drive(hub, [chain.jobs for chain in planned.chains], lambda: tell(ledger, planned.chains, show))
        found = [conclude(hub, spec, planned, chain, database) for chain in planned.chains]
    if all(result["state"] != UNFETCHED for result in found):
        ledger.conclude(as_json(request))
    return found


def take_leave(manifest: Manifest, client: Any) -> list[Job]:
    """Jobs of an earlier export of the folder, which no request leads to any more; returns those that are over now.

    What a phone returned for another graph cannot be held against this one's samples: it is kept as it came, beside the
    others, and not stored as a profile. Raises RingstepError.
    """
    hub = Hub(client, Ledger(manifest))
    over: list[Job] = []
    for job in hub.ledger.jobs.values():
        if job.over:
            continue
        if not job.id:
            job.state, job.reason = "abandoned", "what it was for has been exported anew"
            hub.ledger.save()
        elif poll(hub, job) and job.over:
            if job.kind == "inference":
                fetch_what_there_is(hub, job, results(manifest.folder, job))
            over.append(job)
    return over


def tell(ledger: Ledger, chains: Sequence[Chain], show: Any) -> None:
    """One line a chain: the job it is at, and where that is."""
    for chain in chains:
        begun = [job for planned in chain.jobs if (job := ledger.jobs.get(planned.key)) and job.id]
        if not begun:
            show(chain.label, "refused by the compiler here" if chain.refused else "to be submitted")
            continue
        job = begun[-1]
        of = f"{len(begun)} of {len(chain.jobs)}, " if len(chain.jobs) > 1 else ""
        show(chain.label, f"{job.kind} job {job.id} ({of}{job.status or job.state})")


def conclude(hub: Hub, spec: StepSpec, planned: Planned, chain: Chain, database: Path) -> dict[str, Any]:
    """Fetch a chain's last job and say what came of it: a profile with its parity, or why there is none."""
    jobs = [job for planned_job in chain.jobs if (job := hub.ledger.jobs.get(planned_job.key))]
    if not jobs:
        fitting = [dataclasses.asdict(f) for f in matching(lint_of(chain), chain.refused)[:MATCHES]]
        return {"part": chain.part.subject, "device": chain.device.id, "target": chain.target, "jobs": [],
                "state": "refused here", "reason": chain.refused, "profile": None, "findings": fitting}  # fmt: skip
    job = jobs[-1]
    folder = results(hub.ledger.manifest.folder, job)
    result: dict[str, Any] = {"part": chain.part.subject, "device": chain.device.id, "target": chain.target,
                              "jobs": [{"kind": j.kind, "id": j.id, "state": j.state} for j in jobs]}  # fmt: skip
    if job.state != "done" or job.kind != "inference":
        if job.state == "failed" and job.id:
            fetch_what_there_is(hub, job, folder)
        return result | {"state": job.state, "reason": job.reason, "profile": None} | why(chain, job, folder)
    try:
        fetch(hub, job, folder)
    except RingstepError as error:
        # Other results are worth having; this one is asked for again by the next run.
        again = "; what cannot be fetched for good, --again measures anew"
        return result | {"state": UNFETCHED, "reason": f"{error}{again}", "profile": None}
    verdict = compare(hub.ledger.manifest.folder, spec, chain.part.n, chain.target.split(":")[1],
                      planned.samples[chain.part.name], read_outputs(folder))  # fmt: skip
    try:
        profile = as_profile(job, folder, verdict, origin(hub.client))
        number = store_one(profile, database)
    except RingstepError as error:
        job.results = {"folder": f"{HOME}/jobs/{job.id}", "refused": str(error)}
        hub.ledger.save()
        return result | {"state": "refused", "reason": str(error), "log": log_tail(folder), "profile": None,
                         "parity": dataclasses.asdict(verdict)}  # fmt: skip
    job.results = {"folder": f"{HOME}/jobs/{job.id}", "profile": number, "parity": profile.parity,
                   "snr_db": profile.snr_db}  # fmt: skip
    hub.ledger.save()
    return result | {"state": "done", "profile": profile, "number": number, "parity": dataclasses.asdict(verdict)}


def store_one(profile: Profile, database: Path) -> int:
    """Store a profile, or what its parity has come to where it is stored already; its number. Raises RingstepError."""
    from ringstep.profiling.store import add, set_parity

    with open_store(database, write=True) as store:
        number, new = add(store, profile)
        if not new and profile.snr_db is not None and profile.parity != "unchecked":
            set_parity(store, number, profile.snr_db, profile.parity)
    return number


def why(chain: Chain, job: Job, folder: Path) -> dict[str, Any]:
    """What explains a failed job: the end of its log, and what the lint says of the graph that fits."""
    log = log_tail(folder)
    text = "\n".join([job.reason, *log])
    return {"log": log, "findings": [dataclasses.asdict(f) for f in matching(lint_of(chain), text)[:MATCHES]]}


def fetch_what_there_is(hub: Hub, job: Job, folder: Path) -> None:
    """The logs of a failed job; without them its reason must do."""
    try:
        fetch(hub, job, folder)
    except RingstepError as error:
        console.warn(str(error))


def as_profile(job: Job, folder: Path, verdict: Verdict, made: Origin) -> Profile:
    """The profile of a job that is done. Raises RingstepError for one that is no measurement."""
    import json

    where = f"job {job.id}"
    body = json.loads(read_text(folder / PROFILE))
    about = {name: build(kind, job.about.get(name), f"{where}: {name}")
             for name, kind in (("subject", Subject), ("place", Place))}  # fmt: skip
    return Profile(
        **about, **read_profile(body, where), origin=made, job=job.id, created=job.started,
        versions=versions(job), snr_db=verdict.worst_db, parity="failed" if verdict.failures else "passed",
    )  # fmt: skip


def versions(job: Job) -> dict[str, str]:
    """What a profile depends on besides the model: who compiled it, and by what it was measured."""
    from ringstep.stage import library_versions

    found = {"compiler": str(job.about.get("compiler", ""))} | library_versions("ringstep", "qai-hub")
    return {name: version for name, version in found.items() if version}


def results(folder: Path, job: Job) -> Path:
    """Where a job's downloads lie in the artifact."""
    return folder / HOME / "jobs" / (job.id or job.key)
