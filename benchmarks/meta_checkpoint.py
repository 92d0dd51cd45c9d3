"""A Hugging Face Llama folder in the form ExecuTorch's Llama flow reads; runs in that flow's environment.

    python meta_checkpoint.py FOLDER OUT    writes OUT/consolidated.pth and OUT/params.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
}  # fmt: skip


def renamed(name: str) -> str:
    """A tensor's name there."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection [heads * head_dim, in] for rotary pairs that lie next to each other."""
    rows, inputs = weight.shape
    return weight.view(heads, 2, rows // heads // 2, inputs).transpose(1, 2).reshape(rows, inputs)


def main() -> None:
    """Convert."""
    source, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {renamed(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    tensors.setdefault("output.weight", tensors["tok_embeddings.weight"])
    config = json.loads((source / "config.json").read_text())
    for name, heads in (("wq", "num_attention_heads"), ("wk", "num_key_value_heads")):
        for layer in range(config["num_hidden_layers"]):
            own = f"layers.{layer}.attention.{name}.weight"
            tensors[own] = interleaved(tensors[own], config[heads])
    torch.save(tensors, out / "consolidated.pth")
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "vocab_size": config["vocab_size"],
        "hidden_dim": config["intermediate_size"], "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_theta"], "use_scaled_rope": bool(config.get("rope_scaling")),    }  # fmt: skip
    (out / "params.json").write_text(json.dumps(params, indent=1) + "\n")


if __name__ == "__main__":
    main()
