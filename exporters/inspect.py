"""Describing an artifact: graphs, caches, files, and what the caches cost by context."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from exporters.memory import CONTEXTS, fixed_bytes, kv_table, on_devices
from ringstep import console
from ringstep.contract import CacheSpec, StepSpec
from ringstep.errors import RingstepError
from ringstep.manifest import FILE, changed_files, manifest_of


def describe(artifact: Path) -> dict[str, Any]:
    """An artifact as plain values. Raises RingstepError for a folder that is none."""
    spec = StepSpec.load(artifact)
    manifest = manifest_of(artifact)
    for line in changed_files(manifest):
        console.warn(line)
    # Every cache of one kind is alike: list kinds, not layers.
    kinds: dict[tuple[Any, ...], list[CacheSpec]] = {}
    for cache in spec.caches:
        kinds.setdefault((cache.kind, cache.length, cache.window, cache.kv_heads, cache.head_dim), []).append(cache)
    # A part of an artifact lists its own files.
    part = "" if (artifact / FILE).exists() else artifact.resolve().name + "/"
    files = {path.removeprefix(part): o.bytes for record in manifest.stages.values()
             for path, o in record.outputs.items() if path.startswith(part)}  # fmt: skip
    return {
        "folder": str(artifact), "model": spec.model, "recipe": spec.recipe, "dtype": spec.dtype,
        "activations": spec.activations, "context": spec.context, "vocab": spec.vocab, "hidden": spec.hidden,
        "target": spec.target, "versions": manifest.versions,
        "graphs": [
            {"n": g.n, "inputs": [io(t) for t in g.inputs], "outputs": [io(t) for t in g.outputs],
             "files": {fmt: [p.file for p in parts] for fmt, parts in g.parts.items()}}
            for g in spec.graphs
        ],
        "caches": [
            {"layers": [c.layer for c in cs], "kind": cs[0].kind, "length": cs[0].length, "window": cs[0].window,
             "kv_heads": cs[0].kv_heads, "head_dim": cs[0].head_dim, "bytes": sum(c.nbytes for c in cs)}
            for cs in kinds.values()
        ],
        "kv_bytes": kv_table(spec),
        "memory": fixed_bytes(spec, manifest) | {"devices": on_devices(spec, manifest)},
        "files": files,
    }  # fmt: skip


def describe_pte(path: Path) -> dict[str, Any]:
    """A .pte as plain values, with the graphs of its context binaries where it has any. Raises RingstepError."""
    from ringstep import pte

    body = pte.describe(path)
    return body | {"graphs": graphs_inside(path)} if body["contexts"] else body


def graphs_inside(path: Path) -> dict[str, Any] | None:
    """The graphs of a .pte's context binaries; None, with a warning, where Qualcomm's libraries are not at hand."""
    from ringstep import pte_qnn, qairt

    try:
        qairt.require()
    except RingstepError as error:
        console.warn(f"the graphs inside are not listed: {error}")
        return None
    return pte_qnn.graphs(path)


def print_pte(body: dict[str, Any]) -> None:
    """Print what a .pte holds."""
    segments = body["segment_bytes"]
    console.line(f"{body['file']}: {console.human_bytes(body['bytes'])}, ExecuTorch program version {body['version']}, "
                 f"{len(segments)} segments of {console.human_bytes(sum(segments))}")  # fmt: skip
    for name, method in body["methods"].items():
        for what in ("delegates", "cpu_kernels"):
            counts = [f"{count} {key}" for key, count in method[what].items()]
            console.line(f"{name}: {what.replace('_', ' ').replace('cpu', 'CPU')}: {', '.join(counts) or 'none'}")
        rows = [("in" if side == "inputs" else "out", label, "x".join(map(str, t["shape"])), t["dtype"])
                for side in ("inputs", "outputs") for label, t in fold(list(map(with_role, method[side])))]  # fmt: skip
        console.table(name, ["", "name", "shape", "type"], rows)
    for context in body["contexts"]:
        sharing = "weights shared" if context["weight_sharing"] else "weights not shared"
        console.line(
            f"context of {', '.join(context['methods'])}: {console.human_bytes(context['bytes'])}, {context['soc']} "
            f"({context['arch']}), {context['precision']}, QAIRT {context['qairt']}, {sharing}"
        )
    for name, graph in (body.get("graphs") or {}).items():
        console.line(f"graph {name}: {len(graph['inputs'])} inputs, {len(graph['outputs'])} outputs")
    listed = [(n, str(v)[:90]) for n, v in body["constants"].items() if not n.endswith(("_inputs", "_outputs"))]
    console.table("constant methods", ["name", "value"], listed)
    for warning in body["warnings"]:
        console.warn(warning)


def with_role(tensor: dict[str, Any]) -> dict[str, Any]:
    """A tensor of a .pte with role and layer by its name, for `fold`."""
    found = re.fullmatch(r"(past|new|present)_(key|value)_(\d+)", tensor["name"])
    return tensor | {"role": f"{found[2]}_{found[1]}" if found else "", "layer": int(found[3]) if found else None}


def io(tensor: Any) -> dict[str, Any]:
    """One input or output as plain values."""
    return {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "role": tensor.role,
            "layer": tensor.layer}  # fmt: skip


def print_description(body: dict[str, Any]) -> None:
    """Print a description as tables."""
    console.line(f"{body['model']} ({body['recipe']}), {body['dtype']}, {body['activations']} activations")
    console.line(", ".join([f"context {body['context']}", *body["target"].values()]))
    for graph in body["graphs"]:
        rows = [("in" if side == "inputs" else "out", name, "x".join(map(str, t["shape"])), t["dtype"], t["role"])
                for side in ("inputs", "outputs") for name, t in fold(graph[side])]  # fmt: skip
        console.table(f"graph of {graph['n']} token{'s' * (graph['n'] > 1)}",
                      ["", "name", "shape", "type", "role"], rows)  # fmt: skip
    caches = [(ranges(c["layers"]), c["kind"], c["length"], c["window"] or "", c["kv_heads"], c["head_dim"],
             console.human_bytes(c["bytes"])) for c in body["caches"]]  # fmt: skip
    console.table("caches", ["layers", "kind", "length", "window", "kv heads", "head_dim", "size"], caches)
    human = console.human_bytes
    sizes = [(k["context"], human(k["hybrid_16bit"]), human(k["flat_16bit"]), human(k["hybrid_8bit"]),
              human(k["flat_8bit"]), f"{k['flat'] / k['hybrid']:.2f}x" if k["hybrid"] else "")
             for k in body["kv_bytes"]]  # fmt: skip
    console.table("KV bytes by context, in 16 and in 8 bits, as exported and with every layer full",
                  ["context", "16 bit", "full", "8 bit", "full", "saved"], sizes)  # fmt: skip
    print_memory(body["memory"])
    console.table("files", ["file", "size"], [(f, console.human_bytes(b)) for f, b in body["files"].items()])


def print_memory(memory: dict[str, Any]) -> None:
    """What it needs beside the caches, and on which phones that fits at which context."""
    human = console.human_bytes
    console.line(f"beside the caches: graphs {human(memory['graphs'])} ({memory['from']}), "
                 f"table {human(memory['table'])}")  # fmt: skip
    rows = [(d["device"], human(d["memory_bytes"]), *(f"{100 * c['share']:.0f} %{'' if c['fits'] else ' no'}"
             for c in d["contexts"])) for d in memory["devices"]]  # fmt: skip
    contexts = [f"{context // 1024}k" for context in CONTEXTS]
    console.table("share of a phone's memory by context, no: more than half of it",
                  ["device", "memory", *contexts], rows)  # fmt: skip


def fold(tensors: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Rows of a table of inputs: cache tensors of equal shape and role share a row, past_key_{0,1,...}."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for t in tensors:
        layered = t["role"].startswith(("key", "value", "state"))
        groups.setdefault((t["role"], tuple(t["shape"]), t["dtype"], "" if layered else t["name"]), []).append(t)
    rows = []
    for group in groups.values():
        name = group[0]["name"]
        if len(group) > 1:
            name = f"{name.rsplit('_', 1)[0]}_{{{ranges([t['layer'] for t in group])}}}"
        rows.append((name, group[0]))
    return rows


def ranges(numbers: list[int]) -> str:
    """0-2, 4-6 for [0, 1, 2, 4, 5, 6]."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
