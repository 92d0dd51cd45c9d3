"""A config that asks for other arithmetic than a recipe has is refused by the name of its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes import MODEL_TYPES, plan_for
from ringstep.errors import RingstepError

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 257, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]
SPARK_ROPE = {
    "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 8, "layer_types": TYPES, "rope_parameters": GEMMA_ROPE},
    "spark2_5": {
        "sliding_window": 8, "layer_types": TYPES, "rope_parameters": SPARK_ROPE, "hidden_act": "gelu",
        "headwise_attn_output_gate": True, "gate_attn_act_mode": "silu",
    },
}  # fmt: skip
LONG = 10**400  # a whole number that no float holds
DROP = object()


def config(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    whole = {"model_type": model_type, **SIZES, **BASES[model_type], **changes}
    return {name: value for name, value in whole.items() if value is not DROP}


def refused(model_type: str, changes: dict[str, Any]) -> str:
    """The refusal, which must be one short line."""
    with pytest.raises(RingstepError) as caught:
        plan_for(config(model_type, changes))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    assert message.startswith("config.json: ")
    return message


def rope(kind: str, **changes: Any) -> dict[str, Any]:
    """Spark's rope parameters with one type's changed."""
    own = {key: value for key, value in (SPARK_ROPE[kind] | changes).items() if value is not DROP}
    return {"rope_parameters": SPARK_ROPE | {kind: own}}


@pytest.mark.parametrize("model_type", BASES)
def test_the_bases_are_accepted(model_type: str) -> None:
    assert plan_for(config(model_type, {})).warnings == ()
    assert BASES.keys() == MODEL_TYPES.keys()


EVERYWHERE: list[tuple[str, Any]] = [
    ("attention_bias", True),
    ("mlp_bias", True),
    ("final_logit_softcapping", 30.0),
    ("attn_logit_softcapping", 50.0),
    ("logit_scale", 0.5),
    ("num_experts", 8),
    ("num_local_experts", 8),
    ("quantization_config", {"quant_method": "gptq"}),
    ("use_bidirectional_attention", True),
    ("use_qk_norm", True),
    ("attention_chunk_size", 8),
    ("rope_interleaved", True),
    ("hidden_act", "relu"),
    ("hidden_act", "gelu_new"),
    ("hidden_act", ["silu"]),
    ("tie_word_embeddings", "yes"),
    ("tie_word_embeddings", 1),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", float("inf")),
    ("rms_norm_eps", LONG),
    ("rope_parameters", ["default"]),
]
HUGE = 1 << 33  # refused before anything of that size is made
WHOLE = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
NOT_WHOLE = ("64", 64.0, 0, -4, True, [64], {"a": 1}, LONG, float("nan"))
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")


@pytest.mark.parametrize("model_type", BASES)
def test_everywhere(model_type: str) -> None:
    table = [*EVERYWHERE, *((name, bad) for name in (*WHOLE, *OPTIONAL) for bad in NOT_WHOLE)]
    table += [(name, missing) for name in WHOLE for missing in (DROP, None)]
    for name, value in table:
        assert f"config.json: {name}" in refused(model_type, {name: value}), (name, value)
    assert "config.json: head_dim: " in refused(model_type, {"head_dim": HUGE})


@pytest.mark.filterwarnings("error")
def test_frequencies_that_are_not_finite() -> None:
    for changes in ({"rope_theta": 1e-320}, {"rope_scaling": {"rope_type": "linear", "factor": 1e-40}}):
        assert "frequencies that are not finite" in refused("llama", changes)


@pytest.mark.parametrize("model_type", BASES)
def test_heads_that_do_not_group(model_type: str) -> None:
    assert "num_attention_heads" in refused(model_type, {"num_key_value_heads": 3})
    assert "num_attention_heads" in refused(model_type, {"num_key_value_heads": 8})


@pytest.mark.parametrize("model_type", [m for m in BASES if m != "llama"])
def test_windows(model_type: str) -> None:
    for bad in (0, 1, -8, "8", 8.0, True, [8], LONG):
        assert "config.json: sliding_window" in refused(model_type, {"sliding_window": bad})
    if "layer_types" in BASES[model_type]:
        assert "config.json: sliding_window" in refused(model_type, {"sliding_window": None})


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "spark2_5"])
def test_layer_types(model_type: str) -> None:
    bad = (["sliding_attention", "linear_attention"], ["sliding_attention", None], [1, 2], [["full_attention"]] * 2,
           [{}, {}], TYPES[:1], TYPES * 2, "full_attention", {"0": "full_attention"})  # fmt: skip
    for value in bad:
        assert "config.json: layer_types" in refused(model_type, {"layer_types": value}), value


FLAT: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": LONG}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta_fast": 32}}, "beta_fast"),
    ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "factor"),
    ({"rope_scaling": {"rope_type": ["linear"], "factor": 4.0}}, "rope_type"),
    ({"rope_scaling": {"rope_type": {}}}, "rope_type"),
    ({"rope_scaling": {"rope_type": None}}, "rope_type"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 64}}, "low_freq_factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
     "rope_scaling"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_theta": "10000"}, "rope_theta"),
    ({"rope_theta": -1}, "rope_theta"),
    ({"rope_theta": LONG}, "rope_theta"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
    ({"rope_parameters": GEMMA_ROPE}, "full_attention"),
]  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
def test_one_rope(model_type: str) -> None:
    for changes, field in FLAT:
        assert field in refused(model_type, changes), changes


GEMMA: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters.sliding_attention"),
    ({"rope_parameters": {"full_attention": GEMMA_ROPE["full_attention"]}}, "rope_parameters.sliding_attention"),
    ({"rope_parameters": GEMMA_ROPE | {"full_attention": "default"}}, "rope_parameters.full_attention"),
    ({"rope_parameters": GEMMA_ROPE | {"full_attention": {"rope_type": "yarn"}}}, "rope_type 'yarn'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling"),
    ({"rope_parameters": DROP, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope_type 'yarn'"),
    ({"rope_parameters": DROP, "rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_parameters": DROP, "rope_theta": "1e6"}, "rope_theta"),
    ({"rope_parameters": DROP, "rope_theta": 0}, "rope_theta"),
    ({"rope_parameters": DROP, "rope_local_base_freq": "1e4"}, "rope_local_base_freq"),
    ({"hidden_activation": "gelu"}, "hidden_activation"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar"),
    ({"layer_types": DROP, "sliding_window_pattern": 0}, "sliding_window_pattern"),
    ({"layer_types": DROP, "sliding_window_pattern": "6"}, "sliding_window_pattern"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
]
SPARK: list[tuple[dict[str, Any], str]] = [
    ({"gate_attn_act_mode": "tanh"}, "gate_attn_act_mode"),
    ({"gate_attn_act_mode": ["sigmoid"]}, "gate_attn_act_mode"),
    ({"headwise_attn_output_gate": "yes"}, "headwise_attn_output_gate"),
    ({"headwise_attn_output_gate": 1}, "headwise_attn_output_gate"),
    ({"hidden_act": DROP}, "hidden_act"),
    ({"max_position_embeddings": DROP}, "max_position_embeddings"),
    ({"rope_parameters": DROP}, "rope_parameters.sliding_attention"),
    ({"rope_parameters": {"full_attention": SPARK_ROPE["full_attention"]}}, "rope_parameters.sliding_attention"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "rope_scaling"),
    (rope("full_attention", rope_type="yarn"), "rope_type 'yarn'"),
    (rope("full_attention", partial_rotary_factor=0.3125), "partial_rotary_factor"),  # 5 of 16 dims
    (rope("full_attention", partial_rotary_factor=0.01), "partial_rotary_factor"),
    (rope("full_attention", partial_rotary_factor=1.5), "partial_rotary_factor"),
    (rope("full_attention", partial_rotary_factor="0.25"), "partial_rotary_factor"),
    (rope("full_attention", partial_rotary_factor=0), "partial_rotary_factor"),
    (rope("sliding_attention", rope_theta=DROP), "rope_theta"),
    (rope("sliding_attention", rope_theta=float("inf")), "rope_theta"),
    (rope("sliding_attention", factor=2.0), "factor"),
    ({"head_dim": 15}, "partial_rotary_factor"),
]
QWEN3: list[tuple[dict[str, Any], str]] = [
    ({"use_sliding_window": "yes"}, "use_sliding_window"),
    ({"use_sliding_window": False, "layer_types": TYPES}, "layer_types"),
    ({"max_window_layers": -1}, "max_window_layers"),
]


@pytest.mark.parametrize(
    ("model_type", "changes", "field"),
    [("gemma3_text", *row) for row in GEMMA]
    + [("spark2_5", *row) for row in SPARK]
    + [("qwen3", *row) for row in QWEN3],
)
def test_of_one_recipe(model_type: str, changes: dict[str, Any], field: str) -> None:
    assert field in refused(model_type, changes)


@pytest.mark.parametrize(
    ("model_type", "hint"),
    [("qwen33", "qwen3"), ("lama", "llama"), ("spark2.5", "spark2_5"), ("gemma3", "gemma3_text"), ("zzzzzz", None)],
)
def test_unknown_model_type(model_type: str, hint: str | None) -> None:
    with pytest.raises(RingstepError, match="model_type") as caught:
        plan_for({"model_type": model_type, **SIZES})
    assert (f"did you mean {hint}?" in str(caught.value)) is (hint is not None)
    assert ("did you mean" in str(caught.value)) is (hint is not None)


@pytest.mark.parametrize("model_type", [None, 3, ["llama"], {"a": "llama"}, True, DROP])
def test_model_type_of_another_type(model_type: Any) -> None:
    whole = dict(SIZES) if model_type is DROP else {"model_type": model_type, **SIZES}
    with pytest.raises(RingstepError, match="model_type"):
        plan_for(whole)


@pytest.mark.parametrize("count", [4097, 1 << 39])
def test_more_layers_than_can_be_listed(count: int) -> None:
    assert "num_hidden_layers" in refused("llama", {"num_hidden_layers": count})


def test_unknown_fields_are_warned_of() -> None:
    assert "qk_secret" in plan_for(config("llama", {"qk_secret": 3})).warnings[0]
    assert "sliding_window" in plan_for(config("llama", {"sliding_window": 8})).warnings[0]
    assert plan_for(config("llama", {"sliding_window": 8})).kinds["full"].window is None
    assert plan_for(config("llama", {"qk_secret": False, "other": None, "third": []})).warnings == ()


def test_harmless_extras_change_nothing() -> None:
    extras = {"torch_dtype": "bfloat16", "use_cache": True, "attention_bias": False, "mlp_bias": None, "num_experts": 0}
    assert plan_for(config("llama", extras)).kinds == plan_for(config("llama", {})).kinds


def test_the_golden_config_is_accepted_without_a_warning() -> None:
    file = Path(__file__).parent.parent / "data" / "spark2_5_tiny" / "config.json"
    assert plan_for(json.loads(file.read_text())).warnings == ()
