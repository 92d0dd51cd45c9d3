"""Tiny models of every recipe with random weights: what the gate and the table of planted faults run on."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT, CHUNK = 64, 8
# 6 heads of 16 over a hidden size of 48: queries are grouped by 3 and head_dim is not hidden / heads.
SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
TWO_ROPES = {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
PARTIAL = {"full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.25},
           "sliding_attention": {"rope_theta": 1e4}}  # fmt: skip
SPARK = {**SIZES, "model_type": "spark2_5", "hidden_act": "gelu", "num_hidden_layers": 4, "rope_parameters": PARTIAL,
         "headwise_attn_output_gate": True, "max_position_embeddings": 128}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama"},
    "llama-llama3": {**SIZES, "model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "mistral-w8": {**SIZES, "model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 3},
    "qwen3": {**SIZES, "model_type": "qwen3"},
    "qwen3-w12": {**SIZES, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 12,
                         "max_window_layers": 1, "tie_word_embeddings": False},
    "gemma3": {**SIZES, "model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2,
               "query_pre_attn_scalar": 16, "rope_parameters": TWO_ROPES},
    "gemma3-w5": {**SIZES, "model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 3,
                         "query_pre_attn_scalar": 24, "num_key_value_heads": 1, "rope_parameters": TWO_ROPES},
    "spark2_5": {**SPARK, "sliding_window": 16},
    "spark2_5-silu": {**SPARK, "sliding_window": 8, "gate_attn_act_mode": "silu", "num_key_value_heads": 3},
    "spark2_5-ungated": {**SPARK, "sliding_window": 9, "headwise_attn_output_gate": False},
}  # fmt: skip
GATED = ("llama", "qwen3-w12", "gemma3", "spark2_5")  # one a recipe


def write_tiny(folder: Path, name: str) -> Path:
    """Write a model of MODELS as a checkpoint; returns the folder. The same weights every time."""
    from safetensors.numpy import save_file

    from recipes import plan_for

    config = MODELS[name]
    random, tensors = np.random.default_rng(zlib.crc32(name.encode())), {}
    for tensor, shape in plan_for(config).expected().items():
        noise = random.standard_normal(shape).astype(np.float32)
        # What writes into the residual stream is smaller, as in trained models: else rounding errors grow by layers.
        gain = 0.5 if any(part in tensor for part in ("o_proj", "out_proj", "down_proj")) else 1.4
        norm = (0.0 if "gemma3" in name else 1.0) + 0.1 * noise  # Gemma stores what is added to 1
        tensors[tensor] = norm if len(shape) == 1 else noise * np.float32(gain * shape[1] ** -0.5)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_ids(vocab: int, count: int, seed: int = 0) -> list[int]:
    """A text of random ids that begins as a chat does."""
    return [1, *(int(i) for i in np.random.default_rng(seed).integers(3, vocab, count - 1))]
