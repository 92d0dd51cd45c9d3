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
import onnxruntime
import torch
from random_models import LLAMA, QWEN3, save_model

from exporters.onnx import export_graphs
from exporters.weights import load_index, write_weights
from quantize.calibrate import Calibration, calibrate
from quantize.model import Model, table_of
from recipes import plan_for
from recipes.plan import Options
from recipes.step import step_spec
from recipes.weights import key, read, sources
from ringstep.checkpoint import Checkpoint, open_checkpoint
from ringstep.contract import StepSpec
from ringstep.engines.base import Arrays
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
def graphs_of(name: str, chip: str | None = None) -> tuple[StepSpec, dict[int, ir.Model]]:
    """A checkpoint's decode graph and its graph of N tokens; tracing is slow, so every test shares them."""
    return build(checkpoint_of(name), FOLDER / f"{name}-graphs-{chip}", chunks=(1, N), chip=chip)


def traced(name: str, n: int = N) -> tuple[StepSpec, ir.Model]:
    """The contract of one graph, and the graph."""
    spec, models = graphs_of(name)
    return dataclasses.replace(spec, graphs=(spec.graph(n),)), models[n]


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


class Recorder:
    """An engine over the whole float graph in ONNX Runtime that notes every tensor's values."""

    name = "recorder"

    def __init__(self, model: Model, graph: ir.Graph | None = None) -> None:
        # A copy by way of the file format: the shared graph keeps its holes.
        copy = ir.from_proto(ir.to_proto(traced_without_data(graph or model.graph)))
        values = {key(s): model.read(s) for s in sources(model.plan)}
        for name, value in copy.graph.initializers.items():
            if name in values:
                value.const_value = ir.tensor(values[name], name=name)
        self.kinds = {str(v.name): node.op_type for node in copy.graph for v in node.outputs}
        have = {v.name for v in copy.graph.outputs}
        copy.graph.outputs.extend(v for node in copy.graph for v in node.outputs if v.name not in have)
        raw = ir.to_proto(copy).SerializeToString()
        self.session = open_session(raw)
        self.seen: dict[str, list[np.ndarray]] = {}
        self.on = True

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        names = [o.name for o in self.session.get_outputs()]
        made = dict(zip(names, (np.asarray(v) for v in self.session.run(names, dict(inputs))), strict=True))
        for name, array in outputs.items():
            array[...] = made[name]
        for name, array in (made | {"x": inputs["x"]}).items() if self.on else ():
            self.seen.setdefault(name, []).append(array.copy())

    def close(self) -> None:
        """Nothing to free."""


def traced_without_data(graph: ir.Graph) -> ir.Model:
    """The graph as a model whose weights are inline zeros."""
    copy = ir.Model(graph.clone(), ir_version=11)
    for name, value in copy.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            shape = value.const_value.shape.numpy()
            value.const_value = ir.tensor(np.zeros(shape, value.const_value.dtype.numpy()), name=name)
    return copy


@functools.cache
def texts(vocab: int, count: int = 3, length: int = 32) -> list[list[int]]:
    found = np.random.default_rng(5).integers(0, vocab, (count, length + 1))
    found[:, 0] = 7
    return [[int(i) for i in row] for row in found]


@functools.cache
def calibrated(name: str, skip: int) -> Calibration:
    model = model_of(name)
    every = texts(model.plan.vocab)
    return calibrate(model, [ids[skip : len(ids) - 1 + skip] for ids in every], every[0][:skip])


def open_session(model: bytes, optimised: bool = True) -> onnxruntime.InferenceSession:
    """ONNX Runtime on one thread, as a machine that others use should be."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
