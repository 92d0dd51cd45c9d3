"""Files and folders that appear whole or not at all; small files, read without trusting them.

A folder that came from elsewhere may hold a pipe or a link to a device.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ringstep.errors import RingstepError

SMALL_LIMIT = 64_000_000  # bytes; an index of 100 000 tensors is about 10 MB


def ordinary_size(path: Path) -> int:
    """Return a file's size; RingstepError for a pipe or a device, where a read may wait or go on for ever."""
    status = path.stat()
    # A folder fails by itself, at once and in the system's words.
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise RingstepError(f"{path} is not an ordinary file")
    return status.st_size


def refuse_pipes(folder: Path) -> None:
    """Raise RingstepError for a folder with a pipe or a device in it: libraries that open files by name would wait."""
    for home, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # a link to nothing; who opens it will say so
                ordinary_size(Path(home, name))


def read_small(path: Path) -> bytes:
    """Read a file that should be small (configuration, tokenizer); RingstepError above 64 MB."""
    try:
        size = ordinary_size(path)
        if size > SMALL_LIMIT:
            raise RingstepError(f"{path} is {size} bytes, far more than it can need; is it the right file?")
        return path.read_bytes()
    except OSError as error:
        raise RingstepError(f"{path} cannot be read: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """Read a small file of UTF-8 text; RingstepError for anything else."""
    try:
        return read_small(path).decode("utf-8")
    except UnicodeDecodeError:
        raise RingstepError(f"{path} is not UTF-8 text; fetch it again") from None


def write_json(path: Path, body: object) -> None:
    """Write plain values as JSON, all or nothing; numbers that JSON does not know as null. Raises RingstepError."""
    with _explained(path):
        write_whole(path, json.dumps(_finite(body), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, content: str, errors: str = "strict") -> None:
    """Write text as UTF-8, all or nothing; `errors` as for str.encode. Raises OSError."""
    with _replacing(path) as file:
        file.write(content.encode("utf-8", errors))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends without an error.

    Raises RingstepError when it cannot be written: a full disk, a folder of that name, no permission.
    """
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as file:
            yield file


@contextlib.contextmanager
def new_folder(path: Path, ours: str) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when the block ends without an error.

    What is there already is only replaced if it is empty or holds a file called `ours`: RingstepError otherwise, and
    when the folder cannot be written.
    """
    path = path.resolve()
    if path.exists() and not (path.is_dir() and (not any(path.iterdir()) or (path / ours).is_file())):
        raise RingstepError(f"{path} exists and was not written by this command; give another name or remove it")
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    try:
        with _explained(path):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            if path.exists():
                os.replace(path, old)
            try:
                os.replace(temporary, path)
            except OSError:
                if old.exists():
                    os.replace(old, path)
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "; free some space" if error.errno == errno.ENOSPC else ""
        raise RingstepError(f"{path} cannot be written: {error.strerror or error}{hint}") from None


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    # The form of name that opening an artifact's folder cleans up after a killed run.
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
