"""What the layout passes change for HTP: operations, size, compile time and accuracy, each layout on and off.

    python -m benchmarks.htp_layouts [--chip sm8750] [--model smollm2] [--tokens 1] [--precision fp16] [--json]

The models are two layers of SmolLM2-135M and one random layer as wide as Spark-2.5's (hidden 2048), both with a context
of 128 and a head of 4096 rows, as ringstep exports them in float32. The inputs are the embeddings of random tokens with
full caches of noise, and calibration sees those compared among others; dB is the SNR of the logits against ONNX
Runtime's in float32. ONNX operations are those handed to the NPU (Q and DQ included), HTP operations what QNN's profile
of a run lists, and busy ones those that took any cycles. All comes from the compiler and the simulator on a PC: nothing
is a latency. Compile seconds are of one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from benchmarks import htp_profile
from exporters.onnx import export_graphs, graph_file
from exporters.qnn import compile_context
from exporters.weights import load_index, write_weights
from recipes import plan_for
from recipes.plan import Options, Plan
from recipes.step import step_spec
from ringstep import console
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import StepSpec
from ringstep.devices import Chip, find_device
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db
from sanitize.model_file import read_model, write_model
from sanitize.passes import Pass, linear_as_conv, merge_projections, split_heads
from sanitize.target import find_target

CONTEXT, VOCAB, CALIBRATION = 128, 4096, 8
SPARK: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
LAYOUTS: dict[str, tuple[Pass, ...]] = {
    "plain": (),
    "linear-as-conv": (linear_as_conv.PASS,),
    "merge-projections": (merge_projections.PASS,),
    "split-heads": (split_heads.PASS,),
    "merged, as conv": (merge_projections.PASS, linear_as_conv.PASS),
}
Feeds = dict[str, np.ndarray]


class Random:
    """A checkpoint of random weights that keep the activations near 1."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, name: str, rows: tuple[int, int]) -> np.ndarray:
        """Rows of a tensor of the Spark-sized layer."""
        shape = self.shapes[name]
        noise = np.random.default_rng([len(name), *name.encode(), *rows]).standard_normal(
            (rows[1] - rows[0], *shape[1:]), np.float32
        )
        return 1 + np.float32(0.1) * noise if len(shape) == 1 else noise * np.float32(shape[1] ** -0.5)


def load(model: str) -> tuple[Plan, Any]:
    """A plan and what its weights are read from."""
    if model == "spark":
        plan = plan_for(SPARK)
        return plan, Random(plan.expected())
    checkpoint = open_checkpoint("smollm2-135m")
    plan = plan_for({**checkpoint.config, "num_hidden_layers": 2})
    rows = dataclasses.replace(plan.head, rows=(0, VOCAB))
    return dataclasses.replace(plan, vocab=VOCAB, head=rows, embedding=rows), checkpoint


def export(model: str, tokens: int, precision: str, folder: Path) -> tuple[Path, StepSpec]:
    """Write a model's float32 graph: accurate activations for fp16, native ones where they will be quantised."""
    plan, checkpoint = load(model)
    options = Options(activations="accurate" if precision == "fp16" else "native")
    spec = step_spec(plan, options, model=model, context=CONTEXT, chunks=(tokens,), eos=())
    folder.mkdir()
    write_weights(checkpoint, plan, "float32", folder)
    export_graphs(plan, options, spec, load_index(folder), folder)
    return folder / graph_file(tokens), spec


def random_feeds(path: Path, seed: int) -> Feeds:
    """Inputs of a step whose caches are full: random tokens' embeddings, rotations by random angles, masks 0."""
    random = np.random.default_rng(seed)
    feeds: Feeds = {}
    for value in session(path).get_inputs():
        if value.name == "x":
            table = np.fromfile(path.parent / "embedding.bin", np.float32).reshape(VOCAB, value.shape[1])
            feeds["x"] = table[random.integers(0, VOCAB, value.shape[0])]
            continue
        noise = random.standard_normal(value.shape).astype(np.float32)
        if value.name.startswith(("cos", "sin")):
            angles = np.random.default_rng(seed).uniform(-np.pi, np.pi, value.shape)
            noise = (np.cos(angles) if value.name.startswith("cos") else np.sin(angles)).astype(np.float32)
        feeds[value.name] = np.zeros_like(noise) if value.name.startswith("mask") else noise
    return feeds


def session(path: Path) -> ort.InferenceSession:
    """The model on ONNX Runtime's CPU provider."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Reader:
    """Calibration data as ONNX Runtime's quantiser asks for it."""

    def __init__(self, source: Path) -> None:
        self.feeds: Iterator[Feeds] = iter([random_feeds(source, seed) for seed in range(CALIBRATION)])

    def get_next(self) -> Feeds | None:
        """The next inputs, None after the last."""
        return next(self.feeds, None)


def quantise(path: Path, source: Path, out: Path) -> None:
    """8 bit weights per channel, 16 bit activations, by ONNX Runtime's quantiser."""
    from onnxruntime.quantization import QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    logging.disable(logging.WARNING)
    config = get_qnn_qdq_config(
        str(path), Reader(source), activation_type=QuantType.QUInt16, weight_type=QuantType.QInt8, per_channel=True,
        weight_symmetric=True,
    )  # fmt: skip
    config.use_external_data_format = True
    quantize(str(path), str(out), config)


@dataclass(frozen=True)
class Row:
    """One layout of one model."""

    model: str
    tokens: int
    precision: str
    layout: str
    onnx_ops: int
    htp_ops: int
    busy_ops: int
    binary_bytes: int
    compile_s: float
    snr_db: float
    kinds: dict[str, int]


def measure(source: Path, passes: tuple[Pass, ...], precision: str, chip: Chip, folder: Path) -> dict[str, Any]:
    """Apply the passes, quantise if asked, compile, and compare one simulated step with the source in float32."""
    model, path = read_model(source), folder / "step.onnx"
    for the_pass in passes:
        the_pass.run(model, find_target("qnn-htp", chip.name))
    write_model(model, path)
    if precision == "w8a16":
        quantise(path, source, folder / "qdq.onnx")
        path = folder / "qdq.onnx"
    report = compile_context(path, folder, chip=chip, fp16=True, name="layout")
    feeds = random_feeds(source, 0)
    outputs, htp_ops, busy = htp_profile.run(folder / "layout_ctx.onnx", feeds)
    want = session(source).run(["logits"], feeds)[0]
    return {
        "onnx_ops": sum(report.npu_ops.values()),
        "htp_ops": htp_ops,
        "busy_ops": busy,
        "binary_bytes": report.binary_bytes,
        "compile_s": round(report.seconds, 1),
        "snr_db": round(snr_db(want.astype(np.float64), outputs["logits"].astype(np.float64)), 1),
        "kinds": report.npu_ops,
    }


def show(rows: list[Row], chip: Chip) -> None:
    """Print one table for each model, number of tokens and precision."""
    print(f"{chip.name}, compiled and simulated on a PC; no latencies")
    for case in dict.fromkeys((r.model, r.tokens, r.precision) for r in rows):
        lines = [
            (r.layout, r.onnx_ops, r.htp_ops, r.busy_ops, f"{r.binary_bytes / 1e6:.3f}", r.compile_s, r.snr_db)
            for r in rows if (r.model, r.tokens, r.precision) == case
        ]  # fmt: skip
        columns = ["layout", "ONNX", "HTP", "busy", "binary MB", "compile s", "dB"]
        console.table("{} n={} {}".format(*case), columns, lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="sm8750")
    parser.add_argument("--model", choices=["smollm2", "spark"], nargs="+", default=["smollm2", "spark"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--precision", choices=["fp16", "w8a16"], nargs="+", default=["fp16", "w8a16"])
    parser.add_argument("--layout", choices=list(LAYOUTS), nargs="+", default=list(LAYOUTS))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    chip = find_device(asked.chip).chip
    rows: list[Row] = []
    cases = [(m, t, p) for m in asked.model for t in asked.tokens for p in asked.precision]
    for model, tokens, precision in cases:
        with tempfile.TemporaryDirectory() as folder:
            source, _ = export(model, tokens, precision, Path(folder) / "source")
            for layout in asked.layout:
                place = Path(folder) / layout
                place.mkdir()
                try:
                    found = measure(source, LAYOUTS[layout], precision, chip, place)
                except RingstepError as error:
                    console.warn(f"{model} {tokens} {precision} {layout}: {error}")
                    continue
                rows.append(Row(model, tokens, precision, layout, **found))
                console.say(f"{model} n={tokens} {precision} {layout}: {found}")
    if asked.json:
        console.print_json([dataclasses.asdict(row) for row in rows])
        return
    show(rows, chip)


if __name__ == "__main__":
    main()
