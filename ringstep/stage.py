"""Stages that resume: each builds into a folder of its own, moves its files in and is recorded in manifest.json."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringstep.errors import RingstepError
from ringstep.hashing import sha256_file
from ringstep.manifest import (
    FILE,
    STAGE_NAME,
    Manifest,
    Output,
    StageRecord,
    changed_files,
    check_path,
    remove,
    sync_folder,
)

SAMPLE_SECONDS = 0.05
LOOK_FOR_CHILDREN = 5  # once in so many samples

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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

    Raises RingstepError for a disk too small, a file too large for it or an unacceptable output path, and what `build`
    raises.
    """
    if not manifest.locked:
        raise RuntimeError("run_stage needs a manifest from open_folder")
    if not STAGE_NAME.fullmatch(name):
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
    remove(temporary)
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
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise RingstepError(
                f"{folder}: stage {name} was undone, its files are larger than the file system or ulimit -f allows"
            ) from error
        if not _is_disk_full(error, folder):
            raise
        needs = f", it needs {needs_bytes} bytes" if needs_bytes else ""
        raise RingstepError(f"{folder}: the disk is full, stage {name} was undone{needs}") from error
    finally:
        remove(temporary)
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
    if changed_files(manifest, record):
        return False
    return all(sha256_file(manifest.path(name)) == sha256 for name, sha256 in record.hashes.items())


def _outputs(temporary: Path, stage: str) -> dict[str, Output]:
    outputs = {}
    for path in sorted(temporary.rglob("*")):
        name = path.relative_to(temporary).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() or not path.is_file():
            raise RingstepError(f"stage {stage} left {name}, which is not an ordinary file")
        check_path(temporary, name, f"stage {stage}")
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
    dataclasses.replace(manifest, stages=kept | {record.name: record}).write(written)
    with _uninterrupted():
        for name in stale:
            remove_output(manifest, name)
        for name in record.outputs:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary / name, folder / name)
        os.replace(written, folder / FILE)
        sync_folder(folder)
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
