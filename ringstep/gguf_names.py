"""GGUF metadata and tensor names said in Hugging Face's words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from ringstep.errors import RingstepError, did_you_mean
from ringstep.gguf_file import GgufFile, read_gguf
from ringstep.tensor_file import StoredTensor

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_LAYER = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = {  # general.architecture -> model_type, class
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
TOP_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


def hf_config(gguf: GgufFile, file: object) -> dict[str, Any]:
    """Return the config.json that the GGUF's metadata amounts to.

    Raises RingstepError naming the file and key for an architecture, rotary scaling or other setting that has
    no faithful counterpart here.
    """
    meta = gguf.metadata
    arch = meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise RingstepError(
            f"{file}: general.architecture {arch!r} is not read from GGUF, only {', '.join(ARCHITECTURES)}"
            f"{did_you_mean(str(arch), ARCHITECTURES)}; use the safetensors checkpoint instead"
        )

    def get(key: str, kind: type[int] | type[float], default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise RingstepError(f"{file}: the key {arch}.{key} is missing; the file cannot be used")
        if type(value) is not kind or not value >= 0:
            raise RingstepError(
                f"{file}: {arch}.{key} is {str(value)[:40]}, not one {kind.__name__} for all layers"
            )
        return value

    if meta.get(f"{arch}.expert_count", 0):
        raise RingstepError(
            f"{file}: mixture-of-experts GGUF files are not read; use the safetensors checkpoint"
        )
    hidden, heads = get("embedding_length", int), get("attention.head_count", int)
    layers = get("block_count", int)
    if not heads or layers > len(gguf.tensors):
        raise RingstepError(f"{file}: {heads} heads in {layers} layers cannot be; the file is damaged")
    head_dim = get("attention.key_length", int, hidden // heads)
    if get("attention.value_length", int, head_dim) != head_dim:
        raise RingstepError(
            f"{file}: {arch}.attention.value_length differs from key_length, which is not supported"
        )
    if get("rope.dimension_count", int, head_dim) != head_dim:
        raise RingstepError(
            f"{file}: {arch}.rope.dimension_count differs from the head size, which is not supported"
        )
    embedding = gguf.tensors.get("token_embd.weight")
    model_type, cls = ARCHITECTURES[arch]
    theta = get("rope.freq_base", float, 1_000_000.0 if arch == "gemma3" else 10_000.0)
    config: dict[str, Any] = {
        "architectures": [cls],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": _short(get("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _short(theta),
        "max_position_embeddings": get("context_length", int),
        # The embedding decides: the metadata key is optional and padding has made it wrong before.
        "vocab_size": embedding.shape[0] if embedding else get("vocab_size", int),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
        "hidden_act": "silu",
        "dtype": "float32",
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := meta.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token_id"] = token
    scaling = _rope_scaling(gguf, arch, file) or _llama3_scaling(gguf, head_dim, theta, file)
    if scaling:
        config["rope_scaling"] = scaling
    if arch == "gemma3":
        del config["hidden_act"], config["mlp_bias"]
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": get("attention.sliding_window", int),
            "layer_types": ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(layers)],
            "rope_local_base_freq": 10_000.0,
            # GGUF does not store it; llama.cpp has the same exception for the 27B model alone.
            "query_pre_attn_scalar": hidden // heads if layers == 62 else head_dim,
        }
    return config


def hf_tensors(gguf: GgufFile, config: dict[str, Any], file: object) -> dict[str, StoredTensor]:
    """Return the tensors by Hugging Face name; one that has none keeps its own, for check() to refuse."""
    gemma = config["model_type"].startswith("gemma")
    result: dict[str, StoredTensor] = {}
    for name, tensor in gguf.tensors.items():
        if name == "rope_freqs.weight":
            continue  # became rope_scaling
        mapped = name
        if match := BLOCK.fullmatch(name):
            part = (GEMMA_LAYER if gemma else LAYER).get(match[2])
            mapped = f"model.layers.{match[1]}.{part}.{match[3]}" if part else name
            if config["model_type"] == "llama" and match[2] in ("attn_q", "attn_k"):
                heads = config["num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"]
                if not heads or not tensor.shape[0] or tensor.shape[0] % (2 * heads):
                    raise RingstepError(
                        f"tensor {name!r} in {file}: {tensor.shape[0]} rows are not {heads} heads of pairs"
                    )
                tensor = replace(tensor, rotary_heads=heads)
        elif (match := TOP_TENSOR.fullmatch(name)) and match[1] in TOP:
            mapped = f"{TOP[match[1]]}.{match[2]}"
        if gemma and mapped.endswith("norm.weight"):
            tensor = replace(tensor, added=1.0)  # Gemma multiplies by 1 + weight, GGUF stores the sum
        if mapped in result:
            raise RingstepError(
                f"tensor {name!r} in {file} is there twice under different names; the file is damaged"
            )
        result[mapped] = tensor
    return result


def _short(value: float) -> float:
    """Turn a float32 back into the decimal it was written from (1e-05, not 9.99999e-06)."""
    return float(str(np.float32(value)))


def _rope_scaling(gguf: GgufFile, arch: str, file: object) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling."
    given = {
        key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)
    }
    given.pop("finetuned", None)
    kind, factor = given.pop("type", "none"), given.pop("factor", None)
    original = given.pop("original_context_length", None)
    if kind == "none" and not given:
        return None
    if kind not in ("linear", "yarn") or given or type(factor) is not float:
        raise RingstepError(
            f"{file}: {prefix}type {kind!r} with {sorted(given) or 'no extra keys'} cannot be mapped; "
            "use the safetensors checkpoint instead"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _short(factor)}
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(gguf: GgufFile, head_dim: int, theta: float, file: object) -> dict[str, Any] | None:
    """Recover Llama 3's scaling from the divisors it was baked into; refuse any it does not explain."""
    tensor = gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if len(tensor.shape) != 1:
        raise RingstepError(
            f"tensor 'rope_freqs.weight' in {file} has shape {list(tensor.shape)}, not one axis"
        )
    stored = read_gguf(tensor, 0, tensor.shape[0]).astype(np.float64)
    if 0 < stored.size == head_dim // 2 and np.isfinite(stored).all() and stored.max() > 1 and theta > 1:
        factor, low, high, original = float(round(stored.max(), 3)), 1.0, 4.0, 8192
        turns = original * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise RingstepError(
        f"tensor 'rope_freqs.weight' in {file} is not Llama 3's rotary scaling; "
        "use the safetensors checkpoint instead"
    )
