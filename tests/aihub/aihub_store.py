"""What the stand-in for AI Hub knows: models, data sets and jobs, in memory and in a folder that outlives it."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Spec = list[Any]
"""Of a tensor: [name, dtype such as "float32", shape, graph name or None]."""

CREATED, DONE, FAILED = 1, 10, 30
"""Job states by the client's own numbers; the others are in aihub_jobs.RUNNING."""


@dataclass
class Model:
    """An uploaded model, or one that a job makes."""

    id: str
    name: str
    type: int
    directory: bool
    created: float
    uploaded: bool = False
    expired: bool = False
    bytes: int = 0
    sha256: str = ""
    producer: str = ""
    """The job that makes it; "" for an upload."""
    chip: str = ""
    """What it was compiled for; "" where nobody knows."""
    graphs: list[str] = field(default_factory=list)
    inputs: list[Spec] = field(default_factory=list)
    outputs: list[Spec] = field(default_factory=list)
    upload_id: str = ""
    upload_bytes: int = 0


@dataclass
class Dataset:
    """Uploaded inputs, or outputs of a job."""

    id: str
    name: str
    permanent: bool
    created: float
    uploaded: bool = False
    expired: bool = False
    bytes: int = 0
    sha256: str = ""


@dataclass
class Job:
    """A job; times in seconds since 1970."""

    id: str
    kind: str
    """compile, link, quantize or inference."""
    name: str
    options: str
    device: str
    models: list[str]
    created: float
    state: int = CREATED
    reason: str = ""
    dataset: str = ""
    target: str = ""
    """Model that it makes."""
    output: str = ""
    """Data set that it made."""
    profiling: bool = False
    specs: list[Spec] = field(default_factory=list)
    weights: int = 0
    activations: int = 0
    finished: float = 0.0
    execution_us: int = 0
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Done or failed."""
        return self.state in (DONE, FAILED)


class Store:
    """Everything in one place; hold `lock` around changes, then save()."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, with what an earlier process left there."""
        self.folder = folder
        self.lock = threading.RLock()
        self.token = f"tok-{secrets.token_hex(16)}"
        self.signature = secrets.token_hex(8)
        """Stands for the signature of pre-signed URLs."""
        self.models: dict[str, Model] = {}
        self.datasets: dict[str, Dataset] = {}
        self.jobs: dict[str, Job] = {}
        for kind in ("models", "datasets", "jobs"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        if (folder / "state.json").exists():
            state = json.loads((folder / "state.json").read_text("utf-8"))
            self.token, self.signature = state["token"], state["signature"]
            self.models = {entry["id"]: Model(**entry) for entry in state["models"]}
            self.datasets = {entry["id"]: Dataset(**entry) for entry in state["datasets"]}
            self.jobs = {entry["id"]: Job(**entry) for entry in state["jobs"]}
        self.save()

    def save(self) -> None:
        """Write state.json, whole or not at all."""
        with self.lock:
            state: dict[str, Any] = {"token": self.token, "signature": self.signature}
            for kind in ("models", "datasets", "jobs"):
                state[kind] = [dataclasses.asdict(entry) for entry in getattr(self, kind).values()]
            temporary = self.folder / "state.json.tmp"
            temporary.write_text(json.dumps(state), "utf-8")
            os.replace(temporary, self.folder / "state.json")

    def path(self, kind: str, ident: str, name: str = "file") -> Path:
        """A file of a model, data set or job."""
        folder = self.folder / kind / ident
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def new_model(self, name: str, kind: int, directory: bool, producer: str = "") -> Model:
        """Add a model without a file. Not saved."""
        model = Model(_ident("m"), name, kind, directory, time.time(), producer=producer)
        self.models[model.id] = model
        return model

    def new_dataset(self, name: str, permanent: bool = False) -> Dataset:
        """Add a data set without a file. Not saved."""
        dataset = Dataset(_ident("d"), name, permanent, time.time())
        self.datasets[dataset.id] = dataset
        return dataset

    def new_job(self, kind: str, name: str, options: str, device: str, models: list[str]) -> Job:
        """Add a job. Not saved."""
        job = Job(_ident("j"), kind, name, options, device, models, time.time())
        self.jobs[job.id] = job
        return job


def _ident(letter: str) -> str:
    return letter + secrets.token_hex(4)
