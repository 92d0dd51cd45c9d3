"""What the recipe tests share: sessions on either engine, and runs held against a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exporters.onnx import export_graphs, graph_file
from exporters.weights import load_index, write_weights
from recipes import plan_for
from recipes.plan import Options
from recipes.step import DecodeStep, step_spec
from recipes.weights import read
from ringstep.checkpoint import Checkpoint
from ringstep.contract import EmbeddingSpec, PartSpec, StepSpec
from ringstep.engines.torch_eager import TorchEngine
from ringstep.parity.metrics import snr_db
from ringstep.session import DecodeSession


def torch_session(
    checkpoint: Checkpoint, context: int, chunks: tuple[int, ...] = (1,), **options: Any
) -> DecodeSession:
    """A checkpoint in eager torch, table inside; dtype="float64" is for tests alone, files know no such thing."""
    plan, made = plan_for(checkpoint.config), Options(embedding_inside=True, **options)
    checkpoint.check(plan.expected(), plan.optional)
    spec = step_spec(plan, made, model="test", context=context, chunks=chunks, eos=())
    step = DecodeStep(plan, made, spec, lambda source: read(checkpoint, source))
    return DecodeSession(spec, TorchEngine(step))


def ort_session(
    checkpoint: Checkpoint, folder: Path, context: int, chunks: tuple[int, ...] = (1,), **options: Any
) -> DecodeSession:
    """A checkpoint exported to `folder` and opened on ONNX Runtime through its step.json."""
    plan, made = plan_for(checkpoint.config), Options(**options)
    checkpoint.check(plan.expected(), plan.optional)
    spec = step_spec(plan, made, model="test", context=context, chunks=chunks, eos=())
    write_weights(checkpoint, plan, made.dtype, folder)
    export_graphs(plan, made, spec, load_index(folder), folder)
    graphs = []
    for graph in spec.graphs:
        names = tuple(t.name for t in graph.inputs), tuple(t.name for t in graph.outputs)
        graphs.append(dataclasses.replace(graph, parts={"onnx": (PartSpec(graph_file(graph.n), *names),)}))
    table = None if made.embedding_inside else EmbeddingSpec("embedding.bin", 0, (spec.vocab, spec.hidden), spec.dtype)
    spec = dataclasses.replace(spec, graphs=tuple(graphs), embedding=table)
    spec.save(folder / "step.json")
    assert StepSpec.load(folder) == spec
    return DecodeSession.open(folder, threads=1)


def feed(session: DecodeSession, ids: Sequence[int], n: int = 1) -> np.ndarray:
    """Logits [len(ids), vocab] of `ids` fed n at a time from position 0."""
    session.reset()
    return np.concatenate([session.step(ids[at : at + n]) for at in range(0, len(ids), n)])


def decibels(want: np.ndarray, have: np.ndarray) -> np.ndarray:
    """SNR in dB of every position."""
    assert want.shape == have.shape
    return np.array([snr_db(w, h) for w, h in zip(want, have, strict=True)])
