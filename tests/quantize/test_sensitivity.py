"""What each linear's rounding adds to the logits, against rounding it alone and comparing the logits."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import N, model_of

from quantize import fake
from quantize.auto import choose
from quantize.grid import Grid
from quantize.rounding import nearest
from quantize.sensitivity import noise


def test_the_estimate_is_what_rounding_alone_does() -> None:
    model = model_of("llama")
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, model.plan.vocab, N).tolist() for _ in range(96)]
    names = {name: source for layer in range(len(model.plan.layers)) for name, (_, source) in
             model.sources(layer).items() if len(source.out_shape) == 2}  # fmt: skip
    rounded = {name: nearest.quantise(model.read(source), Grid(8)).dequantised() for name, source in names.items()}
    estimated, signal = noise(model, texts, {}, rounded.get)
    assert set(estimated) == set(names)
    some = texts[:6]
    truth = [fake.logits(model, ids, {}, lambda _: None, None) for ids in some]
    assert signal == pytest.approx(np.mean([np.square(t).sum() for t in truth]), rel=0.2)
    measured = {}
    for name in names:
        only = lambda n, name=name: rounded[name] if n == name else None
        measured[name] = np.mean([np.square(fake.logits(model, ids, {}, only, None) - t).sum()
                                  for ids, t in zip(some, truth, strict=True)])  # fmt: skip
    # A sample is a square of a normal number: 96 of them are within a factor of two of their mean.
    for name in names:
        assert 0.5 < estimated[name] / measured[name] < 2, name


def test_a_linear_that_stays_in_float_adds_nothing() -> None:
    model = model_of("llama")
    texts = [list(range(N))]
    estimated, _ = noise(model, texts, {}, lambda name: None)
    assert estimated == {}


def test_the_best_by_the_byte_come_first_until_the_goal() -> None:
    noises, sizes = {"a": 4.0, "b": 4.0, "c": 1.0, "d": 0.5}, {"a": 100, "b": 10, "c": 10, "d": 10}
    chosen = choose(noises, sizes, 4, 8, 10.0, 13.0, None)
    assert [p.path for p in chosen] == ["b", "c"]
    # 5 of 9.5 are taken out, all but a 256th.
    assert chosen[-1].db == pytest.approx(10 - 10 * np.log10(1 - (1 - 1 / 256) * 5 / 9.5))
    assert sum(p.noise for p in chosen) == pytest.approx(5 / 9.5)
    assert [p.path for p in choose(noises, sizes, 4, 8, 10.0, None, 25)] == ["b", "c"]
    assert [p.path for p in choose(noises, sizes, 4, 8, 10.0, None, 115)] == ["b", "c", "d"]
    assert choose(noises, sizes, 4, 8, 14.0, 13.0, None) == []
    assert len(choose(noises, sizes, 4, 8, 10.0, 99.0, None)) == 4
