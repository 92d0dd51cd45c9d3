"""What was built from what: manifest.json in every artifact folder, and the lock of its writer."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ringstep.errors import RingstepError
from ringstep.files import ordinary_size

FORMAT = "ringstep-manifest"
VERSION = 1
FILE = "manifest.json"
LOCK = ".ringstep.lock"

_TEMPORARY = re.compile(r"\.[\w-]+\.tmp-\d+")
STAGE_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class Output:
    """A file that a stage wrote."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class StageRecord:
    """One stage that ran to its end."""

    name: str
    key: str
    """sha256 over all that decides the outputs: stage, options, inputs, versions, ringstep's own version."""
    inputs: dict[str, str]
    """Name to sha256."""
    options: dict[str, Any]
    versions: dict[str, str]
    outputs: dict[str, Output]
    """Path relative to the artifact folder, with forward slashes, to what was written there."""
    seconds: float
    """Wall time of the build."""
    peak_rss_anon_bytes: int
    """Peak anonymous resident memory of the process and its children while building; 0 where unknown."""
    facts: dict[str, Any]
    """What the stage found worth keeping, such as counts of operations."""
    skipped: bool = field(default=False, compare=False)
    """True when this run found the outputs still valid; never saved."""

    @property
    def hashes(self) -> dict[str, str]:
        """Output path to sha256: the next stage's inputs."""
        return {path: output.sha256 for path, output in self.outputs.items()}


@dataclass
class Manifest:
    """manifest.json of one artifact folder. `open_folder` gives one to write, `Manifest.load` one to read."""

    folder: Path
    model: str = ""
    """The model argument as the user typed it."""
    checkpoint: dict[str, str] = field(default_factory=dict)
    """Checkpoint file to sha256."""
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    stages: dict[str, StageRecord] = field(default_factory=dict)
    aihub: dict[str, Any] = field(default_factory=dict)
    """What was asked of Qualcomm AI Hub, uploaded to it and submitted there: see ringstep.profiling.ledger."""
    locked: bool = field(default=False, compare=False)
    """True while this process may write the folder; never saved."""

    @staticmethod
    def load(folder: Path | str) -> Manifest:
        """Read a folder's manifest.

        Raises RingstepError when there is none, or it is damaged, of a newer ringstep, or names a path
        outside the folder.
        """
        folder = Path(folder)
        path = folder / FILE
        try:
            ordinary_size(path)
            data = json.loads(path.read_text("utf-8"), parse_constant=_finite, parse_float=_finite)
        except FileNotFoundError:
            raise RingstepError(f"{folder} has no {FILE}: no artifact; give the folder of an export") from None
        except OSError as error:
            raise RingstepError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise RingstepError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise RingstepError(f"{path} was not written by ringstep")
        version = data.pop("version", None)
        if type(version) is not int or not 1 <= version <= VERSION:
            raise RingstepError(f"{path} has version {version!r}; this ringstep reads up to {VERSION}")
        data.setdefault("aihub", {})  # older ones have none
        _check_keys(data, _MANIFEST_KEYS, str(path))
        stages = {name: _read_stage(folder, name, entry, str(path)) for name, entry in data["stages"].items()}
        return Manifest(folder, **data | {"stages": stages})

    def save(self) -> None:
        """Write manifest.json, all or nothing. Raises OSError."""
        temporary = self.folder / f".ringstep-manifest.tmp-{os.getpid()}"
        try:
            self.write(temporary)
            os.replace(temporary, self.folder / FILE)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.folder)

    def path(self, name: str) -> Path:
        """Return where a recorded output lies. Raises RingstepError when the name leads out of the folder."""
        check_path(self.folder, name, FILE)
        return self.folder / name

    def write(self, path: Path) -> None:
        """Write what manifest.json holds to another place, synced. Raises OSError."""
        stages = {name: dataclasses.asdict(record) for name, record in self.stages.items()}
        for record in stages.values():
            del record["skipped"]
        data = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "checkpoint": self.checkpoint,
            "options": self.options,
            "versions": self.versions,
            "stages": stages,
            "aihub": self.aihub,
        }
        text = json.dumps(data, indent=2, allow_nan=False)
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def manifest_of(folder: Path) -> Manifest:
    """The manifest of an artifact, or of the one that wrote `folder` as a part of itself. Raises RingstepError."""
    if not (folder / FILE).exists() and (folder.resolve().parent / FILE).exists():
        whole = Manifest.load(folder.resolve().parent)
        part = folder.resolve().name + "/"
        if any(name.startswith(part) for record in whole.stages.values() for name in record.outputs):
            return whole
    return Manifest.load(folder)


def changed_files(manifest: Manifest, *records: StageRecord) -> list[str]:
    """A line for every file of `records`, else of all, that is missing or of another size; none is read."""
    lines = []
    for record in records or manifest.stages.values():
        for name, output in record.outputs.items():
            path = manifest.path(name)
            try:
                status = path.stat()
            except OSError:
                status = None
            if status is None or not stat.S_ISREG(status.st_mode):
                lines.append(f"{path} is missing, export again")
            elif status.st_size != output.bytes:
                lines.append(f"{path} has {status.st_size} bytes where {FILE} says {output.bytes}, export again")
    return lines


@contextmanager
def open_folder(folder: Path | str) -> Iterator[Manifest]:
    """Create or reopen an artifact folder for writing and hold its lock; what a dead run left is cleaned up.

    Raises RingstepError when another export holds it, it holds files that are not ringstep's, or its
    manifest is bad.
    """
    folder = Path(folder)
    _refuse_foreign(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise RingstepError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RingstepError(f"{folder} is being written by another export; wait or use another") from None
        except OSError as error:
            raise RingstepError(f"{folder} cannot be locked: {error.strerror}") from None
        _refuse_foreign(folder)
        # Holding the lock, nobody else is alive in here: whatever is temporary belongs to the dead.
        for entry in folder.iterdir():
            if _TEMPORARY.fullmatch(entry.name):
                remove(entry)
        manifest = Manifest.load(folder) if (folder / FILE).exists() else Manifest(folder)
        manifest.locked = True
        try:
            if not (folder / FILE).exists():
                manifest.save()  # a run killed in its first stage must find the folder to be its own
            yield manifest
        finally:
            manifest.locked = False
    finally:
        os.close(lock)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RingstepError(f"{folder} is not a folder")
    if not folder.exists() or (folder / FILE).exists():
        return
    for entry in folder.iterdir():
        if entry.name != LOCK and not _TEMPORARY.fullmatch(entry.name):
            raise RingstepError(f"{folder} holds files that are not ringstep's ({entry.name}); use another")


def check_path(folder: Path, name: str, where: str) -> None:
    """Raise RingstepError, beginning with `where`, for the name of an output that is not plainly inside the folder."""
    pure = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and pure.as_posix() == name
    if not plain or pure.is_absolute() or ".." in pure.parts or name.startswith(".") or name == FILE:
        raise RingstepError(f"{where}: bad path {name!r}")
    if not Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder)):
        raise RingstepError(f"{where}: {name!r} leads out of the folder through a symbolic link")


_MANIFEST_KEYS: dict[str, Any] = {
    "model": str,
    "checkpoint": dict,
    "options": dict,
    "versions": dict,
    "stages": dict,
    "aihub": dict,
}
_STAGE_KEYS: dict[str, Any] = {
    "name": str,
    "key": str,
    "inputs": dict,
    "options": dict,
    "versions": dict,
    "outputs": dict,
    "seconds": (int, float),
    "peak_rss_anon_bytes": int,
    "facts": dict,
}


def _read_stage(folder: Path, name: str, entry: Any, where: str) -> StageRecord:
    where = f"{where}: stage {name!r}"
    _check_keys(entry, _STAGE_KEYS, where)
    if entry["name"] != name or not STAGE_NAME.fullmatch(name):
        raise RingstepError(f"{where}: bad name")
    outputs = {}
    for path, output in entry["outputs"].items():
        check_path(folder, path, where)
        _check_keys(output, {"sha256": str, "bytes": int}, f"{where}: {path}")
        outputs[path] = Output(**output)
    return StageRecord(**entry | {"outputs": outputs})


def _check_keys(entry: Any, kinds: dict[str, Any], where: str) -> None:
    if not isinstance(entry, dict):
        raise RingstepError(f"{where}: not an object")
    for key in sorted(entry.keys() ^ kinds.keys()):
        raise RingstepError(f"{where}: key {key!r} is {'unknown' if key in entry else 'missing'}")
    for key, kind in kinds.items():
        if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
            raise RingstepError(f"{where}: {key} has the wrong type")
        if isinstance(entry[key], int) and not 0 <= entry[key] < 1 << 63:
            raise RingstepError(f"{where}: {key} is no size")
    for key in ("checkpoint", "inputs", "versions"):
        if not all(isinstance(text, str) for text in entry.get(key, {}).values()):
            raise RingstepError(f"{where}: {key} must hold strings")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number that JSON knows")
    return value
