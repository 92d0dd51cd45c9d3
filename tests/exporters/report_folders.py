"""Artifact folders made by hand for the tests of ringstep report: every file that it reads, without an export."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ringstep.contract import CacheKind, CacheSpec, GraphSpec, MaskSpec, RotarySpec, StepSpec, io_tensors
from ringstep.manifest import open_folder
from ringstep.stage import run_stage

LAYERS: list[tuple[CacheKind, int | None]] = [("ring", 16), ("ring", 16), ("append", None), ("ring", 16)]
CONTEXT, HEADS, DIM = 64, 2, 32
TRACED = ["MatMul", "MatMul", "Add", "Mul", "Mul", "Mul", "Identity"]
SANITISED = ["MatMul", "MatMul", "Add", "Mul", "Tanh"]
ENGINES = {"ort": (False, 58.0), "qnn-sim": (True, 41.0)}
TOKENS = 90
EVIL = ("</script><script>window.owned=1</script><img src=http://evil.test/x onerror=owned=1>"
        "\"'&<!-- $$x^2$$ @{x} {{ 7*7 }}")  # fmt: skip


def spec(dtype: Any = "float16") -> StepSpec:
    """A contract of three windows and a full layer."""
    rotary, masks, caches = (RotarySpec("rope", (1.0,)),), {}, []
    for layer, (kind, window) in enumerate(LAYERS):
        length = (window or CONTEXT) - 1
        masks[kind] = MaskSpec(kind, kind, length, window)
        caches.append(CacheSpec(layer, kind, length, HEADS, DIM, dtype, "rope", kind, window, "plain"))
    inputs, outputs = io_tensors(1, 50, 8, dtype, rotary, tuple(masks.values()), tuple(caches), True)
    return StepSpec(recipe="test", model="Tiny", vocab=50, hidden=8, context=CONTEXT, dtype=dtype, mask_value=-10000.0,
                    eos=(1,), rotary=rotary, masks=tuple(masks.values()), caches=tuple(caches),
                    graphs=(GraphSpec(1, inputs, outputs),), embedding=None,
                    target={"device": "galaxy-s25", "chip": "sm8750"})  # fmt: skip


def graph(path: Path, kinds: list[str]) -> None:
    """A chain of operations of these kinds, the last two inside an If."""
    def chain(names: list[str], tag: str) -> list[Any]:
        return [helper.make_node(kind, ["x"] * (2 if kind in ("MatMul", "Add", "Mul") else 1), [f"{tag}{i}"])
                for i, kind in enumerate(names)]  # fmt: skip

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])
    inner = helper.make_graph(chain(kinds[-2:], "in"), "inner", [], [])
    outer = helper.make_node("Loop", ["n", "c"], ["y"], body=inner)
    whole = helper.make_graph([*chain(kinds[:-2], "n"), outer], "graph", [value], [])
    onnx.save(helper.make_model(whole), path)


def operations(kinds: list[str]) -> Counter[str]:
    """What `graph` wrote, by kind."""
    return Counter([*kinds, "Loop"])


def parity(name: str, simulated: bool, db: float, tokens: int = TOKENS) -> dict[str, Any]:
    """A report of an engine: SNR falls by 0.1 dB a layer, position 7 is another token."""
    rng = np.random.default_rng(len(name))
    snr = [round(float(v), 3) for v in db + 6 * rng.random(tokens)]
    positions = [{"position": i, "token": 3 * i, "snr_db": v, "top1": "ambiguous" if i == 7 else "equal", "top5": 1.0,
                  "kl": 1e-5} for i, v in enumerate(snr)]  # fmt: skip
    caches = [{"layer": i, "key_db": db + 9 - 0.1 * i, "value_db": db + 7 - 0.1 * i} for i in range(len(LAYERS))]
    summary = {
        "engine": name, "simulated": simulated, "reference": "a reference, float32", "dtype": "float16",
        "activations": "accurate", "tokens": tokens, "scheme": "", "top1": 1 - 1 / tokens,
        "ambiguous": 1, "different": 0,
        "snr_db": {"min": min(snr), "median": float(np.median(snr)), "max": max(snr), "pooled": db + 2},
        "top5": 1.0, "kl": {"mean": 1e-5, "max": 1e-4}, "caches_db": {"min": db + 6, "median": db + 7},
        "threshold_db": 35.0, "passed": True, "failures": [],
    }  # fmt: skip
    answer = {"prompt": "Where?", "reference_text": "Here.", "text": "Here.", "verdict": "equal"} if simulated else None
    return {"summary": summary, "positions": positions, "caches": caches, "answer": answer}


def measured() -> dict[str, Any]:
    """The files that parity, stages, bisect and a profile leave."""
    rng = np.random.default_rng(3)
    stages = []
    ran = [("recipe", "torch", False, 120.0), ("onnx", "ort", False, 118.0), ("sanitised", "ort", False, 58.0),
           ("compiled", "qnn-sim", True, 41.0)]  # fmt: skip
    for stage, engine, simulated, db in ran:
        report = parity(engine, simulated, db, 40)
        stages.append({"stage": stage, "engine": engine, "simulated": simulated, "summary": report["summary"],
                       "snr_db": [p["snr_db"] for p in report["positions"]], "caches": report["caches"]})  # fmt: skip
    noise = rng.random(300)
    drift = [float(60 - 0.002 * i + 3 * noise[i]) for i in range(300)]
    depth = [{"tensor": "x", "layer": None, "snr_db": 300.0}]
    depth += [{"tensor": f"hidden_{i}", "layer": i, "snr_db": 90.0 - 8 * i} for i in range(len(LAYERS))]
    return {
        "parity.json": [parity(name, *kind) for name, kind in ENGINES.items()],
        "parity_stages.json": {"reference": "a reference, float32", "tokens": 40, "against": "original",
                               "stages": stages},
        "drift.json": {
            "engine": "qnn-sim", "simulated": True, "tokens": 300, "slope_db_per_100": -0.2, "passed": True,
            "teacher_forced": {"position": list(range(300)), "snr_db": drift},
            "free_running": {"verdict": "ambiguous", "same": 211, "position": [0, 1], "snr_db": [61.0, 60.0]},
        },
        "bisect.json": {
            "engine": "qnn-sim", "simulated": True, "reference": "recipe, float32", "depth": depth,
            "verdict": "layer 2 loses most",
            "nodes": [{"node": f"/layers.2/mlp/{k}", "op": k, "own_db": 70.0} for k in ["Mul", "Sigmoid"]],
            "first": {"tensor": "hidden_2", "layer": 2, "node": "/layers.2/mlp/Sigmoid", "local_db": 51.25},
        },
        "profile.json": {"device": "Galaxy S25", "total_ms": 21.5,
                         "layers": [{"name": f"layers.{i}", "ms": 0.5 + i / 10, "unit": "NPU"} for i in range(4)]},
        "sanitize.json": {"decode.onnx": {"nodes_before": 7, "nodes_after": 5, "changes": {
            "fuse-gelu": [{"node": "/a", "what": "two nodes became one"}] * 3}}},
    }  # fmt: skip


def sizes() -> dict[str, Any]:
    """quantize/sizes.json: 8 bits, 4 in layer 1's projections."""
    parameters: list[dict[str, Any]] = [{"path": "embedding", "shape": [50, 8], "stored": "int8 a row", "bits": 8.5,
                                         "bytes": 425}]  # fmt: skip
    for layer in range(len(LAYERS)):
        for name in ("attn.q_proj", "mlp.up_proj"):
            own = 4.0 if layer == 1 else 8.0
            parameters.append({"path": f"layers.{layer}.{name}", "shape": [64, 64], "stored": f"int{own:.0f} a row",
                               "bits": own, "bytes": int(64 * 64 * own / 8)})  # fmt: skip
    return {"qdq": {"parameters": parameters, "bits": 7.01, "file_bytes": 29_097}}


def write_artifact(folder: Path, quantised: bool = False, **files: Any) -> Path:
    """A whole artifact; `files` replaces the files of `measured` by name with `__` for a dot, None leaves one out."""
    def stage_onnx(target: Path) -> None:
        (target / "onnx").mkdir()
        graph(target / "onnx/decode.traced.onnx", TRACED)
        graph(target / "onnx/decode.onnx", SANITISED)
        (target / "onnx/weights.bin").write_bytes(bytes(200_000))

    def stage_compile(target: Path) -> dict[str, Any]:
        (target / "qnn").mkdir()
        (target / "qnn/decode_ctx_qnn.bin").write_bytes(bytes(90_000))
        counts = dict(operations(SANITISED))
        return {"chip": "sm8750", "version": "onnxruntime-qnn 2.7.0", "npu_ops": counts, "source_ops": counts,
                "binary_bytes": 90_000, "peak_bytes": 1_300_000_000}  # fmt: skip

    def stage_report(target: Path) -> None:
        (target / "quantize").mkdir()
        (target / "quantize/sizes.json").write_text(json.dumps(sizes()))
        (target / "quantize/report.json").write_text(json.dumps({"warnings": ["a range was cut"], "sinks": []}))

    with open_folder(folder) as manifest:
        manifest.model, manifest.checkpoint = "tiny-model", {"sha256": "ab" * 32}
        manifest.options = {"format": "qnn", "device": "galaxy-s25", "dtype": "float16", "context": CONTEXT}
        manifest.versions = {"ringstep": "0.1.0", "onnx": "1.2.3"}
        builds: dict[str, Any] = {"onnx": stage_onnx, "qnn-decode": stage_compile}
        builds |= {"report": stage_report} if quantised else {}
        for name, build in builds.items():
            run_stage(manifest, name, inputs={}, options={}, versions={}, build=build)
        manifest.save()
    spec().save(folder / "step.json")
    for name, body in (measured() | {k.replace("__", "."): v for k, v in files.items()}).items():
        if body is not None:
            (folder / name).write_text(body if isinstance(body, str) else json.dumps(body))
    return folder


def evil(value: Any) -> Any:
    """The same with every text replaced, keys that are read apart."""
    if isinstance(value, dict):
        return {k: evil(v) for k, v in value.items()} | {EVIL: EVIL}
    if isinstance(value, list):
        return [evil(item) for item in value]
    return EVIL + value if isinstance(value, str) else value


def evil_artifact(folder: Path) -> Path:
    """An artifact whose every text is markup."""
    files = {name.replace(".", "__"): evil(body) for name, body in measured().items()}
    write_artifact(folder, quantised=True, **files)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"model": EVIL, "versions": {EVIL: EVIL}, "options": {"device": EVIL, "dtype": EVIL, EVIL: [EVIL]}}
    for stage in manifest["stages"].values():
        stage["facts"] = evil(stage["facts"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for name in ("quantize/sizes.json", "quantize/report.json"):
        (folder / name).write_text(json.dumps(evil(json.loads((folder / name).read_text()))))
    return folder
