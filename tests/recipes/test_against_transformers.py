"""Each recipe against transformers computing in float64, from the same Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from recipe_runs import decibels, feed, ort_session, torch_session

from recipes import plan_for
from recipes.plan import Options, Plan
from ringstep.checkpoint import Checkpoint, open_checkpoint
from ringstep.parity.metrics import snr_db
from ringstep.session import DecodeSession

transformers.logging.set_verbosity_error()
TOKENS, CONTEXT = 28, 32  # windows are 8: three wraps and a half
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# 6 heads of 16 over a hidden size of 48: queries are grouped by 3 and head_dim is not hidden / heads.
SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 321, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1, "vocab_size": 257, "tie_word_embeddings": True}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3, "vocab_size": 257, "tie_word_embeddings": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}}),
    "mistral sliding": ("mistral", {"sliding_window": 8, "num_key_value_heads": 3}),
    "mistral full": ("mistral", {"sliding_window": None, "vocab_size": 257}),
    "mistral window beyond": ("mistral", {"sliding_window": 48, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3 sliding": ("qwen3", {
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3,
        "vocab_size": 257, "tie_word_embeddings": False,
    }),
    "gemma3": ("gemma3_text", {
        "sliding_window": 8, "num_hidden_layers": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh", "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "gemma3 untied": ("gemma3_text", {
        "sliding_window": 5, "num_hidden_layers": 3, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16,
        "vocab_size": 257, "tie_word_embeddings": False,
    }),
}  # fmt: skip
ON_ORT = ("llama llama3", "mistral sliding", "qwen3 sliding", "gemma3")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ring": {},
    "roll": {"sliding": "roll"},
    "join": {"sliding": "join", "full": "join"},
}


@dataclass
class Case:
    """A random model saved as a folder, and what transformers says of it in float64."""

    folder: Path
    ids: list[int]
    logits: np.ndarray
    caches: list[tuple[np.ndarray, np.ndarray]]

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(str(self.folder))


def random_model(model_type: str, fields: dict[str, Any]) -> Any:
    """Weights that keep the activations near 1, so that every part of a layer shows in the logits."""
    config = transformers.AutoConfig.for_model(model_type, **SIZES | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(noise * 0.3 + (0.0 if model_type == "gemma3_text" else 1.0))
            elif "embed" in name:
                weight.copy_(noise * 0.5)
            else:
                weight.copy_(noise * 1.4 * weight.shape[1] ** -0.5)
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    made = {}
    for name, (model_type, fields) in CASES.items():
        model, folder = random_model(model_type, fields), tmp_path_factory.mktemp(model_type)
        model.save_pretrained(folder)
        ids = np.random.default_rng(3).integers(0, model.config.vocab_size, TOKENS).tolist()
        cache = transformers.DynamicCache(config=model.config)
        with torch.inference_mode():
            logits = model.double()(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0].numpy()
        made[name] = Case(folder, ids, logits, [(c.keys[0].numpy(), c.values[0].numpy()) for c in cache.layers])
    return made


def check(session: DecodeSession, case: Case, n: int = 1, floor: float = 105) -> None:
    """Logits at every position and every cache entry."""
    have = feed(session, case.ids, n)
    assert decibels(case.logits, have).min() >= floor
    assert have.std() > 0.5  # logits that say something
    for layer, (keys, values) in enumerate(case.caches):
        positions, my_keys, my_values = session.entries(layer)
        count = min(len(positions), keys.shape[1])
        window = session.spec.caches[layer].window
        assert count >= min(TOKENS, TOKENS if window is None else window - 1)
        assert positions[-count:].tolist() == list(range(TOKENS - count, TOKENS))
        for want, mine in ((keys, my_keys), (values, my_values)):
            for i in range(1, count + 1):
                assert snr_db(want[:, -i], mine[:, -i]) >= floor, f"layer {layer} position {TOKENS - i}"


@pytest.mark.parametrize("name", ON_ORT)
def test_onnx_runtime(cases: dict[str, Case], name: str, tmp_path: Path) -> None:
    with ort_session(cases[name].checkpoint, tmp_path, CONTEXT) as session:
        check(session, cases[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_eager_torch(cases: dict[str, Case], name: str, layout: str) -> None:
    case = cases[name]
    plan = plan_for(case.checkpoint.config)
    chosen = {kind: how for kind, how in LAYOUTS[layout].items() if kind in plan.kinds}
    session = torch_session(case.checkpoint, CONTEXT, (1,) if layout == "roll" else (1, 5, 11), layout=chosen)
    for n in session.buffers:
        check(session, case, n)


@pytest.mark.parametrize("name", CASES)
def test_float64_leaves_no_room_for_a_small_mistake(cases: dict[str, Case], name: str) -> None:
    session = torch_session(cases[name].checkpoint, CONTEXT, (1, 11), dtype="float64")
    # transformers rounds norms, softmax and angles to float32 in a float64 model too.
    for n in (1, 11):
        check(session, cases[name], n, floor=118)


def old_form(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 wrote it: rope_theta, rope_scaling, a pattern, torch_dtype."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types", "dtype")}
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        old |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        old |= {"sliding_window_pattern": old.pop("_sliding_window_pattern")}
        rope = rope["full_attention"]
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    old |= {"torch_dtype": "float32", "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    return old | ({"rope_scaling": None} if scaling["rope_type"] == "default" else {})


@pytest.mark.parametrize("name", CASES)
def test_the_older_form_of_config(cases: dict[str, Case], name: str, tmp_path: Path) -> None:
    case = cases[name]
    old = old_form(json.loads((case.folder / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(old))
    (tmp_path / "model.safetensors").symlink_to(case.folder / "model.safetensors")
    read_back = transformers.AutoConfig.from_pretrained(tmp_path)  # the older form says the same to transformers
    assert read_back.rope_parameters == transformers.AutoConfig.from_pretrained(case.folder).rope_parameters
    session = torch_session(open_checkpoint(str(tmp_path)), CONTEXT)
    assert session.spec == torch_session(case.checkpoint, CONTEXT).spec
    check(session, case)


def test_old_spelling_of_the_rope_type(cases: dict[str, Case]) -> None:
    config = old_form(cases["llama linear"].checkpoint.config)
    spelled = config | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert plan_for(spelled).kinds == plan_for(config).kinds


REQUIRED = ("model_type", "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")


def understood(plan: Plan) -> list[Any]:
    """What a plan takes a config for."""
    with torch.device("meta"):
        layers = {name: plan.layer(kind, Options()) for name, kind in plan.kinds.items()}
    scales = {name: layer.attn.scale for name, layer in layers.items()}  # type: ignore[union-attr]
    return [
        plan.vocab, plan.context, plan.layers, plan.kinds, plan.norm_eps, plan.head, plan.embedding_scale, scales,
        plan.layer_sources(0),
    ]  # fmt: skip


@pytest.mark.parametrize("given", [{}, {"use_sliding_window": True, "max_window_layers": 1}], ids=["", "sliding"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gemma3_text"])
def test_fields_left_out_mean_what_transformers_takes_them_for(model_type: str, given: dict[str, Any]) -> None:
    sizes = {"model_type": model_type, "hidden_size": 64, "intermediate_size": 80, "vocab_size": 257}
    short = {**sizes, "num_hidden_layers": 2, "num_attention_heads": 32, **given}
    assert set(short) - set(given) == set(REQUIRED)
    fields = {k: v for k, v in short.items() if k != "model_type"}
    whole = json.loads(transformers.AutoConfig.for_model(model_type, **fields).to_json_string(use_diff=False))
    assert understood(plan_for(short)) == understood(plan_for(whole))


@pytest.mark.parametrize(
    ("model_type", "field"),
    [(kind, "head_dim") for kind in ("llama", "mistral")]
    + [(kind, "num_key_value_heads") for kind in ("llama", "qwen3")]
    + [(kind, "sliding_window") for kind in ("mistral", "qwen3")],
)
def test_null_means_what_transformers_takes_it_for(model_type: str, field: str) -> None:
    fields = {**SIZES, field: None}
    whole = json.loads(transformers.AutoConfig.for_model(model_type, **fields).to_json_string(use_diff=False))
    assert understood(plan_for({"model_type": model_type, **fields})) == understood(plan_for(whole))
