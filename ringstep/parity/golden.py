"""Goldens: what the reference said of a text, in a file, so that parity needs neither transformers nor the checkpoint.

A .safetensors file: ids int32 [n], logits float32 [fed, vocab], and for each layer positions.I int32 [m], keys.I and
values.I float32 [kv_heads, m, head_dim], keys after rotary. The first ids are the prompt, the rest the greedy answer;
all but the last of an answer were fed. Its metadata say what made it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ringstep.contract import StepSpec
from ringstep.errors import RingstepError
from ringstep.files import ordinary_size
from ringstep.parity.report import CacheEntries, Truth

FORMAT, VERSION = "ringstep.golden", "1"
WARN_BYTES, LIMIT_BYTES = 256 << 20, 4 << 30
FACTS = ("model", "checkpoint", "source", "ringstep", "transformers", "torch")


@dataclass(frozen=True)
class Golden:
    """A reference's text: its first `prompt` ids were given, the rest is the greedy answer."""

    truth: Truth
    prompt: int
    facts: dict[str, str] = field(default_factory=dict)
    """model, checkpoint (sha256), source, and versions: ringstep, transformers, torch."""

    @property
    def fed(self) -> list[int]:
        """The ids that there are logits of."""
        return self.truth.ids[: len(self.truth.logits)]


def golden_bytes(tokens: int, vocab: int, layers: Sequence[tuple[int, int]]) -> int:
    """The size of a golden of `tokens` fed; `layers` are (kv_heads, head_dim)."""
    return 4 * tokens * (vocab + sum(2 * heads * dim + 1 for heads, dim in layers))


def save_golden(golden: Golden, path: Path) -> None:
    """Write a golden, all or nothing. Raises RingstepError."""
    from safetensors.numpy import save_file

    truth = golden.truth
    tensors = {"ids": np.array(truth.ids, np.int32), "logits": np.ascontiguousarray(truth.logits, np.float32)}
    for layer, (positions, keys, values) in enumerate(truth.caches):
        tensors[f"positions.{layer}"] = np.array(positions, np.int32)
        tensors[f"keys.{layer}"] = np.ascontiguousarray(keys, np.float32)
        tensors[f"values.{layer}"] = np.ascontiguousarray(values, np.float32)
    facts = {"format": FORMAT, "version": VERSION, "prompt": str(golden.prompt), **golden.facts}
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        save_file(tensors, temporary, facts)
        os.replace(temporary, path)
    except Exception as error:  # the library has an error of its own for a full disk
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise RingstepError(f"{path} cannot be written: {reason}") from None
    finally:
        temporary.unlink(missing_ok=True)


def load_golden(path: Path) -> Golden:
    """Read a golden, which may come from anywhere. Raises RingstepError for what is none, or is damaged."""
    from safetensors import safe_open

    try:
        if ordinary_size(path) > LIMIT_BYTES:
            raise RingstepError(f"{path}: larger than {LIMIT_BYTES >> 30} GiB, not a golden of ringstep reference")
        with safe_open(path, "np") as file:
            facts: dict[str, str] = file.metadata() or {}
            if facts.get("format") != FORMAT or facts.get("version") != VERSION:
                raise RingstepError(f"{path}: no golden of this ringstep; make one with ringstep reference")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RingstepError(f"{path}: no such file; make it with ringstep reference") from None
    except RingstepError:
        raise
    except Exception as error:  # what the library raises for a bad header, and what the system does
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0][:200]
        raise RingstepError(f"{path}: cannot be read as a golden: {reason}; make it again") from None
    try:
        return built(tensors, facts)
    except RingstepError as error:
        raise RingstepError(f"{path}: {error}; make it again") from None


def built(tensors: dict[str, np.ndarray], facts: dict[str, str]) -> Golden:
    """A golden of what a file holds; every shape and number is checked."""
    ids, logits = taken(tensors, "ids", np.int32, 1), taken(tensors, "logits", np.float32, 2)
    tokens, vocab = logits.shape
    if not 1 <= tokens <= len(ids) or len(ids) - tokens > 1:
        raise RingstepError(f"logits of {tokens} tokens beside {len(ids)} ids")
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
        raise RingstepError(f"ids outside its vocabulary of {vocab}")
    prompt = facts.get("prompt", "")
    if not (prompt.isascii() and prompt.isdigit() and len(prompt) < 12 and 1 <= int(prompt) <= len(ids)):
        raise RingstepError(f"a prompt of {prompt[:20]!r} tokens in a text of {len(ids)}")
    if len(tensors) % 3 != 2:
        raise RingstepError("tensors that belong to no layer")
    caches: list[CacheEntries] = []
    for layer in range(len(tensors) // 3):
        positions = taken(tensors, f"positions.{layer}", np.int32, 1)
        keys, values = (taken(tensors, f"{what}.{layer}", np.float32, 3) for what in ("keys", "values"))
        if keys.shape != values.shape or keys.shape[1] != len(positions):
            have = f"keys {list(keys.shape)}, values {list(values.shape)} and {len(positions)} positions"
            raise RingstepError(f"{have} in layer {layer}")
        rising = not len(positions) or (positions[0] >= 0 and positions[-1] < tokens and (np.diff(positions) > 0).all())
        if not rising:
            raise RingstepError(f"positions of layer {layer} out of order")
        caches.append((positions.astype(np.int64), keys, values))
    truth = Truth(facts.get("source", "golden"), ids.tolist(), logits, caches)
    return Golden(truth, int(prompt), {name: facts[name] for name in FACTS if name in facts})


def taken(tensors: dict[str, np.ndarray], name: str, dtype: Any, rank: int) -> np.ndarray:
    """A tensor of the file, of this dtype and rank and with finite numbers."""
    array = tensors.get(name)
    if array is None:
        raise RingstepError(f"no tensor {name}")
    if array.dtype != dtype or array.ndim != rank:
        raise RingstepError(f"tensor {name} is {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} of rank {rank}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RingstepError(f"tensor {name} holds values that are not finite")
    return array


def fit(golden: Golden, spec: StepSpec, sha256: str | None) -> None:
    """Raise RingstepError where a golden is not about an artifact: another checkpoint, vocabulary or layers."""
    made_from = golden.facts.get("checkpoint")
    if sha256 and made_from and made_from != sha256:
        raise RingstepError("made from another checkpoint than the artifact (its sha256 differs): make it again")
    vocab = golden.truth.logits.shape[1]
    if vocab != spec.vocab:
        raise RingstepError(f"a vocabulary of {vocab}, the artifact's is {spec.vocab}: make it from its checkpoint")
    if len(golden.truth.caches) != len(spec.caches):
        raise RingstepError(f"{len(golden.truth.caches)} layers, the artifact has {len(spec.caches)}")
    for layer, ((_, keys, _), cache) in enumerate(zip(golden.truth.caches, spec.caches, strict=True)):
        have, want = [keys.shape[0], keys.shape[2]], [cache.kv_heads, cache.head_dim]
        if have != want:
            raise RingstepError(f"layer {layer} has [kv_heads, head_dim] {have}, the artifact's {want}")
    first = spec.prefix.ids if spec.prefix else ()
    if tuple(golden.truth.ids[: len(first)]) != first:
        begin = ",".join(map(str, first))
        raise RingstepError(f"its text begins with {golden.truth.ids[: len(first)]}, every text of this artifact with "
                            f"{list(first)}: make it with ringstep reference --begin {begin}")  # fmt: skip


def shortened(golden: Golden, tokens: int) -> Golden:
    """The same for a text of at most `tokens` fed."""
    truth = golden.truth
    if len(truth.logits) <= tokens:
        return golden
    caches = []
    for positions, keys, values in truth.caches:
        kept = positions < tokens
        caches.append((positions[kept], keys[:, kept], values[:, kept]))
    cut = Truth(truth.source, truth.ids[: tokens + 1], truth.logits[:tokens], caches)
    return Golden(cut, min(golden.prompt, tokens + 1), golden.facts)
