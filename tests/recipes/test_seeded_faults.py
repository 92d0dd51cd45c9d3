"""Small mistakes, planted one at a time: the comparison with Spark's golden must see every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from recipe_runs import decibels, feed, torch_session

import recipes.blocks
import ringstep.session
from recipes.blocks import Attention
from ringstep.checkpoint import Checkpoint
from ringstep.session import DecodeSession
from ringstep.slots import held_positions, visible, writes

Golden = dict[str, np.ndarray]
Patch = pytest.MonkeyPatch


def later_slot(patch: Patch) -> None:
    """New ring entries land one slot further on."""

    def shifted(kind: str, length: int, position: int, count: int) -> list[tuple[int, int, int]]:
        return writes(kind, length, position + (kind == "ring"), count)  # type: ignore[arg-type]

    patch.setattr(ringstep.session, "writes", shifted)


def held_too_long(patch: Patch) -> None:
    """The mask is made for a ring that is one token behind."""
    patch.setattr(ringstep.session, "held_positions", lambda k, n, p: held_positions(k, n, max(0, p - (k == "ring"))))


def wide_mask(patch: Patch) -> None:
    """A window of one token too many."""
    patch.setattr(ringstep.session, "visible", lambda h, p, n, w: visible(h, p, n, w and w + 1))


def narrow_mask(patch: Patch) -> None:
    """A window of one token too few."""
    patch.setattr(ringstep.session, "visible", lambda h, p, n, w: visible(h, p, n, w and w - 1))


def no_window(patch: Patch) -> None:
    """Sliding layers see everything they hold."""
    patch.setattr(ringstep.session, "visible", lambda h, p, n, w: visible(h, p, n, None))


def no_causality(patch: Patch) -> None:
    """A chunk's queries see the tokens after them."""

    def seen(held: np.ndarray, position: int, n: int, window: int | None) -> np.ndarray:
        found = visible(held, position, n, window)
        found[:, len(held) :] = True
        return found

    patch.setattr(ringstep.session, "visible", seen)


def turned_sine(patch: Patch) -> None:
    """Rotary turns the other way."""
    right = recipes.blocks.rotate
    patch.setattr(recipes.blocks, "rotate", lambda x, cos, sin: right(x, cos, -sin))


def adjacent_pairs(patch: Patch) -> None:
    """Rotary pairs dims (2 i, 2 i + 1) instead of halves."""
    right = recipes.blocks.rotate

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        dims = 2 * cos.shape[-1]
        order = torch.cat([torch.arange(0, dims, 2), torch.arange(1, dims, 2), torch.arange(dims, x.shape[-1])])
        return right(x[..., order], cos, sin)[..., torch.argsort(order)]

    patch.setattr(recipes.blocks, "rotate", rotate)


def full_rotation(patch: Patch) -> None:
    """The dims that should pass through are turned with the rest."""

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        times = x.shape[-1] // 2 // cos.shape[-1]
        return recipes_rotate(x, cos.repeat(1, times), sin.repeat(1, times))

    recipes_rotate = recipes.blocks.rotate
    patch.setattr(recipes.blocks, "rotate", rotate)


def swapped_kv_heads(patch: Patch) -> None:
    """Queries look at the other group's keys and values."""
    right = Attention.by_head

    def by_head(self: Attention, x: torch.Tensor, heads: int, norm: Any) -> torch.Tensor:
        found = right(self, x, heads, norm)
        # One token's heads lie in [1, kv_heads, group, head_dim], a chunk's in [heads, n, head_dim].
        return found.flip(1 if found.dim() == 4 else 0) if heads == self.kv_heads else found

    patch.setattr(Attention, "by_head", by_head)


def wrong_gate(patch: Patch) -> None:
    """The gate's sigmoid is left out."""
    patch.setattr(recipes.blocks, "sigmoid", lambda x, accurate: torch.ones_like(x))


def padding_written(patch: Patch) -> None:
    """The padding of a short chunk is stored too."""
    patch.setattr(ringstep.session, "writes", lambda k, length, p, count: writes(k, length, p, 5))


EARLY = {
    # fault: the first position at which it must show, tokens a chunk, layout
    later_slot: (1, 1, "ring"),
    held_too_long: (1, 1, "ring"),
    wide_mask: (16, 5, "ring"),
    narrow_mask: (15, 1, "ring"),
    no_window: (16, 1, "append"),
    no_causality: (0, 5, "ring"),
    turned_sine: (1, 1, "ring"),
    adjacent_pairs: (1, 1, "ring"),
    full_rotation: (1, 1, "ring"),
    swapped_kv_heads: (0, 1, "ring"),
    wrong_gate: (0, 1, "ring"),
    padding_written: (15, 3, "ring"),
}


def session(spark: Checkpoint, n: int, layout: str) -> DecodeSession:
    graphs = (5,) if n > 1 else (1,)
    return torch_session(spark, 64, graphs, layout={"sliding": layout})


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("layout", ["ring", "append"])
def test_nothing_planted_nothing_seen(spark: Checkpoint, golden: Golden, n: int, layout: str) -> None:
    assert decibels(golden["logits"], feed(session(spark, n, layout), golden["input_ids"], n)).min() >= 105


@pytest.mark.parametrize("fault", EARLY, ids=lambda f: f.__name__)
def test_seen(spark: Checkpoint, golden: Golden, monkeypatch: Patch, fault: Callable[[Patch], None]) -> None:
    first, n, layout = EARLY[fault]
    with monkeypatch.context() as patch:
        fault(patch)
        have = feed(session(spark, n, layout), golden["input_ids"], n)
    found = decibels(golden["logits"], have)
    assert found.min() < 60
    assert np.median(found[first + 8 :]) < 60
    assert (found[:first] >= 105).all()  # and not before it could


def test_heads_grouped_in_another_order_are_seen(spark: Checkpoint, golden: Golden) -> None:
    """Head h reads kv head h % 2 instead of h // 2: what a repeat in place of a repeat_interleave does."""
    made = session(spark, 1, "ring")
    for layer in made.engine.step.layers:  # type: ignore[attr-defined]
        attn = layer.attn
        order = [0, 2, 1, 3]  # slots 0 and 1 read kv head 0: put heads 0 and 2 there
        rows = torch.cat([torch.arange(attn.head_dim) + h * attn.head_dim for h in order])
        attn.q_proj.weight.data = attn.q_proj.weight.data[rows]
        attn.g_proj.weight.data = attn.g_proj.weight.data[order]
        attn.o_proj.weight.data = attn.o_proj.weight.data[:, rows]
    assert decibels(golden["logits"], feed(made, golden["input_ids"])).max() < 60


def test_a_stale_cache_is_seen(spark: Checkpoint, golden: Golden) -> None:
    made = session(spark, 1, "ring")
    feed(made, golden["input_ids"])
    before = made.caches[0, "key"].copy()
    made.reset()
    made.position, made.caches[0, "key"][:] = 20, before
    have = made.step(golden["input_ids"][20:])
    assert decibels(golden["logits"][20:], have).max() < 60
