"""The accurate forms, in float64, against the exact functions: how far they are off by themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recipes.blocks import EXP_LOW, gelu, reciprocal, sigmoid, silu

X = torch.linspace(-30, 30, 600_001, dtype=torch.float64)


def exact_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.special.erfc(-x / math.sqrt(2.0))


def tanh_gelu(x: Tensor) -> Tensor:
    # 0.5 (1 + tanh u) cancels below -5; sigmoid(2 u) is the same number without it.
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


Form = Callable[[Tensor], Tensor]
FORMS: dict[str, tuple[Form, Form, float]] = {
    # the accurate form, the exact one, the largest absolute error on [-30, 30]
    "sigmoid": (lambda x: sigmoid(x, True), torch.sigmoid, 1e-15),
    "silu": (lambda x: silu(x, True), lambda x: x * torch.sigmoid(x), 1e-14),
    "gelu exact": (lambda x: gelu(x, "exact", True), exact_gelu, 4.2e-5),
    "gelu tanh": (lambda x: gelu(x, "tanh", True), tanh_gelu, 1e-11),
    "gelu sigmoid": (lambda x: gelu(x, "sigmoid", True), lambda x: x * torch.sigmoid(1.702 * x), 1e-14),
}


@pytest.mark.parametrize("name", FORMS)
def test_accurate_forms(name: str) -> None:
    form, exact, bound = FORMS[name]
    error = (form(X) - exact(X)).abs()
    assert torch.isfinite(error).all()
    assert error.max() <= bound


def test_the_fit_of_exact_gelu_over_normal_inputs() -> None:
    x = torch.randn(1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    want = exact_gelu(x)
    noise = (gelu(x, "exact", True) - want).square().sum()
    assert 10 * torch.log10(want.square().sum() / noise) >= 95


@pytest.mark.parametrize("name", FORMS)
def test_native_forms_are_the_exact_ones(name: str) -> None:
    kind, _, form = name.partition(" ")
    native = {"sigmoid": sigmoid, "silu": silu}.get(kind)
    have = native(X, False) if native else gelu(X, form, False)
    torch.testing.assert_close(have, FORMS[name][1](X), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", FORMS)
def test_float16_stays_finite_over_its_whole_range(name: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every[torch.isfinite(every)]
    have, exact = FORMS[name][0](x), FORMS[name][1](x.double())
    near = x.abs() <= 30
    assert torch.isfinite(have).all()
    assert ((have - exact)[near].abs() <= 0.002 * exact[near].abs() + 1e-3).all()


def test_exp_argument_stays_where_the_chip_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    exp = torch.exp
    monkeypatch.setattr(torch, "exp", lambda x: seen.append(x) or exp(x))
    for form, _, _ in FORMS.values():
        form(torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4], dtype=torch.float64))
    assert len(seen) == len(FORMS)
    assert all(x.min() >= EXP_LOW and x.max() <= 0 for x in seen)


def test_reciprocal() -> None:
    x = torch.tensor([-3.0, 0.25, 512.0], dtype=torch.float64)
    assert torch.equal(reciprocal(x, True), reciprocal(x, False))
