"""Uploads and jobs at Qualcomm AI Hub, each made once however often the process dies, the network drops or says no.

    upload ─▶ compile ─▶ link ─▶ inference and profile      source ONNX takes the whole chain, a context binary its end

What is begun is in the manifest before it is sent. Without an id it is looked for at the service by its name, and only
made again where it is not there.
"""

from __future__ import annotations

import datetime
import functools
import json
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from ringstep import console
from ringstep.errors import RingstepError
from ringstep.files import new_folder, write_json
from ringstep.profiling.hub import Gone, Unreachable, redacted, single_attempt, translated
from ringstep.profiling.ledger import TAG, Job, Ledger, Upload, check_id, is_past, now

PATIENCE_SECONDS = 1800.0  # how long a service that does not answer is asked again
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between such tries
FIRST_POLL, LONGEST_POLL = 0.5, 10.0  # seconds; the client itself polls every 10
PAGE, PAGES = 50, 20  # how far back a name is looked for, newest first
MAX_UPLOAD = 10_000_000_000  # bytes; the service refuses more
PROFILE, OUTPUTS = "profile.json", "outputs.npz"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Content:
    """What is uploaded: a model's file or folder, or a dataset's samples by input name."""

    kind: Literal["model", "dataset"]
    label: str
    sha256: str
    bytes: int
    path: Path | None = None
    samples: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)


@dataclass
class Hub:
    """The service as one run sees it: the client, what was done already, and what can be uploaded."""

    client: Any
    ledger: Ledger
    contents: dict[str, Content] = field(default_factory=dict)
    """By content hash."""
    checked: set[str] = field(default_factory=set)
    """Uploads that are known to be there still."""
    handles: dict[str, Any] = field(default_factory=dict)
    """The client's objects of jobs by id: each is asked for once, then for its status alone."""


def patiently(what: str, call: Callable[[], _T], patience: float | None = None) -> _T:
    """Call the client, again for half an hour (`patience` in seconds) while the service does not answer.

    Raises RingstepError.
    """
    pause = FIRST_PAUSE
    deadline = time.monotonic() + (PATIENCE_SECONDS if patience is None else patience)
    while True:
        try:
            with translated(what):
                return call()
        except Unreachable as error:
            if time.monotonic() + pause > deadline:
                raise RingstepError(f"{error}; nothing is lost, the same command goes on from here") from None
            console.say(f"{error}; trying again in {console.human_seconds(pause)}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def advance(hub: Hub, chain: Sequence[Job]) -> Job | None:
    """Submit what can be submitted of a chain; returns the job it waits for, None when it is at its end."""
    for planned in chain:
        job = submit(hub, planned)
        if not job.over:
            return job
        if job.state != "done":
            return None
    return None


def drive(hub: Hub, chains: Sequence[Sequence[Job]], show: Callable[[], None]) -> None:
    """Take all chains to their ends side by side; `show` is called whenever a job has changed."""
    pause = FIRST_POLL
    while True:
        waiting = [job for chain in chains if (job := advance(hub, chain))]
        show()
        if not waiting:
            return
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL)
        if any([poll(hub, job) for job in waiting if job.id]):  # all of them, not only up to the first that has changed
            pause = FIRST_POLL
            show()


def submit(hub: Hub, planned: Job) -> Job:
    """The job of this key: as it was submitted before, or else submitted now. Raises RingstepError."""
    job = hub.ledger.jobs.get(planned.key)
    if job and (job.id or job.over):
        return job
    begun = job is not None
    job = job or planned
    needs_upload(hub, job)
    if not begun:
        hub.ledger.jobs[job.key] = job
        hub.ledger.save()

    def call() -> str:
        nonlocal begun
        if begun and (found := submitted(hub, job)):
            return found
        begun = True
        with single_attempt():
            return str(send(hub, job).job_id)

    try:
        job.id = patiently(f"submitting {job.name}", call)
    except Gone:
        # An upload, or a model that an earlier job made, was there a moment ago and has expired, or was deleted.
        if renew(hub, job):
            return job
        hub.checked.clear()
        needs_upload(hub, job)
        job.id = patiently(f"submitting {job.name}", call)
    check_id(job.id, f"submitting {job.name}")
    job.state = "submitted"
    hub.ledger.save()
    return job


def renew(hub: Hub, job: Job) -> bool:
    """Let the jobs be submitted anew whose models are gone and that this one takes; whether there are any."""
    lost = []
    for own in job.models:
        maker = hub.ledger.jobs.get(own)
        if maker is None or not maker.target:
            continue
        look = functools.partial(hub.client.get_model, maker.target)
        try:
            patiently(f"looking for what job {maker.id} made", look)
        except Gone:
            lost.append(maker)
    for maker in lost:
        console.say(f"what job {maker.id} ({maker.kind}) made is gone at AI Hub: it is submitted again")
        maker.name, maker.id, maker.target, maker.state = f"{maker.name}'", "", "", "submitting"
    hub.ledger.save()
    return bool(lost)


def send(hub: Hub, job: Job) -> Any:
    """One submission through the client."""
    import qai_hub

    device = qai_hub.Device(job.device)
    jobs, uploads = hub.ledger.jobs, hub.ledger.uploads
    models = [hub.client.get_model(jobs[own].target if own in jobs else uploads[own].id) for own in job.models]
    if job.kind == "compile":
        return hub.client.submit_compile_job(models[0], device, name=job.name, options=job.options, retry=False)
    if job.kind == "link":
        return hub.client.submit_link_job(models, device, name=job.name, options=job.options)
    inputs = hub.client.get_dataset(uploads[job.dataset].id)
    return hub.client.submit_inference_job(models[0], device, inputs=inputs, name=job.name, options=job.options,
                                           retry=False, profile=True)  # fmt: skip


def submitted(hub: Hub, job: Job) -> str:
    """The id of a job of this name at the service, "" for none."""
    listed = newest_first(lambda offset: hub.client.get_job_summaries(offset=offset, limit=PAGE))
    return next((str(summary.job_id) for summary in listed if summary.name == job.name), "")


def newest_first(fetch: Callable[[int], Sequence[Any]]) -> Iterator[Any]:
    """What the service lists, a page at a time from an offset, as far back as a name is looked for."""
    for page in range(PAGES):
        found = fetch(page * PAGE)
        yield from found
        if len(found) < PAGE:
            return


def needs_upload(hub: Hub, job: Job) -> None:
    """Upload what a job takes and the service does not have. Raises RingstepError."""
    for sha in (*job.models, job.dataset):
        if sha and sha not in hub.ledger.jobs and not is_there(hub, sha):
            upload(hub, sha)


def is_there(hub: Hub, sha: str) -> bool:
    """Whether the service has an upload still; it is asked once a run."""
    known = hub.ledger.uploads.get(sha)
    if not known or not known.id or is_past(known.expires):
        return False
    if sha not in hub.checked:
        get = hub.client.get_model if known.kind == "model" else hub.client.get_dataset
        try:
            found = patiently(f"looking for {known.name}", lambda: get(known.id))
        except Gone:
            return False
        if known.kind == "dataset" and found.is_expired():
            return False
        hub.checked.add(sha)
    return True


def upload(hub: Hub, sha: str) -> None:
    """Upload a content of the run. Raises RingstepError."""
    content = hub.contents.get(sha)
    if content is None:
        raise RingstepError(f"upload {sha[:TAG]} has expired at AI Hub, and what it was made of has changed since; run "
                            "ringstep profile again")  # fmt: skip
    if content.bytes > MAX_UPLOAD:
        size, limit = console.human_bytes(content.bytes), console.human_bytes(MAX_UPLOAD)
        raise RingstepError(f"{content.label}: {size}, and AI Hub takes at most {limit}: use a smaller precision, or "
                            "--layers")  # fmt: skip
    before = hub.ledger.uploads.get(sha)
    begun = before is not None and not before.id
    record = Upload(content.kind, f"{content.label} {sha[:TAG]}", sha, content.bytes, now())
    hub.ledger.uploads[sha] = record
    hub.ledger.save()

    def call() -> tuple[str, str]:
        nonlocal begun
        if begun and (found := uploaded(hub, record)):
            return found
        begun = True
        if content.kind == "model":
            return hub.client.upload_model(str(content.path), name=record.name).model_id, ""
        samples = {name: list(arrays) for name, arrays in content.samples.items()}
        made = hub.client.upload_dataset(samples, name=record.name)
        return made.dataset_id, expiry(made)

    with console.progress(f"uploading {content.label}, {console.human_bytes(content.bytes)}"):
        record.id, record.expires = patiently(f"uploading {content.label}", call)
    check_id(record.id, f"uploading {content.label}")
    hub.checked.add(sha)
    hub.ledger.save()


def expiry(dataset: Any) -> str:
    """When a dataset of the client expires, in UTC; the client tells it in local time without saying so."""
    moment = dataset.expiration_time
    return moment.astimezone(datetime.UTC).isoformat(timespec="seconds") if moment else ""


def uploaded(hub: Hub, record: Upload) -> tuple[str, str] | None:
    """The id and expiry of a whole upload of this name at the service."""
    from qai_hub import public_rest_api as rest

    config = hub.client.config
    lists: dict[str, Callable[[int], Any]] = {
        "model": lambda offset: rest.get_model_list(config, offset=offset, limit=PAGE).models,
        "dataset": lambda offset: rest.get_dataset_list(config, offset=offset, limit=PAGE).datasets,
    }
    for entry in newest_first(lists[record.kind]):
        if entry.name == record.name and entry.file_upload_complete:
            if record.kind == "model":
                return entry.model_id, ""
            return entry.dataset_id, expiry(hub.client.get_dataset(entry.dataset_id))
    return None


def handle_of(hub: Hub, job: Job, patience: float | None = None) -> Any:
    """The client's object of a submitted job. Raises RingstepError."""
    if job.id not in hub.handles:
        hub.handles[job.id] = patiently(f"job {job.id}", lambda: hub.client.get_job(job.id), patience)
    return hub.handles[job.id]


def poll(hub: Hub, job: Job) -> bool:
    """Ask the service how a submitted job is; whether that has changed. Raises RingstepError."""
    try:
        handle = handle_of(hub, job)
        status = patiently(f"job {job.id}", handle.get_status)
    except Gone as error:
        job.state, job.reason, job.finished = "failed", f"AI Hub does not know it any more: {error}", now()
        hub.ledger.save()
        return True
    word = status.code.lower().replace("_", " ")
    if not status.finished:
        changed, job.status = word != job.status, word
        if changed:
            hub.ledger.save()
        return changed
    job.status, job.finished = word, now()
    if status.success and job.kind != "inference":
        target = patiently(f"job {job.id}", handle.get_target_model)
        if target is None:
            raise RingstepError(f"job {job.id} ({job.name}) is done at AI Hub and has no model; see {handle.url}")
        job.target = target.model_id
    job.state = "done" if status.success else "failed"
    job.reason = redacted(status.message or "AI Hub gives no reason") if status.failure else ""
    hub.ledger.save()
    return True


def fetch(hub: Hub, job: Job, folder: Path, patience: float | None = None) -> None:
    """Download profile, outputs and logs of a job that is over into `folder`, whole or not at all, once.

    profile.json is what the client gives, as it is; outputs.npz has NAME@SAMPLE arrays. Raises RingstepError.
    """
    if is_whole(folder, job.kind == "inference" and job.state == "done"):
        return
    shutil.rmtree(folder, ignore_errors=True)
    handle = handle_of(hub, job, patience)
    with new_folder(folder, PROFILE) as home:
        profile: Any = {}
        if job.kind == "inference" and job.state == "done":
            profile = patiently(f"the profile of job {job.id}", handle.download_profile)
            outputs = patiently(f"the outputs of job {job.id}", handle.download_output_data) or {}
            arrays: Any = {f"{name}@{i}": np.asarray(a) for name, made in outputs.items() for i, a in enumerate(made)}
            with (home / OUTPUTS).open("wb") as stream:
                np.savez(stream, **arrays)
        try:
            with translated("its log"):  # not again and again: the client has tried seven times by then
                download_logs(hub.client, handle, home / "logs")
        except RingstepError as error:  # a result without its log is still a result
            shutil.rmtree(home / "logs", ignore_errors=True)
            console.warn(f"job {job.id}: no log: {error}")
        write_json(home / PROFILE, profile)


def is_whole(folder: Path, outputs: bool) -> bool:
    """Whether what was downloaded is there and can be read."""
    try:
        json.loads((folder / PROFILE).read_bytes())
        return not outputs or zipfile.ZipFile(folder / OUTPUTS).testzip() is None
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def download_logs(client: Any, handle: Any, folder: Path) -> None:
    """A job's logs under names of our own: the client would write wherever the service's names lead."""
    from qai_hub import JobArtifactType, api_utils, public_rest_api, s3_transfer

    folder.mkdir(parents=True)
    available = handle.get_available_artifacts()
    for kind in (JobArtifactType.DEVICE_LOG, JobArtifactType.HUB_LOG):
        if kind not in available:
            continue
        listed = public_rest_api.download_job_artifacts_info(client.config, handle.job_id, kind.value).artifacts
        for index, entry in enumerate(listed):
            name = f"{kind.name.lower()}-{index}.log"
            if entry.HasField("credentials"):
                s3_transfer.download_file(entry.credentials, name, str(folder / name), False)
            else:
                api_utils.download_file(entry.url, name, str(folder / name), False)


def read_outputs(folder: Path) -> dict[str, list[np.ndarray]]:
    """The outputs that `fetch` wrote, samples in order."""
    found: dict[str, list[np.ndarray]] = {}
    if not (folder / OUTPUTS).is_file():
        return found
    with np.load(folder / OUTPUTS, allow_pickle=False) as arrays:
        for name in sorted(arrays.files, key=lambda key: int(key.rpartition("@")[2])):
            found.setdefault(name.rpartition("@")[0], []).append(arrays[name])
    return found


def log_tail(folder: Path, lines: int = 12) -> list[str]:
    """The last lines of a job's logs, each once; [] for none."""
    from ringstep.child import read_tail

    home = folder / "logs"
    logs = sorted(path for path in home.rglob("*") if path.is_file()) if home.is_dir() else []
    tails = [redacted(line) for path in logs for line in read_tail(path).splitlines()[-lines:] if line.strip()]
    return list(dict.fromkeys(tails))
