"""How right HTP's fp16 kernels are on the simulator, native against the forms that ringstep writes.

    python benchmarks/htp_forms.py [--chip sm8750] [--json]

Each row is a small graph of one expression, compiled for the chip and run on the simulator; dB is the SNR of its
output against float64 on the same float16 inputs. Simulated: whether a phone computes the same is not known here.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from exporters.onnx import IR_VERSION, Stamp
from exporters.trace import OPSET, trace
from recipes import blocks
from ringstep import console
from ringstep.devices import find_device
from ringstep.engines.qnn_sim import open_graph
from ringstep.parity.metrics import snr_db

Form = Callable[..., Tensor]


class Expression(torch.nn.Module):
    """A function as a module."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.form(*inputs)


def on_simulator(form: Form, inputs: list[np.ndarray], soc_model: int) -> np.ndarray:
    """Compile an expression of float16 inputs for a chip and run it once."""
    with torch.device("meta"):
        args = tuple(torch.zeros(a.shape) for a in inputs)
    (block,) = trace([(Expression(form), args)])
    stamp = Stamp("float16", {}, Path())
    half = ir.TensorType(ir.DataType.FLOAT16)
    values = [ir.Value(name=f"in_{i}", shape=ir.Shape(a.shape), type=half) for i, a in enumerate(inputs)]
    outputs = stamp.block(block, "/form", values, ["out"], {})
    graph = ir.Graph(
        values, outputs, nodes=stamp.nodes, initializers=list(stamp.initializers.values()), opset_imports={"": OPSET},
        name="form",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "form.onnx"
        ir.save(ir.Model(graph, ir_version=IR_VERSION), path)
        with open_graph(path, soc_model=soc_model, fp16=True) as opened:
            return opened.run({f"in_{i}": a for i, a in enumerate(inputs)})["out"]


def softmax_explicit(scores: Tensor, values: Tensor) -> Tensor:
    """Softmax as exp and a division, no Newton step."""
    weights = torch.exp(torch.clamp(scores - scores.amax(-1, keepdim=True), min=blocks.EXP_LOW))
    return (weights / weights.sum(-1, keepdim=True)) @ values


def softmax_newton(scores: Tensor, values: Tensor) -> Tensor:
    """What ringstep writes."""
    weights = torch.exp(torch.clamp(scores - scores.amax(-1, keepdim=True), min=blocks.EXP_LOW))
    return (weights * blocks.reciprocal(weights.sum(-1, keepdim=True), True)) @ values


def cases() -> list[tuple[str, str, Form, Form, list[np.ndarray]]]:
    """(operator, form, expression, exact expression, inputs)."""
    random = np.random.default_rng(0)
    half = lambda *shape, scale=1.0: (random.standard_normal(shape) * scale).astype(np.float16)
    scores, values = half(3, 3, 1, 512, scale=3.0), half(3, 1, 512, 64)
    scores[..., 300:] -= 10000.0  # a cache of which 300 slots are filled
    attention: Form = lambda s, v: torch.softmax(s, -1) @ v
    gates, tail = half(32, 1536), (-1.0 - 9.0 * random.random((32, 1536))).astype(np.float16)
    rows = [
        ("softmax(s) @ v", "Softmax", attention, attention, [scores, values]),
        ("softmax(s) @ v", "max, exp, sum, div", softmax_explicit, attention, [scores, values]),
        ("softmax(s) @ v", "with a Newton step", softmax_newton, attention, [scores, values]),
    ]
    silu: list[tuple[str, Form]] = [
        ("x * Sigmoid(x)", lambda x: x * torch.sigmoid(x)),
        ("x / (1 + exp(-x))", lambda x: x / (1.0 + blocks.exp_neg(x))),
        ("with a Newton step", lambda x: blocks.silu(x, True)),
    ]
    gelu: list[tuple[str, Form]] = [
        ("Gelu", lambda x: blocks.gelu(x, "exact", False)),
        ("fitted, exp form", lambda x: blocks.gelu(x, "exact", True)),
    ]
    for where, x in (("N(0, 1)", gates), ("-10..-1", tail)):
        rows += [(f"SiLU, {where}", name, form, torch.nn.functional.silu, [x]) for name, form in silu]
        rows += [(f"GELU, {where}", name, form, torch.nn.functional.gelu, [x]) for name, form in gelu]
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="sm8750")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    chip = find_device(asked.chip).chip
    rows = []
    for operator, name, form, exact, inputs in cases():
        truth = exact(*(torch.from_numpy(a.astype(np.float64)) for a in inputs)).numpy()
        rows.append((operator, name, round(snr_db(truth, on_simulator(form, inputs, chip.soc_model)), 1)))
    if asked.json:
        console.print_json([{"operator": o, "form": n, "snr_db": db, "chip": chip.name} for o, n, db in rows])
    else:
        print(f"HTP fp16, {chip.name}, simulated")
        console.table("", ["operator", "form", "dB"], rows)


if __name__ == "__main__":
    main()
