"""Qwen3 (dense): Llama's layer with RMSNorm on each head's query and key."""

from __future__ import annotations

from recipes.blocks import MLP, Attention, Layer
from recipes.config import Fields, flat_rope, rotary
from recipes.llama import layer_sources
from recipes.plan import Config, LayerKind, Options, Plan, Source
from ringstep.errors import RingstepError


def plan(config: Config) -> Plan:
    """Lay out a config of model_type qwen3."""
    # What transformers takes a missing field for, where that differs from null.
    f = Fields({"num_key_value_heads": 32, "sliding_window": 4096} | config, "qwen3")
    hidden, inner, vocab = f.whole("hidden_size"), f.whole("intermediate_size"), f.whole("vocab_size")
    count, heads = f.layer_count(), f.whole("num_attention_heads")
    kv_heads, head_dim = f.whole("num_key_value_heads", heads), f.whole("head_dim", 128)
    f.divides("num_attention_heads", heads, kv_heads)
    f.one_of("hidden_act", ("silu",), "silu")
    eps = f.number("rms_norm_eps", 1e-6)
    rope, theta = flat_rope(f)
    sliding = f.one_of("use_sliding_window", (True, False), False)
    window = f.window() if sliding else None
    f.ignore("sliding_window")
    # transformers: layers from max_window_layers on slide, the ones before do not.
    first = f.whole("max_window_layers", 28, low=0)
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    layers = f.layer_types(count, default)
    if "sliding" in layers and window is None:
        raise RingstepError("config.json: layer_types asks for sliding layers but use_sliding_window is off")
    windows = {"sliding": window, "full": None}
    kinds = {k: LayerKind(k, windows[k], rotary(f, "rope", head_dim, rope, theta), kv_heads, head_dim)
             for k in dict.fromkeys(layers)}  # fmt: skip
    tied = f.one_of("tie_word_embeddings", (True, False), False)

    def layer(kind: LayerKind, options: Options) -> Layer:
        attn = Attention(
            hidden, heads, kv_heads, head_dim, layout=options.layout_of(kind), options=options, qk_norm_eps=eps
        )
        return Layer(hidden, eps, attn, MLP(hidden, inner, "silu", options))

    def sources(i: int) -> dict[str, Source]:
        at = f"model.layers.{i}."
        return layer_sources(at, hidden, inner, heads * head_dim, kv_heads * head_dim) | {
            "attn.q_norm.weight": Source(f"{at}self_attn.q_norm.weight", (head_dim,)),
            "attn.k_norm.weight": Source(f"{at}self_attn.k_norm.weight", (head_dim,)),
        }

    embedding = Source("model.embed_tokens.weight", (vocab, hidden))
    return Plan(
        recipe="qwen3", vocab=vocab, hidden=hidden, context=f.whole("max_position_embeddings", 32768),
        layers=layers, kinds=kinds, layer=layer, layer_sources=sources, embedding=embedding,
        head=embedding if tied else Source("lm_head.weight", (vocab, hidden)),
        norm=Source("model.norm.weight", (hidden,)), norm_eps=eps,
        optional=("lm_head.weight",) if tied else (), warnings=f.finish(),
    )  # fmt: skip
