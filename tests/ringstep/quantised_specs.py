"""Quantised contracts for tests, and an engine that turns their integers into a float engine's numbers and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ringstep.contract import CacheSpec, EmbeddingSpec, Encoding, StepSpec, TensorSpec
from ringstep.engines.base import Arrays, Engine

MASK = 65535 / 4
# Every number that the tests put into these roles lies on the grid, so that nothing is lost on the way.
ACTIVATIONS = {
    "cos": Encoding(2.0**-15, 32768), "sin": Encoding(2.0**-15, 32768), "mask": Encoding(0.25, 65535),
    "embedding": Encoding(0.25, 9), "logits": Encoding(1 / 64, 7),
}  # fmt: skip
CACHES = {
    "uint8": (Encoding(1.0, 3), Encoding(0.5, 100)), "int8": (Encoding(1.0, -100), Encoding(1.0, -5)),
    "uint16": (Encoding(0.5, 32768), Encoding(0.25, 1)), "int16": (Encoding(0.5, 0), Encoding(0.125, -77)),
}  # fmt: skip


def quantised(spec: StepSpec, cache: Any = "uint8", halve: bool = False) -> StepSpec:
    """A float contract in integers: activations uint16, caches of type `cache`, keys and values apart.

    `halve` halves the caches' scales from layer to layer.
    """

    def tensor(own: TensorSpec) -> TensorSpec:
        if own.dtype == "int32":
            return own
        if own.layer is not None:
            base = CACHES[cache][own.role.startswith("value")]
            dtype = cache
            made = Encoding(base.scale * 2.0 ** (-own.layer * halve), base.zero)
        else:
            dtype, made = "uint16", ACTIVATIONS[own.role]
        return dataclasses.replace(own, dtype=dtype, encoding=made)

    tensors = lambda every: tuple(tensor(own) for own in every)
    graphs = tuple(dataclasses.replace(g, inputs=tensors(g.inputs), outputs=tensors(g.outputs)) for g in spec.graphs)
    caches: tuple[CacheSpec, ...] = tuple(dataclasses.replace(c, dtype=cache) for c in spec.caches)
    embedding = spec.embedding
    if embedding:
        size = spec.vocab * spec.hidden
        embedding = EmbeddingSpec(embedding.file, 64, embedding.shape, "int8", 64 + size + -size % 64)
    return dataclasses.replace(
        spec, dtype="uint16", mask_value=-MASK, caches=caches, graphs=graphs, embedding=embedding
    )


def real(tensor: TensorSpec, values: np.ndarray) -> np.ndarray:
    """What integers stand for, in float64; the test's own arithmetic."""
    if tensor.encoding is None:
        return values
    assert values.dtype == tensor.dtype
    return tensor.encoding.scale * (values.astype(np.float64) - tensor.encoding.zero)


def stored(tensor: TensorSpec, values: np.ndarray) -> np.ndarray:
    """The integers that stand for `values`, which must lie on the grid."""
    if tensor.encoding is None:
        return values
    exact = values / tensor.encoding.scale + tensor.encoding.zero
    assert np.abs(exact - np.rint(exact)).max() < 1e-6
    assert (np.rint(exact).astype(tensor.dtype) == np.rint(exact)).all()
    return np.rint(exact).astype(tensor.dtype)


class InIntegers:
    """Runs a float engine behind integer inputs and outputs."""

    name = "integers"

    def __init__(self, spec: StepSpec, inner: Engine) -> None:
        self.inner = inner
        self.tensors = {g.n: {t.name: t for t in (*g.inputs, *g.outputs)} for g in spec.graphs}

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        own = self.tensors[n]
        floats = {name: np.zeros(array.shape) for name, array in outputs.items()}
        self.inner.run(n, {name: real(own[name], array) for name, array in inputs.items()}, floats)
        for name, array in outputs.items():
            array[...] = stored(own[name], floats[name])

    def close(self) -> None:
        self.inner.close()
