"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ringstep.errors import RingstepError


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends without an error.

    Raises RingstepError when it cannot be written: a full disk, a folder of that name, no permission.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                yield file
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
