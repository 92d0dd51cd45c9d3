"""Parity of every block by itself: one layer in memory at a time, so that a model of any size can be held against it.

    x ─ layer 0 ─ hidden_0 ─ layer 1 ─ hidden_1 ─ ... ─ head     chained on ONNX Runtime, block after block
          │                    │                        │
        engine               engine                   engine     each fed the chain's tensors; SNR of what it returns
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from exporters.cut import part_specs
from exporters.onnx import graph_file, load_model
from exporters.prove import proof_ids
from exporters.surgery import OrtGraph, extract, open_graph, workshop
from ringstep import child, console
from ringstep.contract import PartSpec, StepSpec
from ringstep.devices import find_device
from ringstep.encoding import open_prefix, open_table
from ringstep.engines.base import Arrays
from ringstep.errors import RingstepError
from ringstep.manifest import changed_files, manifest_of
from ringstep.session import DecodeSession

TIMEOUT_SECONDS = 1800.0


class Fed:
    """An engine of DecodeSession that computes nothing and keeps what the last call was fed."""

    name = "none"

    def __init__(self) -> None:
        self.inputs: dict[str, np.ndarray] = {}

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        self.inputs = {name: array.copy() for name, array in inputs.items()}
        for array in outputs.values():
            array[...] = 0

    def close(self) -> None:
        """Nothing to free."""


def block_parity(folder: Path, engine: str, n: int, tick: Callable[[float], Any] = lambda _: None) -> dict[str, Any]:
    """Hold every layer and the head of the graph of n tokens against ONNX Runtime, over the first n tokens of a text.

    "qnn-sim" compiles each block for the artifact's chip and simulates it; "ort" without its optimisations. Peak memory
    is that of one block. Raises RingstepError; the result has a row a block with the SNR of its outputs in dB.
    """
    from exporters.aihub.verdict import compare

    spec = StepSpec.load(folder)
    if changed := changed_files(manifest_of(folder)):
        raise RingstepError(changed[0])
    graph = spec.graph(n)
    chip = spec.target.get("chip")
    if engine == "qnn-sim" and not chip:
        raise RingstepError(f"{folder}: made for no chip, and the simulator needs one; export with --device")
    soc = find_device(chip).chip.soc_model if engine == "qnn-sim" and chip else None
    pool = fed(folder, spec, n)
    layers = len(spec.caches)
    parts = part_specs(spec, graph, list(range(layers)), "block")
    rows = []
    model = load_model(folder / "onnx" / graph_file(n))
    with workshop(folder) as place:
        for index, part in enumerate(parts):
            path = write_block(model, part, place(f"block{index}"))
            feeds = {name: pool[name] for name in part.inputs}
            truth = run_alone(path, feeds)
            opened = open_graph(path, soc) if soc is not None else OrtGraph(path, path.name, optimised=False)
            try:
                have = opened.run(feeds)
            finally:
                opened.close()
            path.unlink()
            verdict = compare(folder, spec, n, "npu" if soc is not None else "cpu", [(feeds, truth)],
                              {name: [array] for name, array in have.items()})  # fmt: skip
            name = f"layer {index}" if index < layers else "head"
            kind = spec.caches[index].mask if index < layers else ""
            rows.append({"block": name, "kind": kind, "snr_db": verdict.outputs, "worst_db": verdict.worst_db,
                         "failures": list(verdict.failures), "limit_db": verdict.limit_db})  # fmt: skip
            pool |= truth
            tick(1)
    return {"engine": engine, "tokens": n, "chip": chip if soc is not None else None, "simulated": soc is not None,
            "blocks": rows, "passed": not any(row["failures"] for row in rows)}  # fmt: skip


def fed(folder: Path, spec: StepSpec, n: int) -> dict[str, np.ndarray]:
    """What the graph of n tokens is fed for the first n tokens of a text after the sink prefix."""
    import dataclasses

    first = len(spec.prefix.ids) if spec.prefix else 0
    alone = dataclasses.replace(spec, graphs=(spec.graph(n),))
    engine = Fed()
    with DecodeSession(alone, engine, open_table(folder, spec), open_prefix(folder, spec)) as session:
        session.step(proof_ids(spec, folder, first + n))
    return engine.inputs


def write_block(model: Any, part: PartSpec, path: Path) -> Path:
    """One block's ONNX file beside the weights of the whole."""
    import onnx_ir as ir

    ir.save(extract(model, part.inputs, part.outputs), path)
    return path


def run_alone(path: Path, pool: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A block's outputs on ONNX Runtime, in a process of its own: what a head of full size takes is given back."""
    found: dict[str, np.ndarray] = child.run(f"{path.name} on ONNX Runtime", run_file, path, pool,
                                             timeout_s=TIMEOUT_SECONDS).value  # fmt: skip
    return found


def run_file(path: Path, pool: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs in the child."""
    return OrtGraph(path, path.name).run(pool)


def print_blocks(report: dict[str, Any]) -> None:
    """A row a block, and the verdict."""
    rows = [(r["block"], r["kind"], "" if r["worst_db"] is None else f"{r['worst_db']:.1f}",
             "; ".join(r["failures"][:2])) for r in report["blocks"]]  # fmt: skip
    where = f"on the simulator of {report['chip']}" if report["simulated"] else "on ONNX Runtime"
    console.table(f"{report['tokens']} tokens, each block by itself {where}", ["", "kind", "worst dB", ""], rows)
    limit = report["blocks"][0]["limit_db"]
    console.line(f"{'passed' if report['passed'] else 'FAILED'} (at least {limit:g} dB of every output"
                 f"{', simulated' if report['simulated'] else ''})")  # fmt: skip
