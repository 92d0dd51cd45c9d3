"""What the tests of AI Hub jobs share: a tiny artifact ready to be sent, and runs of the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aihub_server import HubServer, fast_retries

from exporters.cli import cli
from ringstep import console
from ringstep.profiling import jobs

SPARK = Path(__file__).parent.parent / "data" / "spark2_5_tiny"
LAYERS = "sliding,full,head"


def run(*args: object) -> int:
    """The command line in this process; its exit code."""
    console.settings.quiet = console.settings.verbose = False  # flags of the run before
    return console.run(cli, [str(arg) for arg in args])


def export(folder: Path, *options: str) -> Path:
    """The golden Spark as a small artifact for a Galaxy S25, its parts cut, sampled and compiled."""
    assert run("-q", "export", SPARK, "--device", "galaxy-s25", "--context", "64", "--no-parity", "--out", folder,
               *options) == 0  # fmt: skip
    assert run("-q", "profile", folder, "--device", "galaxy-s25", "--layers", LAYERS, "--dry-run", "--json") == 0
    return folder


@dataclass
class Desk:
    """One test's own copy of an artifact, and the stand-in it is sent to."""

    server: HubServer
    artifact: Path
    db: Path

    def profile(self, *options: object, layers: str = LAYERS) -> int:
        """ringstep profile --layers sliding,full,head."""
        asked = ("--device", "galaxy-s25", "--layers", layers, "--db", self.db)
        return run("-q", "profile", self.artifact, *asked, *options)

    @property
    def noted(self) -> dict[str, Any]:
        """What the manifest says of AI Hub."""
        return json.loads((self.artifact / "manifest.json").read_text())["aihub"]

    def once(self) -> bool:
        """Whether the service has each job once, and the manifest knows them all."""
        names = [job.name for job in self.server.jobs.values()]
        known = {job["id"]: job["name"] for job in self.noted["jobs"].values()}
        return len(set(names)) == len(names) and known == {job.id: job.name for job in self.server.jobs.values()}


@contextmanager
def desk(artifact: Path, home: Path, monkeypatch: Any, **options: Any) -> Iterator[Desk]:
    """A desk in `home`; the client retries within milliseconds and jobs are asked for often."""
    home.mkdir(exist_ok=True)
    copy = Path(shutil.copytree(artifact, home / "artifact"))
    for name, value in (("FIRST_PAUSE", 0.01), ("LONGEST_PAUSE", 0.02), ("FIRST_POLL", 0.02), ("LONGEST_POLL", 0.05)):
        monkeypatch.setattr(jobs, name, value)
    with HubServer(home / "hub", **options) as server, fast_retries():
        monkeypatch.setenv("QAIHUB_CLIENT_INI", str(server.write_ini(home / "client.ini")))
        yield Desk(server, copy, home / "profiles.db")
