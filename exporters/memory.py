"""What an artifact needs on a phone: caches by context, the binaries' own memory, the table; which phones have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringstep.contract import DTYPE_BYTES, CacheSpec, StepSpec
from ringstep.devices import load_devices
from ringstep.manifest import Manifest

CONTEXTS = (1024, 4096, 8192, 32768, 131072, 1048576)
USABLE = 0.5  # of a phone's memory: a rule of thumb, since system and other apps hold the rest


def kv_bytes(caches: Sequence[CacheSpec], context: int, flat: bool, item_bytes: int | None = None) -> int:
    """Bytes of all caches at a context; `flat` gives every layer a full cache, `item_bytes` another element size."""
    total = 0
    for cache in caches:
        # A window whose cache is longer was exported with all positions kept (--layout sliding=append).
        whole = flat or cache.window is None or cache.length >= cache.window
        length = max(1, (context if whole else min(context, cache.window or context)) - 1)
        total += 2 * cache.kv_heads * cache.head_dim * length * (item_bytes or DTYPE_BYTES[cache.dtype])
    return total


def kv_table(spec: StepSpec) -> list[dict[str, int]]:
    """KV bytes by context, as the layers are and with every layer full, in 2 bytes and in 1 an element."""
    rows = []
    for context in sorted({spec.context, *CONTEXTS}):
        row = {"context": context}
        for name, flat in (("hybrid", False), ("flat", True)):
            row[name] = kv_bytes(spec.caches, context, flat)
            row |= {f"{name}_{8 * n}bit": kv_bytes(spec.caches, context, flat, n) for n in (2, 1)}
        rows.append(row)
    return rows


def fixed_bytes(spec: StepSpec, manifest: Manifest) -> dict[str, Any]:
    """What is in memory whatever the context: graphs with their weights, and the table that the host reads.

    A loaded context binary takes its file's size and what the compiler's own estimate adds to the weights; decode and
    prefill are binaries of their own, each with its copy. A .pte counts as its file's size. Without either the weight
    files stand for them.
    """
    from sanitize.rules.memory import OVERHEAD

    sizes = {path: output.bytes for record in manifest.stages.values() for path, output in record.outputs.items()}
    binaries = [size for path, size in sizes.items() if path.startswith("qnn/") and path.endswith(".bin")]
    table = spec.embedding.file if spec.embedding else ""
    modules = [size for path, size in sizes.items() if path.endswith(".pte")]
    if binaries:
        graphs, source = round(OVERHEAD * sum(binaries)), "context binaries"
    elif modules:
        graphs, source = sum(modules), ".pte files"
    else:
        graphs, source = sum(sizes.get(path, 0) for path in ("onnx/weights.bin", "onnx/quantised.bin")), "weight files"
    return {"graphs": graphs, "from": source, "table": sizes.get(table, 0)}


def on_devices(spec: StepSpec, manifest: Manifest) -> list[dict[str, Any]]:
    """For each phone whose memory is known: the share of it that the artifact needs at each context, and what fits.

    Bytes beside it: `needs`. `fits` is up to half of the memory (USABLE).
    """
    fixed = fixed_bytes(spec, manifest)
    needs = {c: fixed["graphs"] + fixed["table"] + kv_bytes(spec.caches, c, False) for c in CONTEXTS}
    rows = []
    for device in load_devices().values():
        if not device.memory_gb:
            continue
        memory = device.memory_gb * 10**9
        at = [{"context": c, "needs": n, "share": n / memory, "fits": n <= USABLE * memory} for c, n in needs.items()]
        rows.append({"device": device.id, "memory_bytes": memory, "contexts": at})
    return rows
