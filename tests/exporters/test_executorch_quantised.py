"""ExecuTorch for the NPU in integers: the artifact's own encodings and weights, held against its ONNX graphs."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from export_runs import LLAMA, write_checkpoint
from test_executorch_qnn import needs_libraries

from exporters.executorch.qnn import check_graphs, check_weights
from exporters.line import Job, Line
from exporters.quantised import float_file
from exporters.tiny import tiny_ids
from quantize.store import INDEX, load_index
from ringstep import pte
from ringstep.contract import GraphSpec, StepSpec, TensorSpec
from ringstep.encoding import dequantise, open_table, quantise
from ringstep.errors import RingstepError
from ringstep.manifest import manifest_of
from ringstep.parity.metrics import snr_db
from ringstep.session import DecodeSession

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
# Two layers with grouped queries and rings; every kind of weight that HTP takes, and 8-bit caches.
CONFIG = {**LLAMA, "model_type": "mistral", "sliding_window": 8, "hidden_size": 64, "intermediate_size": 96,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
SCHEME = """
[weights]
bits = 4
block = 32
two_level = true
rounding = "clip"

[head]
bits = 8

[embedding]
bits = 8

[activations]
bits = 16

[cache]
bits = 8

[[override]]
pattern = "layers.0.mlp.down_proj"
bits = 8
block = 0
two_level = false

[[override]]
pattern = "layers.1.attn.o_proj"
block = 0
two_level = false
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The model exported with its ONNX graphs alone."""
    folder = tmp_path_factory.mktemp("quantised")
    model, scheme = write_checkpoint(folder / "model", CONFIG), folder / "mixed.toml"
    scheme.write_text(SCHEME)
    made = Job(model=str(model), out=folder / "out", format="onnx", device="galaxy-s25", scheme=scheme, context=32,
               chunk=4, calibration_tokens=512, parity=False)  # fmt: skip
    Line(made).run()
    return made


@pytest.fixture(scope="module")
def small(job: Job) -> dict[str, np.ndarray]:
    line = Line(job)
    assert line.quantised
    return line.quantised.small


def modules(job: Job, small: dict[str, np.ndarray]) -> dict[int, Any]:
    from exporters.executorch.converted import Weights, converted

    weights = Weights(job.out / "onnx", load_index(job.out / "onnx" / INDEX), small)
    return {graph.n: converted(job.out / "onnx", graph, weights) for graph in StepSpec.load(job.out).graphs}


class Eager:
    """An engine that computes converted graphs in torch."""

    name = "torch"

    def __init__(self, spec: StepSpec, modules: dict[int, Any]) -> None:
        self.spec, self.modules = spec, modules

    def run(self, n: int, inputs: Any, outputs: Any) -> None:
        import torch

        graph = self.spec.graph(n)
        floats = [torch.from_numpy(np.array(dequantise(inputs[t.name], t.encoding))) for t in graph.inputs]
        with torch.no_grad():
            made = self.modules[n](*floats)
        for t, x in zip(graph.outputs, made, strict=True):
            assert t.encoding
            outputs[t.name][...] = quantise(x.numpy(), t.encoding, t.dtype)

    def close(self) -> None:
        pass


@needs_torchao
def test_converted_form_is_the_onnx_graph(job: Job, small: dict[str, np.ndarray]) -> None:
    """In torch, before any compiler: the same integers come out, past the wrap of a ring of 7."""
    spec = StepSpec.load(job.out)
    ids = tiny_ids(spec.vocab, 21)
    engine = Eager(spec, modules(job, small))
    with DecodeSession(spec, engine, open_table(job.out, spec)) as own, DecodeSession.open(job.out, "ort") as other:
        for start, stop in ((0, 18), (18, 21)):
            assert snr_db(other.step(ids[start:stop]), own.step(ids[start:stop])) > 45
        for layer in range(2):
            assert snr_db(other.entries(layer)[1], own.entries(layer)[1]) > 40


@needs_torchao
def test_without_an_encoding_nothing_is_made(job: Job, small: dict[str, np.ndarray]) -> None:
    """A tensor that calibration gave no encoding is refused by name: nothing uncalibrated can be lowered."""
    from exporters.executorch.converted import Converted

    made = modules(job, small)[1]
    graph = ir.load(job.out / "onnx" / float_file(1)).graph
    for name in ("x", "hidden_0", "logits", "/layers.0/attn/Softmax_output_0"):
        lacking = {n: a for n, a in made.activations.items() if n != name}
        with pytest.raises(RingstepError, match=f"tensor {name}: stays in float"):
            Converted(graph, lacking, made.weights)


@needs_libraries
@pytest.mark.parametrize("line", ["norms = 0", "gates = 0", "softmax = 8"])
def test_activations_of_other_widths_are_refused_first(line: str, job: Job, tmp_path: Path) -> None:
    scheme = tmp_path / "mixed.toml"
    scheme.write_text(f"[activations]\nbits = 16\n[exceptions]\n{line}\n")
    with pytest.raises(RingstepError, match=rf"scheme mixed: \[exceptions\] {line}: .* of one width"):
        Line(dataclasses.replace(job, format="executorch", scheme=scheme, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@needs_libraries
def test_on_the_simulator(job: Job) -> None:
    """Blocks, a scale a channel, 8-bit caches and shared weights in one file, against ONNX Runtime."""
    Line(dataclasses.replace(job, format="executorch")).run()
    spec = StepSpec.load(job.out)
    assert {c.dtype for c in spec.caches} == {"uint8"} and spec.dtype == "uint16"
    ids = tiny_ids(spec.vocab, 16)
    with DecodeSession.open(job.out, "executorch") as own, DecodeSession.open(job.out, "ort") as other:
        for start, stop in ((0, 13), (13, 16)):
            assert snr_db(other.step(ids[start:stop]), own.step(ids[start:stop])) > 20
    facts = manifest_of(job.out).stages["executorch"].facts
    assert facts["methods"] == {m: {"delegates": {"QnnBackend": 1}, "cpu_kernels": {}} for m in ("decode", "prefill")}
    (context,) = pte.describe(job.out / "executorch/model.pte")["contexts"]
    assert context["precision"] == "quantised" and context["weight_sharing"]
    method = pte.describe(job.out / "executorch/model.pte")["methods"]["decode"]
    for side in ("inputs", "outputs"):
        have = [(t["name"], tuple(t["shape"]), t["dtype"]) for t in method[side]]
        assert have == [(t.name, t.shape, t.dtype) for t in getattr(spec.graph(1), side)]
    # One copy of the weights: 4 bits, and 8 of a head and a projection.
    elements = sum(math.prod(s.shape) for s in load_index(job.out / "onnx" / INDEX).values())
    assert facts["simulated"]["bytes"] - facts["bytes"] > 0.5 * elements


def test_check_weights() -> None:
    check_weights({"model.pte": {"decode": "a", "prefill": "a"}, "simulated.pte": {"decode": "a", "prefill": "a"}})
    with pytest.raises(RingstepError, match=r"prefill of simulated.pte hold different weights"):
        check_weights({"model.pte": {"decode": "a", "prefill": "a"}, "simulated.pte": {"decode": "a", "prefill": "b"}})


def test_check_graphs() -> None:
    """A graph that is missing, or whose inputs have another type or shape, is named."""
    logits = TensorSpec("logits", (1, 9), "uint16", "logits")
    graph = GraphSpec(1, (TensorSpec("x", (1, 8), "uint16", "embedding"),), (logits,))
    tensor = lambda shape, dtype: {"shape": shape, "dtype": dtype}
    good = {"inputs": [tensor((1, 8), "ufixed_point_16")], "outputs": [tensor((1, 9), "ufixed_point_16")]}
    check_graphs({"decode": good}, {"decode": graph}, "model.pte")
    with pytest.raises(RingstepError, match="has the graphs forward, wanted are decode"):
        check_graphs({"forward": good}, {"decode": graph}, "model.pte")
    for bad in (tensor((1, 8), "float_16"), tensor((2, 8), "ufixed_point_16")):
        with pytest.raises(RingstepError, match="the inputs of graph decode are not the contract's"):
            check_graphs({"decode": good | {"inputs": [bad]}}, {"decode": graph}, "model.pte")
