"""Parameters of a plan read from its checkpoint, in float32, whole or a few rows at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from recipes.plan import Plan, Source
from ringstep.checkpoint import Checkpoint

PIECE_BYTES = 8 << 20  # the float32 size of what is converted at a time: peak memory is a few of these


def key(source: Source) -> str:
    """A parameter's name in the index: the checkpoint tensor's, with the rows where it is a part of one.

    Plain enough that sanitising keeps it: quantisation finds weights by it.
    """
    return source.name if source.rows is None else f"{source.name}:{source.rows[0]}-{source.rows[1]}"


def sources(plan: Plan) -> Iterator[Source]:
    """Every distinct parameter of the model, table first, then in the order the step uses them."""
    seen = set()
    layers = [source for i in range(len(plan.layers)) for source in plan.layer_sources(i).values()]
    for source in [plan.embedding, *layers, plan.norm, plan.head]:
        if key(source) not in seen:
            seen.add(key(source))
            yield source


def parts(source: Source) -> Iterator[Source]:
    """A parameter as parts of a few rows each."""
    start, stop = source.rows or (0, source.shape[0])
    step = max(1, PIECE_BYTES // max(4, 4 * int(np.prod(source.shape[1:]))))
    for at in range(start, stop, step):
        yield dataclasses.replace(source, rows=(at, min(stop, at + step)))


def pieces(checkpoint: Checkpoint, source: Source) -> Iterator[np.ndarray]:
    """The parameter in float32, a few rows at a time."""
    for part in parts(source):
        piece = np.asarray(checkpoint.read(source.name, part.rows)).astype(np.float32, copy=False)
        yield piece + np.float32(source.add) if source.add else piece


def read(checkpoint: Checkpoint, source: Source) -> np.ndarray:
    """The whole parameter in float32 (a new array)."""
    out = np.empty(source.out_shape, np.float32)
    at = 0
    for piece in pieces(checkpoint, source):
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out
