"""What the accurate forms do for a plain third-party export: SmolLM2-135M by torch.onnx.export, on HTP's simulator.

    python benchmarks/accurate_forms.py [--chip sm8750] [--json]

transformers' LlamaForCausalLM over the 44 tokens of a chat in one forward, opset 18, exported as any user would; then
the passes one after the other. dB is the SNR of logits against float32 over positions; simulated: whether a phone
computes the same is not known here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder has a sanitize.py of its own
import smollm2

from ringstep import console
from ringstep.devices import find_device
from ringstep.engines.qnn_sim import open_graph
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db
from sanitize import graph as graphs
from sanitize.model_file import read_model, write_model
from sanitize.order import PASSES
from sanitize.passes import (
    Pass,
    accurate_exp,
    accurate_gelu,
    accurate_sigmoid,
    accurate_softmax,
    accurate_square,
)
from sanitize.pipeline import sanitize
from sanitize.target import find_target

PROMPT = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
STAGES: dict[str, tuple[Pass, ...]] = {
    "Pow(x, 2) as Mul(x, x)": (accurate_square.PASS,),
    "norms, accurate-square": (accurate_square.PASS,),
    "and SiLU, accurate-sigmoid": (accurate_sigmoid.PASS, accurate_gelu.PASS),
    "and Softmax, accurate-softmax": (accurate_softmax.PASS, accurate_exp.PASS),
}


class Logits(torch.nn.Module):
    """Ids to logits, nothing else."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


def export(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write the model; returns (ids [1, n], float32 logits [1, n, vocab])."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.folder()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", use_cache=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = torch.cat([ids["input_ids"], tokenizer(ANSWER, return_tensors="pt")["input_ids"]], dim=1)
    module = Logits(model).eval()
    with torch.no_grad():
        logits = module(ids).numpy()
    torch.onnx.export(
        module, (ids,), path, input_names=["ids"], output_names=["logits"], dynamo=True, opset_version=18, verbose=False
    )
    return ids.numpy(), logits


def values(model: ir.Model) -> list[str]:
    """The names of all values that nodes make."""
    return [value.name for node in graphs.every_node(model) for value in node.outputs if value.name]


def main() -> None:
    """Export, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="sm8750")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    chip = find_device(asked.chip).chip
    target = find_target("qnn-htp", asked.chip)
    rows: list[tuple[str, int, str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids, truth = export(folder / "export.onnx")

        def measure(label: str, path: Path, changes: int) -> None:
            try:
                with open_graph(path, soc_model=chip.soc_model, fp16=True) as graph:
                    logits = graph.run({"ids": ids.astype(graph.inputs["ids"][1])})["logits"]
            except RingstepError as error:
                console.warn(f"{label}: {error}")
                rows.append((label, changes, "refused", "", ""))
                return
            each = [snr_db(a, b) for a, b in zip(truth[0], logits[0], strict=True)]
            same = float((truth[0].argmax(-1) == logits[0].argmax(-1)).mean())
            rows.append((label, changes, f"{np.median(each):.1f}", f"{min(each):.1f}", f"{same:.0%}"))

        measure("as exported", folder / "export.onnx", 0)
        model = read_model(folder / "export.onnx")
        graphs.infer_types(model)
        # Told that no value is large, accurate-square leaves the norms as they are.
        small = replace(target, ranges=dict.fromkeys(values(model), (-1.0, 1.0)))
        for number, (label, passes) in enumerate(STAGES.items()):
            changes = sum(len(each.run(model, target if number else small)) for each in passes)
            write_model(model, folder / "changed.onnx")
            measure(label, folder / "changed.onnx", changes)
        model = read_model(folder / "export.onnx")
        changes = sum(len(applied.changes) for applied in sanitize(model, target, PASSES))
        write_model(model, folder / "changed.onnx")
        measure("ringstep sanitize, all passes", folder / "changed.onnx", changes)
    columns = ["graph", "changes", "median dB", "worst dB", "top-1"]
    if asked.json:
        console.print_json([dict(zip(columns, row, strict=True)) | {"chip": chip.name} for row in rows])
    else:
        print(f"SmolLM2-135M, torch.onnx.export, {ids.shape[1]} tokens, HTP fp16, {chip.name}, simulated")
        console.table("", columns, rows)


if __name__ == "__main__":
    main()
