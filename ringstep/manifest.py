"""What was built from what: manifest.json in every artifact folder, and stages that resume from it."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import re
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ringstep.errors import RingstepError
from ringstep.files import ordinary_size
from ringstep.hashing import sha256_file

FORMAT = "ringstep-manifest"
VERSION = 1
FILE = "manifest.json"
LOCK = ".ringstep.lock"
SAMPLE_SECONDS = 0.05
LOOK_FOR_CHILDREN = 5  # once in so many samples

_TEMPORARY = re.compile(r"\.[\w-]+\.tmp-\d+")
_STAGE = re.compile(r"[\w-]+")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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
            self._write(temporary)
            os.replace(temporary, self.folder / FILE)
        finally:
            temporary.unlink(missing_ok=True)
        _sync(self.folder)

    def path(self, name: str) -> Path:
        """Return where a recorded output lies. Raises RingstepError when the name leads out of the folder."""
        _check_path(self.folder, name, FILE)
        return self.folder / name

    def _write(self, path: Path) -> None:
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
                _remove(entry)
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


def run_stage(
    manifest: Manifest,
    name: str,
    *,
    inputs: dict[str, str],
    options: dict[str, Any],
    versions: dict[str, str],
    build: Callable[[Path], dict[str, Any] | None],
    needs_bytes: int = 0,
) -> StageRecord:
    """Run one stage, or skip it when the same one ran before and its outputs are still what it wrote.

    `inputs` maps names to sha256; `options` and the facts `build` may return are JSON values; `needs_bytes`
    is what the outputs will take on disk, 0 if unknown. `build` writes into an empty folder. Only once it
    returns do its files move into the artifact folder, replacing those of the stage's earlier run; when it
    raises or is interrupted the artifact folder stays as it was.

    Raises RingstepError for a disk too small or an unacceptable output path, and what `build` raises.
    """
    if not manifest.locked:
        raise RuntimeError("run_stage needs a manifest from open_folder")
    if not _STAGE.fullmatch(name):
        raise ValueError(f"stage name {name!r}")
    key = _key(name, inputs, options, versions)
    earlier = manifest.stages.get(name)
    if earlier and earlier.key == key and intact(manifest, earlier):
        return dataclasses.replace(earlier, skipped=True)
    folder = manifest.folder
    free = shutil.disk_usage(folder).free
    if needs_bytes > free:
        raise RingstepError(f"{folder}: stage {name} needs {needs_bytes} bytes of disk, {free} are free")
    temporary = folder / f".{name}.tmp-{os.getpid()}"
    _remove(temporary)
    try:
        temporary.mkdir()
        start = time.perf_counter()
        with _peak_memory() as peak:
            facts = build(temporary) or {}
        seconds = round(time.perf_counter() - start, 3)
        record = StageRecord(
            name=name,
            key=key,
            inputs=dict(inputs),
            options=dict(options),
            versions=dict(versions),
            outputs=_outputs(temporary, name),
            seconds=seconds,
            peak_rss_anon_bytes=peak[0],
            facts=facts,
        )
        _commit(manifest, record, temporary)
    except Exception as error:
        if not _is_disk_full(error, folder):
            raise
        needs = f", it needs {needs_bytes} bytes" if needs_bytes else ""
        raise RingstepError(f"{folder}: the disk is full, stage {name} was undone{needs}") from error
    finally:
        _remove(temporary)
    return record


def library_versions(*names: str) -> dict[str, str]:
    """Return the installed version of each distribution; "none" for one that is not installed."""
    return {name: _version(name) for name in names}


def source_hash(*paths: str) -> str:
    """Return one sha256 over ringstep's own sources: folders or files such as "recipes", "quantize/qdq.py".

    Raises RingstepError for a path that does not exist.
    """
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in paths:
        files = sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]
        for file in files:
            digest.update(f"{file.relative_to(root).as_posix()} {sha256_file(file)}\n".encode())
    return digest.hexdigest()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _key(name: str, inputs: dict[str, str], options: dict[str, Any], versions: dict[str, str]) -> str:
    parts = {
        "stage": name,
        "inputs": inputs,
        "options": options,
        "versions": versions,
        "ringstep": _version("ringstep"),
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def intact(manifest: Manifest, record: StageRecord) -> bool:
    """Whether the outputs of a stage are still what it wrote."""
    for name, output in record.outputs.items():
        path = manifest.path(name)
        try:
            status = path.stat()
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode) or status.st_size != output.bytes:
            return False
        if sha256_file(path) != output.sha256:
            return False
    return True


def _outputs(temporary: Path, stage: str) -> dict[str, Output]:
    outputs = {}
    for path in sorted(temporary.rglob("*")):
        name = path.relative_to(temporary).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() or not path.is_file():
            raise RingstepError(f"stage {stage} left {name}, which is not an ordinary file")
        _check_path(temporary, name, f"stage {stage}")
        outputs[name] = Output(sha256_file(path), path.stat().st_size)
    return outputs


def _commit(manifest: Manifest, record: StageRecord, temporary: Path) -> None:
    folder = manifest.folder
    # A record that loses a file to this stage is of an older line; dropping it makes its stage run again. What else it
    # wrote would have no owner, and stay.
    kept = {
        name: other
        for name, other in manifest.stages.items()
        if name != record.name and not other.outputs.keys() & record.outputs.keys()
    }
    dropped = [other for name, other in manifest.stages.items() if name not in kept]
    owned = {path for other in kept.values() for path in other.outputs} | record.outputs.keys()
    stale = {path for other in dropped for path in other.outputs} - owned
    for name in (*record.outputs, *stale):
        if manifest.path(name).is_dir() and name in record.outputs:  # refuses before anything changed
            raise RingstepError(f"{folder / name}: a folder, where stage {record.name} writes a file; move it away")
    # All that takes disk space comes before the first file moves.
    written = temporary / f".{FILE}"
    dataclasses.replace(manifest, stages=kept | {record.name: record})._write(written)
    with _uninterrupted():
        for name in stale:
            remove_output(manifest, name)
        for name in record.outputs:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary / name, folder / name)
        os.replace(written, folder / FILE)
        _sync(folder)
        manifest.stages = kept | {record.name: record}


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _peak_memory() -> Iterator[list[int]]:
    from ringstep.child import anonymous_bytes, descendants

    peak = [anonymous_bytes(os.getpid())]
    done = threading.Event()

    def sample() -> None:
        children: list[int] = []
        for count in itertools.count():
            if done.wait(SAMPLE_SECONDS):
                return
            # Looking for them holds the interpreter's lock.
            children = children if count % LOOK_FOR_CHILDREN else descendants(os.getpid())
            peak[0] = max(peak[0], sum(map(anonymous_bytes, [os.getpid(), *children])))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _is_disk_full(error: Exception, folder: Path) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    # Libraries report a full disk in their own ways, some without an errno; the disk itself tells.
    return not isinstance(error, RingstepError) and shutil.disk_usage(folder).free < 1 << 20


def remove_output(manifest: Manifest, name: str) -> None:
    """Delete a recorded file, and the folders that it leaves empty."""
    path = manifest.path(name)
    path.unlink(missing_ok=True)
    for parent in path.relative_to(manifest.folder).parents[:-1]:
        try:
            (manifest.folder / parent).rmdir()
        except OSError:
            return  # still holds something


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
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


def _check_path(folder: Path, name: str, where: str) -> None:
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
    if entry["name"] != name or not _STAGE.fullmatch(name):
        raise RingstepError(f"{where}: bad name")
    outputs = {}
    for path, output in entry["outputs"].items():
        _check_path(folder, path, where)
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
