"""A recipe's modules fed a whole text at once: no host loop, no rings, and a mask written down from the definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ringstep.parity.report import CacheEntries

if TYPE_CHECKING:
    from recipes.step import DecodeStep


def whole_text(
    step: DecodeStep, feed: np.ndarray, past: Mapping[tuple[int, str], np.ndarray] | None = None
) -> tuple[np.ndarray, list[CacheEntries]]:
    """Logits [tokens, vocab] and every layer's entries of a text in float32.

    `feed` is ids [tokens], or rows [tokens, hidden] where the table is outside; `past` the entries [1, kv_heads,
    count, head_dim] of what comes before it, by (layer, "key" or "value"). A reference must not share the host loop
    with what it judges: a mask that is wrong in both would go unseen.
    """
    import torch

    spec, n = step.spec, len(feed)
    count = next(iter(past.values())).shape[2] if past else 0
    at = np.arange(count, count + n)
    inputs: dict[str, Any] = {}
    if feed.ndim == 1:
        inputs["input_ids"] = torch.from_numpy(feed.astype(np.int32))
    else:
        inputs["x"] = torch.from_numpy(feed.astype(np.float32))
    for rotary in spec.rotary:
        angles = at.astype(np.float32)[:, None] * np.asarray(rotary.inv_freq, np.float32)
        inputs[f"cos_{rotary.name}"] = torch.from_numpy(np.cos(angles) * np.float32(rotary.scale))
        inputs[f"sin_{rotary.name}"] = torch.from_numpy(np.sin(angles) * np.float32(rotary.scale))
    behind = at[:, None] - np.arange(count + n)  # how far a key lies behind a query; negative: after it
    for mask in spec.masks:
        hidden = (behind < 0) | (behind >= (mask.window or count + n))
        added = np.where(hidden, spec.mask_value, 0.0).astype(np.float32)
        inputs[f"mask_{mask.name}"] = torch.from_numpy(added)[None, None]
    for cache in spec.caches:
        for what in ("key", "value"):
            none = np.zeros((1, cache.kv_heads, 0, cache.head_dim), np.float32)
            before = past[cache.layer, what] if past else none
            inputs[f"past_{what}_{cache.layer}"] = torch.from_numpy(np.array(before, np.float32))
    with torch.inference_mode():
        out = {name: tensor.numpy() for name, tensor in step(inputs).items()}
    caches = []
    for cache in spec.caches:
        entries = []
        for what in ("key", "value"):
            new = out[f"new_{what}_{cache.layer}"]
            entries.append(np.concatenate([past[cache.layer, what], new], axis=2)[0] if past else new[0])
        caches.append((np.arange(count + n), entries[0], entries[1]))
    return out["logits"], caches
