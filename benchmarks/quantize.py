"""Quantisation of SmolLM2-135M measured: methods and schemes against float32 and llama.cpp's Q4_0, in one run.

    weights    quantised weights in torch floats, activations untouched
    fake       and activations rounded to their encodings, still in torch floats
    simulated  the compiled binary on Qualcomm's HTP simulator (with --simulate; minutes a scheme)

The text is quantize/texts/heldout.txt, 512 tokens that calibration never sees. SNR is of the logits of all positions
as one signal; KL and top-1 are means over positions; perplexity is of the text's own next tokens. The first token's
keys and values come from float32 (the sink prefix) except where a row says "no prefix".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import BUILD, ROOT, run
from smollm2 import folder as smollm2

sys.path.insert(0, str(ROOT))

from exporters.calibration import first_token
from exporters.job import Job
from exporters.line import Line
from exporters.prove import open_reference
from quantize import fake
from quantize.corpus import held_out
from quantize.grid import Grid
from quantize.scheme import Auto, Scheme, grid_for, raised
from quantize.scheme_file import load_scheme, to_toml
from quantize.sizes import HTP, as_json, sizes
from quantize.store import INDEX, load_index, weight_at
from ringstep import console
from ringstep.contract import StepSpec
from ringstep.encoding import open_table
from ringstep.parity.metrics import kl_nats, log_softmax, snr_db
from ringstep.session import DecodeSession
from ringstep.text import Text

OUT = BUILD / "bench" / "quantize"
BASELINE = ROOT / "artifacts" / "baselines" / "quantize.json"
TOKENS, CONTEXT, CHUNK, DEVICE = 512, 640, 128, "galaxy-s25"
PRESETS = ("w8a16", "w4a16", "w4a16-block", "w4a16-mixed", "w4-block32-auto-24")


@dataclass(frozen=True)
class Row:
    """A line of the table: a preset with some of its [weights] and top-level keys changed."""

    name: str
    preset: str
    weights: dict[str, Any]
    top: dict[str, Any]

    def scheme(self) -> Scheme:
        """The scheme of this row."""
        scheme = load_scheme(self.preset)
        return dataclasses.replace(scheme, name=self.name, weights=dataclasses.replace(scheme.weights, **self.weights),
                                   **self.top)  # fmt: skip


PLAIN: dict[str, Any] = {"sequential": False, "rotate": "none", "rescale": "none"}
ROWS = (
    Row("w8-nearest", "w8a16", {"rounding": "nearest"}, PLAIN),
    Row("w8-gptq", "w8a16", {"rounding": "gptq"}, PLAIN),
    Row("w8a16", "w8a16", {}, {}),
    Row("w4-nearest", "w4a16", {"rounding": "nearest"}, PLAIN),
    Row("w4-clip", "w4a16", {"rounding": "clip"}, PLAIN),
    Row("w4-gptq", "w4a16", {"rounding": "gptq"}, PLAIN),
    Row("w4-gptq-rotated", "w4a16", {"rounding": "gptq"}, PLAIN | {"rotate": "hadamard"}),
    Row("w4a16", "w4a16", {}, {}),
    Row("w4-block32-nearest", "w4a16-block", {"rounding": "nearest"}, PLAIN),
    Row("w4-block32-clip", "w4a16-block", {"rounding": "clip"}, PLAIN),
    Row("w4-block32-gptq", "w4a16-block", {"rounding": "gptq"}, PLAIN),
    Row("w4a16-block", "w4a16-block", {}, {}),
    Row("w4a16-mixed", "w4a16-mixed", {}, {}),
    Row("auto", "auto", {}, {}),
    Row("w4-block32-auto-24", "w4a16-block", {}, {"auto": Auto(target_db=24.0, steps=("4 -> 8",))}),
)


def compare(truth: np.ndarray, have: np.ndarray, ids: list[int]) -> dict[str, float]:
    """The four measures over positions 1 on; position 0 is the sink prefix's."""
    truth, have = truth[1:], have[1:]
    top1 = truth.argmax(-1) == have.argmax(-1)
    return {
        "snr_db": snr_db(truth, have), "kl": float(np.mean([kl_nats(t, h) for t, h in zip(truth, have, strict=True)])),
        "top1": float(top1.mean()), "ppl": perplexity(have, ids[1:]),
    }  # fmt: skip


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    """exp of the mean negative log likelihood of each next token; logits[i] are those after ids[i]."""
    rows = zip(logits[:-1], ids[1:], strict=True)
    return float(np.exp(-np.mean([log_softmax(row)[token] for row, token in rows])))


def export(row: Row, format_: str) -> tuple[Path, dict[str, float]]:
    """Export a row's scheme as a user would, in a process of its own; its folder, seconds and memory."""
    out = OUT / row.name
    shutil.rmtree(out, ignore_errors=True)
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / f"{row.name}.toml"
    file.write_text(to_toml(row.scheme()))
    command = [Path(sys.executable).with_name("ringstep"), "export", smollm2(), "--device", DEVICE,
               "--format", format_, "--scheme", file, "--context", str(CONTEXT), "--chunk", str(CHUNK), "--no-parity",
               "--out", out]  # fmt: skip
    took = run(command, OUT / f"{row.name}.log")
    stages = json.loads((out / "manifest.json").read_text())["stages"]
    own = sum(stages[name]["seconds"] for name in ("graphs", "calibrate", "round", "qdq"))
    return out, {"seconds": own, "peak_anon_bytes": took.anon_bytes, "peak_rss_bytes": took.max_rss_bytes}


def open_line(row: Row, out: Path) -> Line:
    """The line of an export that has run."""
    return Line(Job(model=str(smollm2()), out=out, device=DEVICE, format="onnx", scheme=str(OUT / f"{row.name}.toml"),
                    context=CONTEXT, chunk=CHUNK))  # fmt: skip


def stored(out: Path) -> Callable[[str], np.ndarray | None]:
    """A parameter's quantised values by name, read from an artifact."""
    index = load_index(out / "onnx" / INDEX)
    return lambda name: weight_at(out / "onnx", index[name]).dequantised() if name in index else None


def q4_0(model: Any, ids: list[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Logits of transformers' model with llama.cpp's Q4_0 of every linear, by the gguf package's quantiser.

    Head and table have 8 bits a row, as in our schemes. With the first token's keys and values from float32, then
    without. The model's weights are overwritten.
    """
    import torch
    from gguf import GGMLQuantizationType, dequantize, quantize
    from transformers import DynamicCache

    from quantize.rounding import nearest

    kind = GGMLQuantizationType.Q4_0
    with torch.inference_mode():
        past = DynamicCache(config=model.config)
        first = model(torch.tensor([ids[:1]]), past_key_values=past, use_cache=True).logits[0].numpy()
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                values = weight.numpy()
                tied = name == "model.embed_tokens.weight"
                made = nearest.quantise(values, Grid(8)).dequantised() if tied else (
                    dequantize(quantize(values, kind), kind).reshape(values.shape))  # fmt: skip
                weight.copy_(torch.from_numpy(made))
        have = model(torch.tensor([ids[1:]]), past_key_values=past, use_cache=True).logits[0].numpy()
        yield "Q4_0", np.concatenate([first, have])
        yield "Q4_0, no prefix", model(torch.tensor([ids])).logits[0].numpy()


def measure(rows: tuple[Row, ...], simulate: bool) -> Iterator[dict[str, Any]]:
    """Every row's figures, float32 first."""
    ids, truth, quantised = [], np.empty(0), None
    for row in rows:
        simulated = simulate and row.name in PRESETS
        out, cost = export(row, "qnn" if simulated else "onnx")
        line = open_line(row, out)
        quantised = line.quantised
        assert quantised is not None and line.scheme is not None
        if not ids:
            text = Text(out)
            ids = [first_token(text, line.plan.vocab), *text.encode(held_out())][:TOKENS]
            if len(ids) < TOKENS:
                raise SystemExit(f"heldout.txt has {len(ids)} tokens, {TOKENS} are needed")
            reference: Any = open_reference(line.checkpoint)
            truth = reference.truth(ids).logits
            yield {"row": "float32", "ppl": perplexity(truth[1:], ids[1:])}
            for name, have in q4_0(reference.model, ids):
                yield {"row": name, "bits": 4.5, "weights": compare(truth, have, ids)}
            del reference
        entries = quantised.calibration.entries
        body: dict[str, Any] = {"row": row.name, **cost}
        scheme = line.scheme
        if scheme.auto is not None:
            chosen = json.loads((out / "quantize" / "auto.json").read_text())["raised"]
            scheme = raised(scheme, [each["path"] for each in chosen], scheme.auto.promotions()[0][1])
            body["raised"] = len(chosen)
        found = as_json(sizes(line.plan, lambda path, s=scheme: grid_for(s, path), HTP, shared_head=True))
        body["sizes"] = {k: found[k] for k in found if k != "parameters"}
        table = open_table(out, StepSpec.load(out))
        assert table is not None
        model = dataclasses.replace(quantised.model, table=table.__getitem__)
        for what, activations in (("weights", None), ("fake", quantised.activations)):
            have = fake.logits(model, ids[1:], entries, stored(out), activations)
            body[what] = compare(truth, np.concatenate([truth[:1], have]), ids)
        if simulated:
            start_time = time.perf_counter()
            with DecodeSession.open(out, "qnn-sim") as session:
                body["simulated"] = compare(truth, session.step(ids), ids)
            body["simulated_seconds"] = time.perf_counter() - start_time
            body["binary_bytes"] = (out / "qnn" / f"prefill_{CHUNK}_ctx_qnn.bin").stat().st_size
        yield body


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulate", action="store_true", help="run the presets on the HTP simulator as well")
    parser.add_argument("--rows", help="only these, by comma")
    parser.add_argument("--write", action="store_true", help=f"write {BASELINE.relative_to(ROOT)}")
    args = parser.parse_args()
    wanted = args.rows.split(",") if args.rows else None
    found = []
    for body in measure(tuple(r for r in ROWS if not wanted or r.name in wanted), args.simulate):
        found.append(body)
        print(json.dumps(body), flush=True)
    show = lambda m: (f"{m['snr_db']:.1f}", f"{m['kl']:.4f}", f"{100 * m['top1']:.1f}", f"{m['ppl']:.2f}")
    for what in ("weights", "fake", "simulated"):
        table = [(b["row"], *show(b[what])) for b in found if b.get(what)]
        if table:
            console.table(what, ["", "SNR dB", "KL", "top-1 %", "perplexity"], table)
    if args.write:
        BASELINE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
