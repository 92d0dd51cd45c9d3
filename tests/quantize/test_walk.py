"""The layer loop in float against transformers, and against Spark's golden logits."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from float_models import SPARK, N, checkpoint_of, model_of, with_read
from safetensors.numpy import load_file

from quantize.fake import logits
from quantize.model import table_of
from quantize.walk import prefix_through, through
from recipes import plan_for
from ringstep.errors import RingstepError

NAMES = ("llama", "qwen3", "gemma3")
TOKENS = 40  # gemma3's window is 8: five of them


@dataclass
class Truth:
    """What transformers computes in float64."""

    ids: list[int]
    logits: np.ndarray
    hidden: list[np.ndarray]
    """Behind the embedding and each layer but the last."""
    entries: dict[tuple[int, str], np.ndarray]
    """[kv_heads, tokens, head_dim]"""


@functools.cache
def truth(name: str, seed: int = 3) -> Truth:
    checkpoint = checkpoint_of(name)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=torch.float64, attn_implementation="eager"
    )
    ids = np.random.default_rng(seed).integers(0, model.config.vocab_size, TOKENS).tolist()
    cache = transformers.DynamicCache()  # without a config it keeps every position
    with torch.inference_mode():
        made = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, output_hidden_states=True)
    entries = {}
    for layer, own in enumerate(cache.layers):
        entries[layer, "key"], entries[layer, "value"] = own.keys[0].numpy(), own.values[0].numpy()
    hidden = [h[0].numpy() for h in made.hidden_states[:-1]]
    return Truth(ids, made.logits[0].numpy(), hidden, entries)


def close(have: np.ndarray, want: np.ndarray, within: float = 1e-4) -> None:
    assert have.shape == want.shape
    assert np.abs(have - want).max() <= within * np.abs(want).max()


def walked(name: str, ids: list[int], entries: Any) -> np.ndarray:
    return logits(model_of(name), ids, entries, lambda _: None, None)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    want = truth(name)
    close(walked(name, want.ids, {}), want.logits)
    # Not a whole number of chunks: the last one is padded.
    close(walked(name, want.ids[:19], {}), want.logits[:19])


def test_spark_against_its_golden() -> None:
    golden = load_file(SPARK / "golden.safetensors")
    close(walked("spark", golden["input_ids"].tolist(), {}), golden["logits"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 3])
def test_a_prefix_in_the_place_of_its_tokens(name: str, count: int) -> None:
    """Layer by layer: the entries that the prefix leaves, and what follows it."""
    model, want = model_of(name), truth(name)
    first, rows = model.embedded(want.ids[:count]), model.embedded(want.ids[count:])
    close(first, want.hidden[0][:count])
    every = {}
    for layer in range(len(model.plan.layers)):
        session, _ = model.open_layer(layer)
        first, entries = prefix_through(session, first)
        assert list(entries) == [(layer, "key"), (layer, "value")]
        for key, array in entries.items():
            close(array[0], want.entries[key][:, :count])
        rows = through(session, rows, entries)
        assert session.position == TOKENS
        if layer + 1 < len(want.hidden):
            close(first, want.hidden[layer + 1][:count])
            close(rows, want.hidden[layer + 1][count:])
        for i, what in enumerate(("key", "value"), 1):
            held, array = session.entries(0)[0], session.entries(0)[i]
            close(array, want.entries[layer, what][:, held])
        every |= entries
    close(walked(name, want.ids[count:], every), want.logits[count:])


def test_one_session_walks_many_texts() -> None:
    """Nothing of a text is left for the next one."""
    model = model_of("gemma3")
    session, _ = model.open_layer(0)
    texts = [model.embedded(truth("gemma3", seed).ids) for seed in (3, 4)]
    alone = [through(model.open_layer(0)[0], rows, None) for rows in texts]
    for rows, want in [*zip(texts, alone, strict=True)] * 2:
        np.testing.assert_array_equal(through(session, rows, None), want)


@pytest.mark.parametrize("name", [*NAMES, "spark"])
def test_blocks_hold_all_of_the_graph(name: str) -> None:
    """Every node belongs to one block, every parameter too, and layers hand on nothing but the hidden state."""
    model = model_of(name)
    blocks = [model.block(layer) for layer in range(len(model.plan.layers))]
    inside = [step.name for block in (*blocks, model.head()) for step in block.steps]
    outside = {str(node.name) for node in model.graph} - set(inside)
    assert len(inside) == len(set(inside)) and all(node.startswith("/embed/") for node in outside)
    for layer, block in enumerate(blocks):
        sources = model.sources(layer)
        assert set(block.weights) == set(sources)
        assert sorted(path for path, _ in sources.values()) == sorted(
            f"layers.{layer}.{path.removesuffix('.weight')}" for path in model.plan.layer_sources(layer)
        )
        foreign = [n for n in block.inputs if not n.startswith(("past_", "cos_", "sin_", "mask_"))]
        assert len(foreign) == 1 and (not layer or foreign == [f"hidden_{layer - 1}"])
        assert block.outputs[0] == f"hidden_{layer}" and all(n.endswith(f"_{layer}") for n in block.outputs)
    assert model.n == N


def test_rows_of_the_table() -> None:
    """In the order asked for, with doubles, from anywhere; scaled where the architecture scales."""
    for name in (*NAMES, "spark"):
        checkpoint, model = checkpoint_of(name), model_of(name)
        plan = plan_for(checkpoint.config)
        whole = np.asarray(checkpoint.read(plan.embedding.name, None)).astype(np.float32)
        ids = [5, 4, 3, 3, len(whole) - 1, 0, 17, 5]
        np.testing.assert_array_equal(table_of(checkpoint, plan)(np.array(ids)), whole[ids])
        np.testing.assert_array_equal(model.embedded(ids), whole[ids] * np.float32(plan.embedding_scale))
    assert plan_for(checkpoint_of("gemma3").config).embedding_scale == 8.0


def spoiled(at: tuple[int, ...], value: float) -> Any:
    def change(values: np.ndarray) -> np.ndarray:
        made = values.copy()
        made[at] = value
        return made

    return change


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "at"),
    [("model.layers.1.mlp.down_proj.weight", (3, 5)), ("model.layers.0.input_layernorm.weight", (7,))],
)
def test_a_weight_that_is_not_finite_is_named(name: str, at: tuple[int, ...], value: float) -> None:
    model = with_read(model_of("llama"), name, spoiled(at, value))
    with pytest.raises(RingstepError, match=f"tensor {name}.*not finite") as caught:
        for layer in range(2):
            model.open_layer(layer)
    assert "\n" not in str(caught.value)


def test_large_weights_are_finite() -> None:
    """Their sum passes float32's range; each of them does not."""
    model = with_read(model_of("llama"), "model.norm.weight", lambda w: np.full_like(w, 3e38))
    assert model.weight("model.norm.weight", model.plan.norm).max() == np.float32(3e38)


def test_a_table_row_that_is_not_finite_is_named() -> None:
    model = model_of("llama")
    table = lambda ids: np.where(ids[:, None] == 9, np.nan, model.table(ids)).astype(np.float32)
    bad = dataclasses.replace(model, table=table)
    bad.embedded([1, 2])
    with pytest.raises(RingstepError, match=r"tensor model\.embed_tokens\.weight.*not finite"):
        bad.embedded([1, 9])
