"""Reading config.json strictly: what changes the maths and is not supported is refused by its field's name."""

from __future__ import annotations

import math
from typing import Any

from ringstep.contract import RotarySpec
from ringstep.errors import RingstepError

# Fields of known meaning that would change the maths, with the values under which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (False, None),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "mlp_bias": (False, None),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "position_embedding_type": (None, "absolute", "rope"),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1.0),
    "rope_interleaved": (False, None),
    "rope_scaling": (None, {}),
    "use_bidirectional_attention": (False, None),
    "use_qk_norm": (False, None),
}
MAX_LAYERS = 4096  # far beyond any model, and little enough to list
MAX_HEAD_DIM = 1 << 16  # the same; the frequencies are computed before any weight's shape is compared
# Fields that name, train or serve a model but leave its arithmetic alone.
HARMLESS = {
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range",
    "is_llama_config", "label2id", "max_window_layers", "model_type", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "torch_dtype", "transformers.js_config",
    "transformers_version", "use_cache",
}  # fmt: skip


class Fields:
    """A config.json being read: remembers what was read, so that nothing with a meaning is ignored."""

    def __init__(self, config: dict[str, Any], recipe: str) -> None:
        self.config, self.recipe, self.read = config, recipe, set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value, or the default where the field is absent or null."""
        self.read.add(name)
        value = self.config.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low`; RingstepError when missing or otherwise."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 1 << 40:
            raise RingstepError(f"config.json: {name}: {self.shown(value)}; a whole number from {low} on is needed")
        return value

    def layer_count(self) -> int:
        """num_hidden_layers, kept to what can be listed."""
        count = self.whole("num_hidden_layers")
        if count > MAX_LAYERS:
            raise RingstepError(f"config.json: num_hidden_layers: {count}; at most {MAX_LAYERS} are supported")
        return count

    def number(self, name: str, default: float | None = None) -> float:
        """A finite positive number; RingstepError when missing or otherwise."""
        return self.positive(name, self.get(name, default))

    def positive(self, name: str, value: Any) -> float:
        """`value` of the field `name` as a finite positive number; RingstepError otherwise."""
        # The bound keeps whole numbers too long for a float out.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise RingstepError(f"config.json: {name}: {self.shown(value)}; a positive number is needed")
        return float(value)

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """A value out of `allowed`; RingstepError names the field and what this recipe can do."""
        value = self.get(name, default)
        if not any(value == a and type(value) is type(a) for a in allowed):
            choices = ", ".join(repr(a) for a in allowed)
            raise RingstepError(
                f"config.json: {name}: {self.shown(value)} is not supported by recipe {self.recipe} (only {choices})"
            )
        return value

    def ignore(self, name: str) -> None:
        """Mark a field as read although its value has no effect here."""
        self.read.add(name)

    def divides(self, name: str, heads: int, kv_heads: int) -> None:
        """Refuse head counts that do not group evenly."""
        if heads % kv_heads:
            raise RingstepError(f"config.json: {name}: {heads} heads do not divide by {kv_heads} kv heads")

    def window(self) -> int | None:
        """sliding_window: null, or how many tokens a query sees, the current one included (at least 2)."""
        return None if self.get("sliding_window") is None else self.whole("sliding_window", low=2)

    def layer_types(self, count: int, default: list[str]) -> tuple[str, ...]:
        """`layer_types` as "sliding" and "full", one a layer."""
        types = self.get("layer_types", default)
        names = {"sliding_attention": "sliding", "full_attention": "full"}
        if not isinstance(types, list) or len(types) != count:
            raise RingstepError(f"config.json: layer_types: needs one entry for each of {count} layers")
        for entry in types:
            if not isinstance(entry, str) or entry not in names:
                raise RingstepError(
                    f"config.json: layer_types: {self.shown(entry)} is not supported by recipe {self.recipe} "
                    f"(only {', '.join(names)})"
                )
        return tuple(names[entry] for entry in types)

    def needs_window(self, layers: tuple[str, ...], window: int | None) -> None:
        """Refuse sliding layers without a window."""
        if "sliding" in layers and window is None:
            raise RingstepError("config.json: sliding_window: missing, although layer_types has sliding_attention")

    def rope_by_type(
        self, layers: tuple[str, ...], thetas: dict[str, float] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Rope parameters for each layer type: rope_parameters keyed by type, or rope_theta (+ rope_scaling)."""
        parameters, scaling, theta = self.object("rope_parameters"), {}, None
        if thetas is not None:  # a recipe without defaults knows no older form
            scaling, theta = self.object("rope_scaling"), self.get("rope_theta")
        if parameters and scaling:
            raise RingstepError("config.json: rope_scaling: given beside rope_parameters, which is its newer form")
        found = {}
        for kind in dict.fromkeys(layers):
            own = {"rope_theta": thetas[kind]} if thetas else {}
            if parameters or thetas is None:
                rope = parameters.get(f"{kind}_attention")
                if not isinstance(rope, dict):
                    raise RingstepError(f"config.json: rope_parameters.{kind}_attention: missing, or no object")
            elif kind == "full":
                rope = scaling | ({} if theta is None else {"rope_theta": theta})
            else:
                rope = {}
            found[kind] = own | rope
        return found

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object, {} where the field is absent or null."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise RingstepError(f"config.json: {name}: {self.shown(value)}; an object is needed")
        return value

    @staticmethod
    def shown(value: Any) -> str:
        """The value for an error message, kept to one short line."""
        return "missing" if value is None else repr(value)[:80]

    def finish(self) -> tuple[str, ...]:
        """Refuse known fields that would change the maths; return warnings for fields nobody here knows."""
        warnings = []
        for name, value in self.config.items():
            if name in self.read or name in HARMLESS:
                continue
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise RingstepError(
                        f"config.json: {name}: {self.shown(value)} changes the model's arithmetic and recipe "
                        f"{self.recipe} does not implement it"
                    )
            elif value not in (None, False, [], {}, ""):
                warnings.append(f"config.json: {name}: {self.shown(value)} is unknown here and was not used")
        return tuple(warnings)


def rotary(
    fields: Fields, name: str, head_dim: int, rope: dict[str, Any], theta: float | None = None, *, partial: bool = False
) -> RotarySpec:
    """A RotarySpec from rope parameters: types default, linear, llama3; RingstepError for any other.

    `partial` is for models that rotate a part of each head; the others ignore the factor, so it must be 1.

    The formulas are those of transformers' modeling_rope_utils; llama3 interpolates between scaled and plain
    frequencies by wavelength.
    """
    where = f"config.json: rope_parameters ({name})"
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = {"default": set(), "linear": {"factor"}, "llama3": {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}}  # fmt: skip
    if not isinstance(kind, str) or kind not in known:
        raise RingstepError(f"{where}: rope_type {fields.shown(kind)} is not supported (only {', '.join(known)})")
    extra = set(rope) - known[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    # A factor of 1 under the default type, and an original length it does not use, are left by some exporters.
    extra -= {"original_max_position_embeddings"} | ({"factor"} if rope.get("factor") in (1, 1.0) else set())
    if extra:
        raise RingstepError(f"{where}: {sorted(extra)[0]} is not a parameter of rope_type {kind!r}")

    def number(key: str, default: float | None = None) -> float:
        return fields.positive(f"rope_parameters ({name}).{key}", rope.get(key, default))

    base = number("rope_theta", theta)
    share = number("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if share != 1 and not partial:
        raise RingstepError(f"{where}.partial_rotary_factor: {share}; recipe {fields.recipe} rotates whole heads")
    if head_dim > MAX_HEAD_DIM:
        raise RingstepError(f"config.json: head_dim: {head_dim}; at most {MAX_HEAD_DIM} is supported")
    dims = int(head_dim * share)
    if dims % 2 or not 2 <= dims <= head_dim:
        raise RingstepError(f"{where}.partial_rotary_factor: rotates {dims} of {head_dim} dims; needs an even part")
    # float32 powers as transformers computes them: the angles at large positions depend on the last bit.
    import numpy as np

    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    with np.errstate(all="ignore"):  # refused below
        freqs = (np.float32(1.0) / np.power(np.float32(base), exponents, dtype=np.float32)).astype(np.float32)
    if kind == "linear":
        with np.errstate(all="ignore"):
            freqs = (freqs / np.float32(number("factor"))).astype(np.float32)
    elif kind == "llama3":
        factor, low, high = number("factor"), number("low_freq_factor"), number("high_freq_factor")
        original = number("original_max_position_embeddings")
        if low >= high:
            raise RingstepError(f"{where}: low_freq_factor must be below high_freq_factor")
        with np.errstate(all="ignore"):
            wavelength = 2 * math.pi / freqs.astype(np.float64)
            smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
            freqs = ((1 - smooth) * freqs / factor + smooth * freqs).astype(np.float32)
    if not np.isfinite(freqs).all():
        raise RingstepError(f"{where}: rope_theta {base} and its scaling give frequencies that are not finite")
    return RotarySpec(name, tuple(float(f) for f in freqs), 1.0, base, kind)


def flat_rope(fields: Fields, default_theta: float = 10000.0) -> tuple[dict[str, Any], float]:
    """The one rope of a model without layer types: `rope_parameters`, or `rope_theta` + `rope_scaling`."""
    theta = fields.number("rope_theta", default_theta)
    scaling, parameters = fields.object("rope_scaling"), fields.object("rope_parameters")
    if parameters and scaling:
        raise RingstepError("config.json: rope_scaling: given beside rope_parameters, which is its newer form")
    return parameters or scaling, theta
