"""Second moments of output gradients, against gradients by the weights and against what small errors really do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from float_models import N, model_of

from quantize import fake
from quantize.gradients import STATES, Moments, Probes, at_logits, moments
from quantize.model import Model
from quantize.torch_graph import run
from recipes.step import head_sources
from recipes.weights import key
from ringstep.errors import RingstepError


def texts_of(model: Model, count: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, model.plan.vocab, N).tolist() for _ in range(count)]


def linears(model: Model) -> list[str]:
    return [name for layer in range(len(model.plan.layers)) for name, (_, source) in model.sources(layer).items()
            if len(source.out_shape) == 2]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "spark"])
def test_every_linear_has_a_moment_of_its_outputs(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    found = moments(model, texts_of(model, 2), {}, tmp_path)
    assert set(found.files) == set(linears(model))
    assert not (tmp_path / STATES).exists()
    for layer in range(len(model.plan.layers)):
        for weight, (_, source) in model.sources(layer).items():
            moment = found.of(weight)
            if len(source.out_shape) != 2:
                assert moment is None
                continue
            assert moment is not None and moment.shape == (source.out_shape[0],) * 2
            assert torch.equal(moment, moment.T) and float(torch.linalg.eigvalsh(moment).min()) > -1e-2
            assert float(moment.diagonal().mean()) == pytest.approx(1, abs=1e-2)


def test_gradients_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """The trace of a moment is the energy of the output's gradient, here by nudging one output at a time."""
    model = model_of("llama")
    ids = texts_of(model, 1)
    weight = next(n for n in linears(model) if "layers.0" in n and "down_proj" in n)
    hidden = torch.from_numpy(np.stack([last_hidden(model, ids[0], None, 0.0)]))
    back = at_logits(model, hidden.numpy())[0].double()
    moment = moments(model, ids, {}, tmp_path).of(weight)
    assert moment is not None
    gradients = np.zeros((N, len(moment)))
    for token in range(N):
        for output in range(len(moment)):
            up, down = (last_hidden(model, ids[0], (weight, token, output), step) for step in (1e-2, -1e-2))
            gradients[token, output] = float((back * torch.from_numpy((up - down).astype(np.float64))).sum()) / 2e-2
    want = gradients.T @ gradients
    want /= np.diagonal(want).mean()
    assert np.abs(want - moment.numpy()).max() < 0.02 * np.abs(want).max()


def last_hidden(model: Model, ids: list[int], where: tuple[str, int, int] | None, step: float) -> np.ndarray:
    """What enters the head, with `step` added to one linear's output at one token."""
    from quantize.sensitivity import fixed_inputs, floats

    x = torch.from_numpy(model.embedded(ids))
    for layer in range(len(model.plan.layers)):
        block, feeds = model.block(layer), fixed_inputs(model, layer, {})
        outputs = {s.outputs[0]: s.inputs[1] for s in block.steps if s.op == "Gemm"}

        def nudge(name: str, value: torch.Tensor, outputs: dict[str, str] = outputs) -> torch.Tensor:
            if where and outputs.get(name) == where[0]:
                value = value.clone()
                value[where[1], where[2]] += step
            return value

        source = next(n for n in block.inputs if n not in feeds)
        with torch.no_grad():
            x = run(block, feeds | {source: x}, floats(model, layer), nudge)[f"hidden_{layer}"]
    made: np.ndarray = x.numpy()
    return made


def test_the_fisher_part_is_what_kl_grows_by_and_the_signs_what_square_error_does() -> None:
    """At the last hidden state, over many draws: E g g^T of each kind, against finite differences of its loss."""
    model = model_of("llama")
    hidden = last_hidden(model, texts_of(model, 1)[0], None, 0.0)[:1]
    draws = at_logits(model, np.repeat(hidden[None], 4000, 0))
    got = np.stack([g.numpy()[0] for g in draws]).astype(np.float64)
    got = got.T @ got / len(got)
    head, sources = model.head(), head_sources(model.plan)
    weights = {key(s): torch.from_numpy(model.read(s)) for s in sources.values()}
    x = torch.from_numpy(hidden).requires_grad_()
    logits = lambda x: run(head, {head.inputs[0]: x}, weights)["logits"][0]
    jacobian = torch.autograd.functional.jacobian(logits, x)[:, 0].double().numpy()
    p = torch.softmax(logits(x.detach()), -1).double().numpy()
    fisher = jacobian.T @ (np.diag(p) - np.outer(p, p)) @ jacobian
    square = jacobian.T @ jacobian
    # Each draw is scaled to length 1 in both kinds, which moves the mean a little.
    mixed = fisher / np.trace(fisher) + square / np.trace(square)
    assert np.trace(got) == pytest.approx(2, rel=0.05)
    cosine = (got * mixed).sum() / np.linalg.norm(got) / np.linalg.norm(mixed)
    assert cosine > 0.97


def test_weights_of_zero_have_gradients_of_zero(tmp_path: Path) -> None:
    model = model_of("llama")
    silent = dataclasses.replace(model, read=lambda source: np.zeros_like(model.read(source)))
    found = moments(silent, texts_of(model, 2), {}, tmp_path)
    assert found.files and not any(found.of(name).any() for name in found.files)  # type: ignore[union-attr]


def test_probes_change_nothing() -> None:
    model = model_of("llama")
    ids = texts_of(model, 1)[0]
    block = model.block(0)
    plain = fake.logits(model, ids, {}, lambda _: None, None)
    assert np.isfinite(plain).all()
    probes = Probes(block)
    x = torch.randn(3, 5)
    assert probes("no linear's output", x) is x
    name = next(iter(probes.weights))
    assert torch.equal(probes(name, x), x) and set(probes.zeros) == {probes.weights[name]}


def test_gradients_that_are_not_finite_name_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match="tensor w"):
        Moments(tmp_path).keep("w", torch.full((2, 2), torch.nan))
    found = Moments(tmp_path)
    found.keep("zero", torch.zeros(2, 2))
    zero = found.of("zero")
    assert zero is not None and not zero.any()
