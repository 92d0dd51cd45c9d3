"""Tiny random models of every architecture, by blocks, as the quantised line hands them to calibration."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from random_models import LLAMA, QWEN3, save_model

from exporters.onnx import export_graphs
from exporters.weights import load_index, write_weights
from quantize.model import Model, table_of
from recipes import plan_for
from recipes.plan import Options
from recipes.step import step_spec
from recipes.weights import read
from ringstep.checkpoint import Checkpoint, open_checkpoint
from ringstep.contract import StepSpec
from sanitize.command import sanitize_file

CONTEXT, N = 48, 8
WINDOW = 8
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA: dict[str, Any] = LLAMA | {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": WINDOW,
    "sliding_window_pattern": 2, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": ROPES,
}  # fmt: skip
del GEMMA["hidden_act"], GEMMA["rope_theta"]
CONFIGS: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen3": QWEN3, "gemma3": GEMMA}
SPARK = Path(__file__).parent.parent / "data" / "spark2_5_tiny"
FOLDER = Path(tempfile.mkdtemp(prefix="float-models-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
torch.set_num_threads(1)  # tensors this small only lose by a second thread


@functools.cache
def checkpoint_of(name: str) -> Checkpoint:
    """A random checkpoint of an architecture, or the tiny Spark."""
    return open_checkpoint(str(SPARK if name == "spark" else save_model(FOLDER / name, CONFIGS[name])))


@functools.cache
def traced(name: str, n: int = N) -> tuple[StepSpec, ir.Model]:
    """A checkpoint's graph of n tokens; tracing is slow, so every test shares it."""
    spec, models = build(checkpoint_of(name), FOLDER / f"{name}-{n}", chunks=(n,))
    return spec, models[n]


def build(checkpoint: Checkpoint, folder: Path, *, context: int = CONTEXT, chunks: tuple[int, ...] = (N,),
          chip: str | None = None, **options: Any) -> tuple[StepSpec, dict[int, ir.Model]]:  # fmt: skip
    """The contract and the sanitised float graphs by n; their matrices are holes."""
    plan, own = plan_for(checkpoint.config), Options(quantised=True, **options)
    spec = step_spec(plan, own, model="test", context=context, chunks=chunks, eos=())
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(checkpoint, plan, "float32", folder, matrices=())
    files = export_graphs(plan, own, spec, load_index(folder), folder, lambda n: f"{n}.traced.onnx")
    models = {}
    for n, path in files.items():
        sanitize_file(
            path, folder / f"{n}.float.onnx", target="qnn-htp" if chip else "ort-mobile", chip=chip,
            precision="a16" if chip else None, keep=folder,
            skip=["common-subexpressions", "duplicates", "transposed-weights", "accurate-*"],
        )  # fmt: skip
        models[n] = ir.load(folder / f"{n}.float.onnx")
    return spec, models


def model_of(name: str) -> Model:
    """A model by blocks, in chunks of N."""
    (spec, graph), checkpoint = traced(name), checkpoint_of(name)
    plan = plan_for(checkpoint.config)
    return Model(plan, spec, graph.graph, N, lambda s: read(checkpoint, s), table_of(checkpoint, plan))


def with_read(model: Model, name: str, change: Any) -> Model:
    """The same model with `change` applied to the values of one checkpoint tensor."""

    def changed(source: Any) -> np.ndarray:
        values = model.read(source)
        return change(values) if source.name == name else values

    return dataclasses.replace(model, read=changed)
