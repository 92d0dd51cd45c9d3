"""What was uploaded and submitted, in the artifact's manifest: written before it is waited for, so that none is lost.

    aihub: {"requests": [...], "uploads": {content hash: Upload}, "jobs": {key: Job}}

An upload or job without an id was begun and perhaps reached the service: it is looked for there by its name, which
holds its hash, before it is made again.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ringstep.contract import build
from ringstep.errors import RingstepError, did_you_mean
from ringstep.manifest import FILE, Manifest

State = Literal["submitting", "submitted", "done", "failed", "abandoned"]
TAG = 12  # characters of a hash in a name


@dataclass
class Upload:
    """A model or dataset at the service."""

    kind: Literal["model", "dataset"]
    name: str
    sha256: str
    bytes: int
    started: str
    id: str = ""
    expires: str = ""
    """ISO 8601, UTC; "" where it does not expire."""


@dataclass
class Job:
    """A job. `models` are hashes of uploads or keys of the jobs that make them, `dataset` is the hash of an upload."""

    key: str
    kind: Literal["compile", "link", "inference"]
    name: str
    device: str
    """AI Hub's name of the device."""
    options: str
    models: tuple[str, ...]
    started: str
    dataset: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    """What a profile of it is of: the fields of Subject and Place."""
    id: str = ""
    state: State = "submitting"
    status: str = ""
    """The service's own word for where it is."""
    reason: str = ""
    target: str = ""
    """Id of the model that it made."""
    finished: str = ""
    results: dict[str, Any] = field(default_factory=dict)
    """Files under the artifact, and the verdict."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state in ("done", "failed", "abandoned")


@dataclass
class Body:
    """The part of a manifest that is about AI Hub."""

    requests: tuple[dict[str, Any], ...] = ()
    """The options of every `ringstep profile` and `ringstep place`, so that they can be taken up again."""
    concluded: tuple[str, ...] = ()
    """Keys of the requests that have come to their end."""
    uploads: dict[str, Upload] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)


class Ledger:
    """The uploads and jobs of one artifact; `save` after every change."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises RingstepError where the manifest's part about AI Hub is damaged."""
        self.manifest = manifest
        where = f"{manifest.folder / FILE}: aihub"
        self.body: Body = build(Body, manifest.aihub, where)
        for key, job in self.body.jobs.items():
            check_job(key, job, f"{where}.jobs.{key[:TAG]!a}")
        for upload in self.body.uploads.values():
            check_id(upload.id, f"{where}.uploads")

    @property
    def jobs(self) -> dict[str, Job]:
        """By key, in the order of submission."""
        return self.body.jobs

    @property
    def uploads(self) -> dict[str, Upload]:
        """By content hash."""
        return self.body.uploads

    def ask(self, request: dict[str, Any]) -> None:
        """Note what a command was asked for; the latest stands last, each once."""
        self.body.requests = (*(other for other in self.body.requests if other != request), request)
        self.body.concluded = tuple(key for key in self.body.concluded if key != key_of([request]))
        self.save()

    def conclude(self, request: dict[str, Any]) -> None:
        """Note that a request has come to its end."""
        self.body.concluded = tuple(dict.fromkeys([*self.body.concluded, key_of([request])]))
        self.save()

    @property
    def open_requests(self) -> list[dict[str, Any]]:
        """Requests that have not come to their end, oldest first."""
        return [request for request in self.body.requests if key_of([request]) not in self.body.concluded]

    def save(self) -> None:
        """Write the manifest, all or nothing."""
        self.manifest.aihub = dataclasses.asdict(self.body)
        self.manifest.save()

    def find(self, ref: str) -> Job:
        """The job of this id or key, or of a unique beginning of one. Raises RingstepError."""
        known = {**{job.key: job for job in self.jobs.values()}, **{j.id: j for j in self.jobs.values() if j.id}}
        found = [known[ref]] if ref in known else [job for name, job in known.items() if ref and name.startswith(ref)]
        if len(found) != 1:
            what = "several jobs" if found else f"no job{did_you_mean(ref, known)}"
            raise RingstepError(f"{self.manifest.folder}: {ref!r} names {what}; `ringstep jobs list` shows them")
        return found[0]


def check_job(key: str, job: Job, where: str) -> None:
    """Refuse what no run has written: its names become files and calls."""
    if job.key != key or not re.fullmatch(r"[0-9a-f]{64}", key):
        raise RingstepError(f"{where}: no key of a job")
    if not job.models or key in job.models or (job.kind == "inference") != bool(job.dataset):
        raise RingstepError(f"{where}: its models or dataset are no job's")
    for name in ("subject", "place"):
        if not isinstance(job.about.get(name, {}), dict):
            raise RingstepError(f"{where}.about.{name}: expected an object")
    check_id(job.id, where)


def check_id(ident: str, where: str) -> None:
    """Refuse an id that is none of the service's. Raises RingstepError."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{0,80}", ident):
        raise RingstepError(f"{where}: {ident[:40]!a} is no id of AI Hub's")


def key_of(parts: Iterable[Any]) -> str:
    """The hash that stands for these values."""
    text = json.dumps(list(parts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def now() -> str:
    """The time in ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def is_past(moment: str) -> bool:
    """Whether a time of `now`'s form lies behind; "" never does. A time that cannot be read does."""
    try:
        return bool(moment) and datetime.datetime.fromisoformat(moment) <= datetime.datetime.now(datetime.UTC)
    except (ValueError, TypeError):
        return True
