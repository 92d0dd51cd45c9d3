"""Small files, written whole or not at all, and read without trusting them.

A folder that came from elsewhere may hold a pipe or a link to a device.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from pathlib import Path

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
    try:
        write_whole(path, json.dumps(_finite(body), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise RingstepError(f"{path} cannot be written: {error.strerror or error}") from None


def write_whole(path: Path, content: str, errors: str = "strict") -> None:
    """Write text as UTF-8, all or nothing; `errors` as for str.encode. Raises OSError."""
    # The form of name that opening an artifact's folder cleans up after a killed run.
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8", errors=errors, newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
