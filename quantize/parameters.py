"""The parameters of a plan by path: what schemes, size tables and formats call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from quantize.grid import Grid, QuantisedWeight
from quantize.scheme import EMBEDDING, HEAD
from recipes.plan import Plan, Source

NORM = "norm"

GridOf = Callable[[str], Grid | None]
"""The grid of a parameter by path; None: it stays in float."""
WeightOf = Callable[[str], QuantisedWeight]
"""A quantised weight by path, made or read when it is asked for."""
Pieces = Callable[[Source], Iterable[NDArray[np.float32]]]
"""A parameter in float32, a few rows at a time, such as functools.partial(recipes.weights.pieces, checkpoint)."""


def parameters(plan: Plan) -> dict[str, Source]:
    """Every parameter: "embedding", "layers.3.mlp.down_proj", "layers.3.input_norm", ..., "norm" and "head".

    A tied head has a path of its own: embedding and head are quantised apart.
    """
    found = {EMBEDDING: plan.embedding}
    for index in range(len(plan.layers)):
        for name, source in plan.layer_sources(index).items():
            found[f"layers.{index}.{name.removesuffix('.weight')}"] = source
    return found | {NORM: plan.norm, HEAD: plan.head}


def linears(plan: Plan) -> dict[str, Source]:
    """The weights [out, in] that multiply activations: every matrix of a layer, then the head."""
    return {path: s for path, s in parameters(plan).items() if len(s.out_shape) == 2 and path != EMBEDDING}
