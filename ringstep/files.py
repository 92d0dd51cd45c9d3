"""Small files read without trusting them: a folder that came from elsewhere may hold a pipe or a link to a device."""

from __future__ import annotations

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
