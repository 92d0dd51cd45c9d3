"""sha256 of files, remembered: a 10 GB checkpoint is hashed once, not at every run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path

from ringstep.errors import RingstepError

SMALL = 1 << 20  # bytes; below this hashing is cheaper than the cache
ENTRIES = 1000  # the oldest go first
SETTLED = 2.0  # seconds since the last change before a time stamp can tell two versions apart


def sha256_file(path: Path | str) -> str:
    """Return the hexadecimal sha256 of a file, from the cache when the file is provably the same.

    The cache (sha256.json in $XDG_CACHE_HOME/ringstep or ~/.cache/ringstep) is keyed by resolved path, size,
    inode, modification and change time; a damaged or unwritable cache only costs time.
    Raises RingstepError when the file cannot be read.
    """
    path = Path(path)
    try:
        resolved = path.resolve(strict=True)
        before = _identity(resolved)
        if resolved.stat().st_size < SMALL:
            return _digest(resolved)
        known = _load().get(str(resolved))
        if isinstance(known, list) and known[:-1] == before and re.fullmatch("[0-9a-f]{64}", str(known[-1])):
            return str(known[-1])
        digest = _digest(resolved)
        # A file still being written may change again within the clock's resolution: never remember it.
        changed = max(before[2], before[3]) / 1e9
        if _identity(resolved) == before and abs(time.time() - changed) > SETTLED:
            _remember(str(resolved), [*before, digest])
        return digest
    except OSError as error:
        raise RingstepError(f"{path} cannot be read: {error.strerror or error}") from None


def _identity(path: Path) -> list[int]:
    # The change time catches what keeps size and modification time, such as `cp -p` over the same file.
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def cache_home() -> Path:
    """The user's cache folder of ringstep; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ringstep"


def _cache_file() -> Path:
    return cache_home() / "sha256.json"


def _load() -> dict[str, object]:
    try:
        cache = json.loads(_cache_file().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cache if isinstance(cache, dict) else {}


def _remember(key: str, entry: list[object]) -> None:
    cache = _load()
    cache.pop(key, None)
    cache[key] = entry
    target = _cache_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix="sha256-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(dict(list(cache.items())[-ENTRIES:]), stream)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, ValueError):
        return  # no cache is not a failure
