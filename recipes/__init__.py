"""Recipes: one file an architecture. Looking a recipe up imports torch; listing them does not."""

from __future__ import annotations

import importlib
from typing import Any

from recipes.plan import Config, Plan
from ringstep.errors import RingstepError, did_you_mean

# model_type in config.json -> recipe file.
MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "spark2_5": "spark2_5",
}

SUMMARIES = {
    "llama": "Llama, SmolLM2, Mistral-like; with or without a window",
    "qwen3": "Qwen3 dense: query and key norms",
    "gemma3": "Gemma 3 text: sandwich norms, window pattern",
    "spark2_5": "Spark-X2.5: head-wise gates, window pattern",
}


def plan_for(config: Config) -> Plan:
    """The layers of a checkpoint's config; RingstepError for an architecture without a recipe."""
    model_type: Any = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise RingstepError(
            f"config.json: model_type: {model_type!r} has no recipe{did_you_mean(str(model_type), MODEL_TYPES)}; "
            f"there are {', '.join(MODEL_TYPES)} (see ringstep recipes)"
        )
    plan: Plan = importlib.import_module(f"recipes.{MODEL_TYPES[model_type]}").plan(config)
    return plan
