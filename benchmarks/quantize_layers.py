"""Memory and time of quantisation by the number of layers: SmolLM2 cut to 8, 16 and all 30 layers, GPTQ, w4a16."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from measure import BUILD, ROOT, run
from smollm2 import folder as smollm2

sys.path.insert(0, str(ROOT))

from ringstep import console

OUT = BUILD / "bench" / "quantize-layers"


def cut(layers: int) -> Path:
    """SmolLM2 with its first `layers` layers, as a Hugging Face folder; the weights are links."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    source, folder = smollm2(), OUT / f"smollm2-{layers}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = layers
    with safe_open(source / "model.safetensors", "np") as file:
        names = list(file.keys())
        kept = [n for n in names if not n.startswith("model.layers.") or int(n.split(".")[2]) < layers]
        save_file({name: file.get_tensor(name) for name in kept}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 30])
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--tokens", default="16384", help="calibration text")
    args = parser.parse_args()
    rows = []
    for layers in args.layers:
        model, out = cut(layers), OUT / f"out-{layers}"
        shutil.rmtree(out, ignore_errors=True)
        # An empty cache: a calibration found there would cost nothing.
        command = ["env", f"XDG_CACHE_HOME={OUT / 'cache'}", Path(sys.executable).with_name("ringstep"), "quantize",
                   model, "--scheme", args.scheme, "--context", "640", "--calibration-tokens", args.tokens,
                   "--out", out]  # fmt: skip
        shutil.rmtree(OUT / "cache", ignore_errors=True)
        took = run(command, OUT / f"{layers}.log")
        rows.append((str(layers), console.human_seconds(took.seconds), console.human_seconds(took.cpu_seconds),
                     console.human_bytes(took.anon_bytes), console.human_bytes(took.max_rss_bytes)))  # fmt: skip
        print(rows[-1], flush=True)
    console.table("", ["layers", "seconds", "CPU seconds", "peak RssAnon", "max RSS"], rows)


if __name__ == "__main__":
    main()
