"""Small checkpoints of random weights, as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quantize.grid import Grid, QuantisedWeight, min_max, on_scales, on_steps, two_levels
from recipes import plan_for

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN3 = LLAMA | {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip


def save_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write config.json and model.safetensors with weights of about 1 / sqrt(in) and norms around 1."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, shape in plan_for(config).expected().items():
        values = rng.normal(size=shape) / np.sqrt(shape[-1]) if len(shape) == 2 else 1 + 0.1 * rng.normal(size=shape)
        tensors[name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rounded(values: np.ndarray, grid: Grid) -> QuantisedWeight:
    """A weight rounded to nearest, its scales exact in float16."""
    scale, zero = min_max(values, grid)
    if grid.two_level:
        return on_steps(values, grid, *two_levels(scale))
    scale = scale.astype(np.float16).astype(np.float32)
    return on_scales(values, grid, scale, zero)
