"""Llama, SmolLM2 and Mistral-like models: pre-norm, grouped queries, SwiGLU, one rotary, with or without a window."""

from __future__ import annotations

from recipes.blocks import MLP, Attention, Layer
from recipes.config import Fields, flat_rope, rotary
from recipes.plan import Config, LayerKind, Options, Plan, Source

# What transformers takes a missing field for, where that differs from null.
ABSENT = {"mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}}


def plan(config: Config) -> Plan:
    """Lay out a config of model_type llama or mistral."""
    f = Fields(ABSENT.get(config["model_type"], {}) | config, "llama")
    hidden, inner, vocab = f.whole("hidden_size"), f.whole("intermediate_size"), f.whole("vocab_size")
    count, heads = f.layer_count(), f.whole("num_attention_heads")
    kv_heads = f.whole("num_key_value_heads", heads)
    head_dim = f.whole("head_dim", max(1, hidden // heads))
    f.divides("num_attention_heads", heads, kv_heads)
    f.one_of("hidden_act", ("silu",), "silu")
    # Llama has no window: transformers does not read the field there.
    eps, window = f.number("rms_norm_eps", 1e-6), f.window() if config["model_type"] == "mistral" else None
    rope, theta = flat_rope(f)
    name = "sliding" if window else "full"
    kind = LayerKind(name, window, rotary(f, name, head_dim, rope, theta), kv_heads, head_dim)
    tied = f.one_of("tie_word_embeddings", (True, False), False)

    def layer(kind: LayerKind, options: Options) -> Layer:
        attn = Attention(hidden, heads, kv_heads, head_dim, layout=options.layout_of(kind), options=options)
        return Layer(hidden, eps, attn, MLP(hidden, inner, "silu", options))

    def sources(i: int) -> dict[str, Source]:
        return layer_sources(f"model.layers.{i}.", hidden, inner, heads * head_dim, kv_heads * head_dim)

    embedding = Source("model.embed_tokens.weight", (vocab, hidden))
    return Plan(
        recipe="llama", vocab=vocab, hidden=hidden, context=f.whole("max_position_embeddings", 2048),
        layers=(name,) * count, kinds={name: kind}, layer=layer, layer_sources=sources, embedding=embedding,
        head=embedding if tied else Source("lm_head.weight", (vocab, hidden)),
        norm=Source("model.norm.weight", (hidden,)), norm_eps=eps,
        optional=("lm_head.weight",) if tied else (), warnings=f.finish(),
    )  # fmt: skip


def layer_sources(at: str, hidden: int, inner: int, q: int, kv: int) -> dict[str, Source]:
    """Hugging Face's names of a Llama-style layer whose names start with `at`."""
    return {
        "input_norm.weight": Source(f"{at}input_layernorm.weight", (hidden,)),
        "attn.q_proj.weight": Source(f"{at}self_attn.q_proj.weight", (q, hidden)),
        "attn.k_proj.weight": Source(f"{at}self_attn.k_proj.weight", (kv, hidden)),
        "attn.v_proj.weight": Source(f"{at}self_attn.v_proj.weight", (kv, hidden)),
        "attn.o_proj.weight": Source(f"{at}self_attn.o_proj.weight", (hidden, q)),
        "post_norm.weight": Source(f"{at}post_attention_layernorm.weight", (hidden,)),
        "mlp.gate_proj.weight": Source(f"{at}mlp.gate_proj.weight", (inner, hidden)),
        "mlp.up_proj.weight": Source(f"{at}mlp.up_proj.weight", (inner, hidden)),
        "mlp.down_proj.weight": Source(f"{at}mlp.down_proj.weight", (hidden, inner)),
    }
