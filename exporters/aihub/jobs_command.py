"""`ringstep jobs`: what was submitted to AI Hub for an artifact, and what became of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringstep import console
from ringstep.errors import RingstepError
from ringstep.options import as_json, common

if TYPE_CHECKING:
    from ringstep.profiling.ledger import Job, Ledger

ARTIFACTS = Path("artifacts")

artifact_argument = click.argument("artifact", type=click.Path(path_type=Path))


@click.group()
def jobs() -> None:
    """List, resume, cancel and explain what was submitted to Qualcomm AI Hub."""


@jobs.command("list")
@click.argument("artifact", type=click.Path(path_type=Path), required=False)
@as_json
@common
def list_(artifact: Path | None, json_: bool) -> int:
    """List the jobs of ARTIFACT, or of all in artifacts/, as they were when last asked for."""
    from exporters.aihub.parts import opened
    from ringstep.profiling.ledger import Ledger

    folders = [artifact] if artifact else sorted(path.parent for path in ARTIFACTS.glob("*/manifest.json"))
    found: list[tuple[Path, Job]] = []
    waiting = []
    for folder in folders:
        try:
            with opened(folder, writing=False) as manifest:
                ledger = Ledger(manifest)
        except RingstepError as error:
            if artifact:
                raise
            console.warn(str(error))  # one damaged artifact must not hide the others
            continue
        found += [(folder, job) for job in ledger.jobs.values()]
        waiting += [folder] * bool(ledger.open_requests)
    if json_:
        console.print_json([{"artifact": str(folder), **dataclasses.asdict(job)} for folder, job in found])
        return 0
    if not found:
        console.line(f"no jobs: nothing of {artifact or f'what lies in {ARTIFACTS}/'} was sent to AI Hub")
    for folder in dict.fromkeys(folder for folder, _ in found):
        rows = [(job.id or "-", job.kind, job.about.get("subject", {}).get("part", ""), where(job), state_of(job),
                 job.started[5:16].replace("T", " ")) for home, job in found if home == folder]  # fmt: skip
        console.line(str(folder))
        console.table("", ["job", "kind", "part", "on", "state", "begun (UTC)"], rows)
    for folder in waiting:
        console.say(f"{folder}: not at its end; `ringstep jobs resume {folder}` goes on")
    return 0


@jobs.command()
@artifact_argument
@click.option("--db", type=click.Path(path_type=Path), help="The profile store. Default: as each request was told.")
@as_json
@common
def resume(artifact: Path, db: Path | None, json_: bool) -> int:
    """Go on with all that was begun for ARTIFACT and has not come to its end; nothing is submitted twice."""
    from exporters.aihub.parts import opened
    from exporters.aihub.plan import read_request
    from exporters.aihub.run import UNFETCHED, carry_out, take_leave
    from exporters.aihub.run import results as home_of
    from exporters.aihub.show import print_results, report
    from ringstep.profiling.hub import open_client
    from ringstep.profiling.ledger import Ledger

    results: list[dict[str, Any]] = []
    with opened(artifact, writing=True) as manifest:
        requests = Ledger(manifest).open_requests
        failed: list[RingstepError] = []
        for body in requests:
            try:
                request = read_request(body, f"{artifact / 'manifest.json'}: aihub.requests")
                own = carry_out(manifest, dataclasses.replace(request, db=str(db)) if db else request)
                results += own
                if db and not any(result["state"] == UNFETCHED for result in own):
                    Ledger(manifest).conclude(body)
            except RingstepError as error:
                failed.append(error)  # one request that cannot go on must not keep the others
        if any(not job.over for job in Ledger(manifest).jobs.values()):
            for job in take_leave(manifest, open_client()):
                console.say(f"job {job.id} ({job.state}) was of an earlier export of this folder: what it returned is "
                            f"in {home_of(manifest.folder, job)}, not in the store")  # fmt: skip
    if not requests:
        console.say("nothing is left to do: every request has come to its end")
    code = report(results, json_, print_results if results else lambda _: None)
    if failed:
        more = f" (and {len(failed) - 1} more of {len(requests)} requests)" if len(failed) > 1 else ""
        raise RingstepError(f"{failed[0]}{more}")
    return code


@jobs.command()
@artifact_argument
@click.argument("names", nargs=-1, metavar="[JOB]...")
@as_json
@common
def cancel(artifact: Path, names: tuple[str, ...], json_: bool) -> int:
    """Give up jobs of ARTIFACT, all that are not over where none is named.

    AI Hub's client has no call that stops a job there: it is no longer waited for, and runs out by itself.
    """
    from exporters.aihub.parts import opened
    from ringstep.profiling.ledger import Ledger, now

    with opened(artifact, writing=True) as manifest:
        ledger = Ledger(manifest)
        chosen = [ledger.find(name) for name in names] or [job for job in ledger.jobs.values() if not job.over]
        if over := [job for job in chosen if job.over]:
            raise RingstepError(f"job {over[0].id or over[0].key[:12]} is over already: {over[0].state}")
        for job in chosen:
            job.state, job.finished, job.reason = "abandoned", now(), "given up by ringstep jobs cancel"
        for request in () if names else ledger.open_requests:
            ledger.conclude(request)
        ledger.save()
    if json_:
        console.print_json(chosen)
    else:
        hint = "; --again measures anew" if chosen else ": all were over already"
        console.line(f"{len(chosen)} job{'s' * (len(chosen) != 1)} given up{hint}")
    return 0


@jobs.command()
@artifact_argument
@click.argument("name", metavar="JOB")
@as_json
@common
def explain(artifact: Path, name: str, json_: bool) -> int:
    """Say what is known of a job of ARTIFACT: options, state, why it failed, its log's end, lint findings that fit."""
    from exporters.aihub.parts import opened
    from ringstep.profiling.ledger import Ledger

    with opened(artifact, writing=False) as manifest:
        ledger = Ledger(manifest)
    job = ledger.find(name)
    log, findings = reasons(ledger, job)
    if json_:
        console.print_json({**dataclasses.asdict(job), "log": log, "findings": findings})
        return 0
    known = [("job", job.id or "none yet"), ("kind", job.kind), ("name", job.name), ("device", job.device),
             ("state", state_of(job)), ("begun", job.started), ("over", job.finished), ("options", job.options),
             ("reason", job.reason), *results_of(manifest.folder, job)]  # fmt: skip
    console.table("", ["", ""], [(key, value) for key, value in known if value not in ("", None)])
    for text in log:
        console.line(f"    {text}")
    for finding in findings:
        console.line(f"lint {finding.rule}: {finding.node}: {finding.what}; {finding.fix}")
    return 0


def results_of(home: Path, job: Job) -> list[tuple[str, str]]:
    """What was fetched for a job, for a table."""
    names = {"folder": lambda value: str(home / value), "snr_db": lambda value: f"{value:.1f} dB"}
    return [(name.removesuffix("_db"), names.get(name, str)(value)) for name, value in job.results.items()
            if value is not None]  # fmt: skip


def reasons(ledger: Ledger, job: Job) -> tuple[list[str], list[Any]]:
    """The end of a job's log, fetched where it was not yet and the service can be asked; lint findings that fit."""
    from exporters.aihub.run import results
    from exporters.aihub.show import lint_part, matching
    from ringstep.profiling.hub import open_client
    from ringstep.profiling.jobs import Hub, fetch, log_tail

    folder = results(ledger.manifest.folder, job)
    if job.state == "failed" and job.id and not folder.is_dir():
        try:
            fetch(Hub(open_client(), ledger), job, folder, patience=0)
        except RingstepError as error:
            console.warn(f"its log is not here, and cannot be fetched: {error}")
    log = log_tail(folder)
    if job.state != "failed":
        return log, []
    return log, matching(lint_part(ledger.manifest, job), "\n".join([job.reason, *log]))


def where(job: Job) -> str:
    """Device, runtime and unit of a job, such as "galaxy-s25 qnn:npu"."""
    place = job.about.get("place", {})
    return f"{place.get('device', job.device)} {place.get('runtime', '')}:{place.get('unit', '')}"


def state_of(job: Job) -> str:
    """A job's state in a word or two, with the service's own where it goes on."""
    if job.state == "submitted" and job.status:
        return job.status
    return f"parity {job.results['parity']}" if "parity" in job.results else job.state
