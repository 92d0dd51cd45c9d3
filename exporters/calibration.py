"""What calibration reads, and where its results are kept between exports."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringstep import console
from ringstep.errors import RingstepError
from ringstep.hashing import cache_home

if TYPE_CHECKING:
    from exporters.line import Line

SHORTEST = 64  # tokens below which ranges mean nothing
CACHED = 16  # calibrations kept in the user's cache


def calibration_texts(line: Line, n: int) -> list[list[int]]:
    """Sequences of ids, the first token of each among them: n * k + 1 ids. Raises RingstepError for too little text."""
    from quantize.corpus import load_texts, sequences
    from ringstep.text import Text

    length = text_length(line, n)
    tokens = -(-line.job.calibration_tokens // length) * length
    if tokens < SHORTEST:
        raise RingstepError(f"--calibration-tokens {tokens}: ranges need at least {SHORTEST}")
    if not (line.job.out / "tokenizer" / "tokenizer.json").is_file():
        if line.job.calibration:
            raise RingstepError("--calibration: the checkpoint has no tokenizer to read text with")
        return random_texts(line.plan.vocab, tokens // length, length + 1)
    text = Text(line.job.out)
    documents = load_texts(line.job.calibration)
    first = first_token(text, line.plan.vocab)
    return sequences(documents, text, length=length + 1, tokens=tokens // length * (length + 1), prefix=[first],
                     vocab=line.plan.vocab)  # fmt: skip


def text_length(line: Line, n: int) -> int:
    """Tokens of a sequence after its first: whole chunks, past the second wrap of windows as the context allows."""
    windows = [k.window for k in line.plan.kinds.values() if k.window]
    wanted = max(512, 2 * max(windows, default=0) + 8)
    return max(1, min(line.context - 1, wanted) // n) * n


def first_token(text: Any, vocab: int) -> int:
    """The id that texts of this model begin with: its chats', else what the tokenizer puts first, else bos."""
    ids = text.chat("a") if text.template else text.encode("a")
    if not text.template:
        bos = text.tokenizer.token_to_id(text.specials().get("bos_token") or "")
        ids = [bos] if bos is not None and ids[:1] != [bos] else ids
    if not ids or ids[0] >= vocab:
        raise RingstepError("the tokenizer makes no id of this model's vocabulary; give the checkpoint's own tokenizer")
    return int(ids[0])


def random_texts(vocab: int, count: int, length: int) -> list[list[int]]:
    """Seeded random ids, for a checkpoint without a tokenizer; all begin alike."""
    import numpy as np

    console.warn("the checkpoint has no tokenizer: calibration runs on random ids, whose ranges are no text's")
    ids = np.random.default_rng(0).integers(0, vocab, (count, length))
    ids[:, 0] = ids[0, 0]
    return [[int(i) for i in row] for row in ids]


def cache_folder() -> Path:
    """Where calibrations are kept by content."""
    return cache_home() / "calibration"


def from_cache(key: str, path: Path) -> bool:
    """Copy a calibration from the user's cache; False when there is none, or it cannot be read."""
    from quantize.calibrate import load

    kept = cache_folder() / f"{key}.npz"
    try:
        load(kept)
        shutil.copyfile(kept, path)
        os.utime(kept)
        return True
    except (RingstepError, OSError):
        return False


def to_cache(key: str, path: Path) -> None:
    """Keep a calibration; the ones used longest ago go. A cache that cannot be written only costs time."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{key}.tmp-{os.getpid()}"
        shutil.copyfile(path, temporary)
        os.replace(temporary, folder / f"{key}.npz")
        for old in sorted(folder.glob("*.npz"), key=lambda p: p.stat().st_mtime)[:-CACHED]:
            old.unlink(missing_ok=True)
    except OSError:
        return
