"""Gemma 3 text: sandwich norms, query/key norms, scaled embeddings, a rotary for each layer type, tanh GELU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.blocks import MLP, Attention, RMSNorm, add
from recipes.config import Fields, rotary
from recipes.llama import layer_sources
from recipes.plan import Config, LayerKind, Options, Plan, Source


class Layer(nn.Module):
    """x + norm(attn(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, hidden: int, eps: float, attn: Attention, mlp: MLP) -> None:
        super().__init__()
        self.attn, self.mlp = attn, mlp
        self.input_norm, self.post_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.pre_mlp_norm, self.post_mlp_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        stream, cache = list(inputs[:-5]), inputs[-5:]
        out, key, value = self.attn(self.input_norm(stream[0]), *cache)
        stream = add(stream, self.post_norm(out))
        stream = add(stream, self.post_mlp_norm(self.mlp(self.pre_mlp_norm(stream[0]))))
        return *stream, key, value


def plan(config: Config) -> Plan:
    """Lay out a config of model_type gemma3_text."""
    f = Fields({"sliding_window": 4096} | config, "gemma3")  # transformers: absent is not null here
    hidden, inner, vocab = f.whole("hidden_size"), f.whole("intermediate_size"), f.whole("vocab_size")
    count, heads = f.layer_count(), f.whole("num_attention_heads")
    kv_heads, head_dim = f.whole("num_key_value_heads", 4), f.whole("head_dim", 256)
    f.divides("num_attention_heads", heads, kv_heads)
    f.one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    f.one_of("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    eps, scale = f.number("rms_norm_eps", 1e-6), f.number("query_pre_attn_scalar", 256) ** -0.5
    window = f.window()
    every = f.whole("sliding_window_pattern", config.get("_sliding_window_pattern") or 6)
    layers = f.layer_types(count, ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)])
    f.needs_window(layers, window)
    rope = f.rope_by_type(layers, {"full": 1e6, "sliding": f.number("rope_local_base_freq", 1e4)})
    kinds = {k: LayerKind(k, window if k == "sliding" else None, rotary(f, k, head_dim, rope[k]), kv_heads, head_dim)
             for k in dict.fromkeys(layers)}  # fmt: skip
    tied = f.one_of("tie_word_embeddings", (True, False), True)

    def layer(kind: LayerKind, options: Options) -> Layer:
        attn = Attention(
            hidden, heads, kv_heads, head_dim, layout=options.layout_of(kind), options=options, scale=scale,
            qk_norm_eps=eps,
        )  # fmt: skip
        return Layer(hidden, eps, attn, MLP(hidden, inner, "tanh", options))

    def norm(name: str, dim: int) -> Source:
        return Source(name, (dim,), add=1.0)

    def sources(i: int) -> dict[str, Source]:
        at = f"model.layers.{i}."
        return layer_sources(at, hidden, inner, heads * head_dim, kv_heads * head_dim) | {
            "input_norm.weight": norm(f"{at}input_layernorm.weight", hidden),
            "post_norm.weight": norm(f"{at}post_attention_layernorm.weight", hidden),
            "pre_mlp_norm.weight": norm(f"{at}pre_feedforward_layernorm.weight", hidden),
            "post_mlp_norm.weight": norm(f"{at}post_feedforward_layernorm.weight", hidden),
            "attn.q_norm.weight": norm(f"{at}self_attn.q_norm.weight", head_dim),
            "attn.k_norm.weight": norm(f"{at}self_attn.k_norm.weight", head_dim),
        }

    embedding = Source("model.embed_tokens.weight", (vocab, hidden))
    return Plan(
        recipe="gemma3", vocab=vocab, hidden=hidden, context=f.whole("max_position_embeddings", 131072),
        layers=layers, kinds=kinds, layer=layer, layer_sources=sources, embedding=embedding,
        head=embedding if tied else Source("lm_head.weight", (vocab, hidden)),
        norm=norm("model.norm.weight", hidden), norm_eps=eps,
        # The scale is a float32 tensor in transformers.
        embedding_scale=float(torch.tensor(hidden**0.5, dtype=torch.float32)),
        optional=("lm_head.weight",) if tied else (), warnings=f.finish(),
    )  # fmt: skip
