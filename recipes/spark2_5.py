"""Spark-X2.5: three sliding layers to one full layer, a rotary of its own for each type, head-wise output gates."""

from __future__ import annotations

from recipes.blocks import MLP, Attention, Layer
from recipes.config import Fields, rotary
from recipes.plan import Config, LayerKind, Options, Plan, Source


def plan(config: Config) -> Plan:
    """Lay out a config of model_type spark2_5."""
    f = Fields(config, "spark2_5")
    hidden, inner, vocab = f.whole("hidden_size"), f.whole("intermediate_size"), f.whole("vocab_size")
    count, heads = f.layer_count(), f.whole("num_attention_heads")
    kv_heads = f.whole("num_key_value_heads")
    head_dim = f.whole("head_dim", max(1, hidden // heads))
    f.divides("num_attention_heads", heads, kv_heads)
    # The exact erf form is what it was trained with; transformers' "gelu" is that form.
    f.one_of("hidden_act", ("gelu",))
    eps, window = f.number("rms_norm_eps", 1e-6), f.window()
    layers = f.layer_types(count, ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(count)])
    f.needs_window(layers, window)
    rope = {k: rotary(f, k, head_dim, own, partial=True) for k, own in f.rope_by_type(layers).items()}
    kinds = {k: LayerKind(k, window if k == "sliding" else None, rope[k], kv_heads, head_dim) for k in rope}
    gated = f.one_of("headwise_attn_output_gate", (True, False), False)
    mode = f.one_of("gate_attn_act_mode", ("sigmoid", "silu"), "sigmoid")
    tied = f.one_of("tie_word_embeddings", (True, False), True)

    def layer(kind: LayerKind, options: Options) -> Layer:
        layout, gate = options.layout_of(kind), mode if gated else None
        attn = Attention(hidden, heads, kv_heads, head_dim, layout=layout, options=options, gate=gate)
        return Layer(hidden, eps, attn, MLP(hidden, inner, "exact", options))

    def sources(i: int) -> dict[str, Source]:
        at, q, kv = f"model.layers.{i}.", heads * head_dim, kv_heads * head_dim
        fused = lambda start, stop: Source(f"{at}self_attn.q_k_v_proj.weight", (q + 2 * kv, hidden), (start, stop))
        found = {
            "input_norm.weight": Source(f"{at}input_layernorm.weight", (hidden,)),
            "attn.q_proj.weight": fused(0, q),
            "attn.k_proj.weight": fused(q, q + kv),
            "attn.v_proj.weight": fused(q + kv, q + 2 * kv),
            "attn.o_proj.weight": Source(f"{at}self_attn.out_proj.weight", (hidden, q)),
            "post_norm.weight": Source(f"{at}post_attention_layernorm.weight", (hidden,)),
            "mlp.gate_proj.weight": Source(f"{at}mlp.gate_proj.weight", (inner, hidden)),
            "mlp.up_proj.weight": Source(f"{at}mlp.up_proj.weight", (inner, hidden)),
            "mlp.down_proj.weight": Source(f"{at}mlp.down_proj.weight", (hidden, inner)),
        }
        if gated:
            found["attn.g_proj.weight"] = Source(f"{at}self_attn.g_proj.weight", (heads, hidden))
        return found

    embedding = Source("model.embedding.weight", (vocab, hidden))
    return Plan(
        recipe="spark2_5", vocab=vocab, hidden=hidden, context=f.whole("max_position_embeddings"),
        layers=layers, kinds=kinds, layer=layer, layer_sources=sources, embedding=embedding,
        head=embedding if tied else Source("lm_head.weight", (vocab, hidden)),
        norm=Source("model.norm.weight", (hidden,)), norm_eps=eps,
        optional=("lm_head.weight",) if tied else (), warnings=f.finish(),
    )  # fmt: skip
