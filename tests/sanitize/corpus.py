"""Tiny random models of ten architectures of transformers, exported as a third party would: both torch exporters.

Sequence 8, batch 1, static shapes, eager attention, float32. Inputs are ids and a mask with padding, so that
masked keys are in play.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED = dict(num_key_value_heads=2)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED | dict(sliding_window=4),
    "qwen2": GROUPED,
    "qwen3": GROUPED | dict(head_dim=8),
    "gemma3_text": GROUPED | dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "phi3": GROUPED,
    "gpt2": {},
    "gpt_neox": {},
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "bert": {},
}
EXPORTERS = ("dynamo", "script")
LENGTH = 8


def feeds() -> dict[str, np.ndarray]:
    """Ids, and a mask whose first two positions are padding."""
    ids = np.random.default_rng(0).integers(3, 64, (1, LENGTH))
    mask = np.ones((1, LENGTH), np.int64)
    mask[:, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def export(name: str, exporter: str, path: Path, sizes: Mapping[str, Any] = SIZES, spread: float = 4.0) -> Path:
    """Export one architecture to `path` (an .onnx file); with `spread` weights gates reach their nonlinear ranges."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**sizes, **ARCHITECTURES[name]})
    config.use_cache = False
    family = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    model = family.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(spread)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
            return logits

    args = tuple(torch.from_numpy(array) for array in feeds().values())
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with torch.no_grad(), warnings.catch_warnings(), quiet[0], quiet[1]:
        warnings.simplefilter("ignore")
        names = dict(input_names=["input_ids", "attention_mask"], output_names=["logits"])
        if exporter == "dynamo":
            torch.onnx.export(Logits(), args, str(path), dynamo=True, opset_version=18, external_data=False, **names)
        else:
            torch.onnx.export(Logits(), args, str(path), dynamo=False, opset_version=17, **names)
    return path
