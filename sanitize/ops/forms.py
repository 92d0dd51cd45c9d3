"""What `ringstep ops` measures: operators and forms of functions as small graphs, their truth and their inputs.

A form is named FUNCTION/VARIANT, such as SiLU/newton; a plain operator by its ONNX name alone. Cases of one shape are
stacked along the first axis, so every form works on each row (or batch entry) alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

Array = np.ndarray[Any, np.dtype[Any]]
Build = Callable[..., str]
Exact = Callable[..., Array]

SAMPLES = 1024
ROWS = 16
EDGES = (-60000.0, -1000.0, -100.0, -40.0, -17.0, -8.0, -4.0, -1.0, 1.0, 4.0, 8.0, 40.0, 1000.0, 60000.0)
POSITIVE = (6.2e-5, 1e-3, 0.03, 1.0, 8.0, 40.0, 1000.0, 60000.0)
ANGLES = (-1000.0, -100.0, -40.0, -8.0, -1.0, 1.0, 8.0, 40.0, 100.0, 1000.0)
# Calibration hands a16 kernels ranges that hold zero, so those nest where fp16's intervals lie side by side.
A16_SPANS = ((-1.0, 1.0), (-4.0, 4.0), (-8.0, 8.0), (-16.0, 16.0), (-40.0, 40.0), (-200.0, 200.0))
A16_NEGATIVE = ((-4.0, 0.0), (-8.0, 0.0), (-17.0, 0.0), (-40.0, 0.0), (-200.0, 0.0), (-1000.0, 0.0))
A16_POSITIVE = ((0.01, 1.0), (0.01, 8.0), (0.01, 40.0), (0.01, 1000.0))
SPREADS = (1.0, 4.0, 16.0, 64.0)
# HTP's Exp is right between passes.forms.EXP_LOW and this.
EXP_HIGH = 10.5
LAST = np.array([-1])


class Ops:
    """Collects the nodes of a form: op.Exp(x) adds one and returns its output's name; numbers become initializers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def __getattr__(self, kind: str) -> Callable[..., str]:
        def add(*inputs: str | float | Array, **attributes: Any) -> str:
            name = f"{kind}_{len(self.nodes)}"
            names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
            self.nodes.append(onnx.helper.make_node(kind, names, [name], name=name, **attributes))
            return name

        return add

    def constant(self, value: float | Array) -> str:
        """Add an initializer: int64 arrays stay, everything else is a float of the graph's type."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name


@dataclass(frozen=True)
class Case:
    """Inputs over one interval. `size` is the length a reduction or product runs over, 1 for elementwise forms."""

    low: float
    high: float
    size: int
    inputs: tuple[Array, ...]


@dataclass(frozen=True)
class Form:
    """A graph, what it should compute, and the inputs it is measured on."""

    name: str
    build: Build
    """(op, *input names) to the output's name."""
    exact: Exact
    """The function in float64."""
    cases: tuple[Case, ...]
    """For fp16; none: the form is not measured in it."""
    a16_cases: tuple[Case, ...]
    signed: tuple[int, ...] = ()
    """Inputs that a16 holds in symmetric int16; the others are uint16."""


def sample(low: float, high: float, count: int = SAMPLES) -> Array:
    """Points of an interval: evenly spaced, or by their ratio where it does not hold zero."""
    if low <= 0.0 <= high:
        return np.linspace(low, high, count)
    return np.sign(low) * np.geomspace(abs(low), abs(high), count)


def steps(edges: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """Neighbouring edges as intervals."""
    return tuple(itertools.pairwise(edges))


def elementwise(spans: Iterable[tuple[float, float]]) -> tuple[Case, ...]:
    """One case an interval, x [1, SAMPLES]."""
    return tuple(Case(low, high, 1, (sample(low, high)[None],)) for low, high in spans)


def quotients(spans: Iterable[tuple[float, float]]) -> tuple[Case, ...]:
    """Numerators of -8..8 over divisors of the interval."""
    numerators = np.random.default_rng(1).uniform(-8.0, 8.0, (1, SAMPLES))
    return tuple(Case(low, high, 1, (numerators, sample(low, high)[None])) for low, high in spans)


def rows(sizes: Iterable[int], spreads: Iterable[float], masked: bool = False) -> tuple[Case, ...]:
    """Normal values three sigma within the spread, ROWS rows; masked: -10000 added to the last third as well."""
    cases = []
    random = np.random.default_rng(2)
    for size in sizes:
        for spread in spreads:
            x = np.clip(random.standard_normal((ROWS, size)) * spread / 3.0, -spread, spread)
            cases.append(Case(-spread, spread, size, (x,)))
        if masked:
            x = np.clip(random.standard_normal((ROWS, size)) * 3.0, -9.0, 9.0)
            x[:, -(size // 3) :] -= 10000.0
            cases.append(Case(-10000.0, 9.0, size, (x,)))
    return tuple(cases)


def products(sizes: Iterable[int], spreads: Iterable[float], image: bool = False) -> tuple[Case, ...]:
    """x [1, ROWS, size] and y [1, size, 64], both of the spread; image: x [1, size, 8, 8] alone."""
    cases = []
    random = np.random.default_rng(3)
    for size in sizes:
        for spread in spreads:
            draw = lambda *shape: np.clip(random.standard_normal(shape) * spread / 3.0, -spread, spread)  # noqa: B023
            inputs = (draw(1, size, 8, 8),) if image else (draw(1, ROWS, size), draw(1, size, 64) / spread)
            cases.append(Case(-spread, spread, size, inputs))
    return tuple(cases)


@functools.cache
def weights(size: int, columns: int) -> Array:
    """[size, columns], multiples of 1/128 below 1: exact in fp16 and in 8 bits."""
    return np.random.default_rng(size).integers(-127, 128, (size, columns)) / 128.0


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return np.exp(-np.logaddexp(0.0, -x))


def gelu(x: Array) -> Array:
    """x times the normal CDF."""
    return 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2.0))


def gelu_tanh(x: Array) -> Array:
    """GELU's tanh form; 0.5 (1 + tanh(u)) = sigmoid(2 u)."""
    return x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


def softmax(x: Array) -> Array:
    """Over the last dim."""
    weights = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def log_softmax(x: Array) -> Array:
    """Over the last dim."""
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
