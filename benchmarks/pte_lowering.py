"""Lower a pair of layers as large as Spark-X2.5-1.7B's (a window and a full one) for the NPU: seconds, memory, bytes.

Random weights, a vocabulary of 32768. Each row is one `ringstep export` into a folder of its own, without the proof;
time and memory are those of the process that lowers, as the manifest has them. Theory is one copy of the linears with
their scales.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from measure import BUILD, machine, run

from ringstep import console

OUT = BUILD / "bench" / "pte-lowering"
CONFIG: dict[str, Any] = {
    "model_type": "spark2_5", "hidden_size": 2048, "intermediate_size": 6656, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 32768, "hidden_act": "gelu",
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512, "headwise_attn_output_gate": True,
    "rope_parameters": {"full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.25},
                        "sliding_attention": {"rope_theta": 1e4}},
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# To nearest: it is the lowering that is measured, not GPTQ.
NEAREST = "[weights]\nbits = 8\n[head]\nbits = 8\n[embedding]\nbits = 8\n[activations]\nbits = 16\n"
ROWS: dict[str, list[str]] = {
    "fp16": ["--precision", "fp16"],
    "fp16, chunk 32": ["--precision", "fp16", "--chunk", "32"],
    "16a8w": ["--scheme", "SCHEME"],
    "16a8w, chunk 32": ["--scheme", "SCHEME", "--chunk", "32"],
}


def write_model(folder: Path) -> Path:
    """The checkpoint, made where it is missing."""
    import numpy as np
    from safetensors.numpy import save_file

    from recipes import plan_for

    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        tensors = {name: np.ones(shape, np.float16) if len(shape) == 1 else
                   (random.standard_normal(shape, np.float32) * shape[1] ** -0.5).astype(np.float16)
                   for name, shape in plan_for(CONFIG).expected().items()}  # fmt: skip
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def lower(name: str, options: list[str], model: Path) -> dict[str, Any]:
    """Export once; what the manifest says of the lowering."""
    folder = OUT / name.replace(", ", "-").replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    scheme = OUT / "nearest.toml"
    scheme.write_text(NEAREST)
    command = [Path(sys.executable).parent / "ringstep", "export", model, "--format", "executorch", "--device",
               "galaxy-s25", "--context", "1024", "--calibration-tokens", "512", "--no-parity", "--out", folder]
    run([*command, *(str(scheme) if o == "SCHEME" else o for o in options)], OUT / f"{folder.name}.log")
    facts = json.loads((folder / "manifest.json").read_text())["stages"]["executorch"]["facts"]
    own = {name: facts[name] for name in ("seconds", "peak_bytes", "bytes", "weight_bytes")}
    return {"row": name, **own, "simulated_bytes": facts.get("simulated", facts)["bytes"]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, before = write_model(OUT / "model"), machine()
    rows = []
    for name, options in ROWS.items():
        rows.append(lower(name, options, model))
        console.say(f"{name}: {rows[-1]['seconds']} s")
    if args.json:
        console.print_json({"rows": rows, "machine": before})
        return
    size = console.human_bytes
    table = [(r["row"], console.human_seconds(r["seconds"]), size(r["peak_bytes"]), size(r["bytes"]),
              size(r["simulated_bytes"]), size(r["weight_bytes"]), f"{r['bytes'] / r['weight_bytes']:.3f}")
             for r in rows]  # fmt: skip
    columns = ["", "lowering", "RssAnon", "model.pte", "not shared", "theory", "ratio"]
    console.table("Two layers of Spark-X2.5-1.7B's size and a head of 32768, for sm8750", columns, table)


if __name__ == "__main__":
    main()
