"""Rotations folded into the weights: the graph and its logits stay, outliers are spread over all channels.

    x ─ norm ─ q, k, gate, up, ...    norm weights go into these; then W R   (R: the residual stream, hidden x hidden)
                     o, down ─ + x    R^T W
           v (per head) ─ attn ─ o    S^T W and W S                          (S: head_dim x head_dim)
    embedding R,  norm ─ head R       R spreads x, so table and head are no longer one tensor

RMSNorm with weights of one commutes with a rotation, which is all this rests on (QuaRot, Ashkboos et al. 2024;
R1 and R2 of SpinQuant, Liu et al. 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantize.grid import Floats
from recipes.plan import Plan, Source
from ringstep.errors import RingstepError

Matrix = NDArray[Any]
Read = Callable[[Source], Floats]
Change = Callable[[Floats], Floats]

PIECE_ROWS = 1024
HEAD_SEED = 1  # of the rotation within heads, beside the residual stream's 0
# Parameters of a layer, by what they do to the residual stream. A name that is not here is refused.
ATTENTION_READS = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight", "attn.g_proj.weight")
MLP_READS = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
WRITES = ("attn.o_proj.weight", "mlp.down_proj.weight")
NORMS = {"input_norm.weight": ATTENTION_READS, "post_norm.weight": MLP_READS}
APART = ("attn.q_norm.weight", "attn.k_norm.weight")  # within a head of queries or keys: no rotation reaches them


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix: diag(signs) times the Kronecker product of two small ones, never formed as a whole."""

    left: NDArray[Any]  # [a, a]
    right: NDArray[Any]  # [b, b]
    signs: NDArray[Any]  # [a * b] of +-1

    def after(self, weight: NDArray, scale: NDArray | None = None) -> Floats:
        """W diag(scale) R for a weight [out, a * b], a few rows at a time."""
        a, b = len(self.left), len(self.right)
        left, right, columns = (torch.from_numpy(m.astype(np.float32)) for m in (
            self.left.T, self.right, self.signs if scale is None else self.signs * scale))  # fmt: skip
        out = np.empty(weight.shape, np.float32)
        for at in range(0, len(weight), PIECE_ROWS):
            piece = torch.from_numpy(weight[at : at + PIECE_ROWS]) * columns
            pairs = (piece.reshape(-1, b) @ right).view(-1, a, b)
            out[at : at + PIECE_ROWS] = torch.matmul(left, pairs).view(-1, a * b).numpy()
        return out

    def before(self, weight: NDArray) -> Floats:
        """R^T W for a weight [a * b, in]."""
        return np.ascontiguousarray(self.after(weight.T).T)


def rotation(size: int, seed: int = 0) -> Rotation:
    """A rotation that spreads every coordinate over all `size` ones: Hadamard where one is known, with seeded signs.

    Sizes 2^k m with a Paley matrix of order m have a Hadamard matrix; for the others a seeded orthogonal matrix
    takes the part of m. The same size and seed always give the same rotation.
    """
    random = np.random.default_rng(seed)
    signs = random.integers(0, 2, size) * 2.0 - 1.0
    two = size & -size
    odd = size // two
    if odd == 1:
        a = 1 << (two.bit_length() - 1) // 2
        return Rotation(sylvester(a), sylvester(two // a), signs)
    order = odd * 4
    while size % order == 0:
        if (right := paley(order)) is not None:
            return Rotation(sylvester(size // order), right, signs)
        order *= 2
    right, triangle = np.linalg.qr(random.standard_normal((odd, odd)))
    # The signs of the diagonal make it uniform over all orthogonal matrices (Mezzadri 2007).
    return Rotation(sylvester(two), right * np.sign(np.diagonal(triangle)), signs)


def sylvester(order: int) -> Matrix:
    """The normalised Hadamard matrix of a power of two."""
    matrix: Matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    made: Matrix = matrix / np.sqrt(order)
    return made


def paley(order: int) -> Matrix | None:
    """Paley's normalised Hadamard matrix (1933) from the squares modulo a prime, None where there is no such prime."""
    if prime(order - 1) and order % 4 == 0:
        matrix: Matrix = np.eye(order) + conference(order - 1, -1.0)
    elif order % 4 == 0 and prime(order // 2 - 1) and order // 2 % 4 == 2:
        matrix = np.kron(conference(order // 2 - 1, 1.0), np.array([[1.0, 1.0], [1.0, -1.0]]))
        matrix += np.kron(np.eye(order // 2), np.array([[1.0, -1.0], [-1.0, -1.0]]))
    else:
        return None
    made: Matrix = matrix / np.sqrt(order)
    return made


def conference(p: int, corner: float) -> Matrix:
    """The bordered matrix of quadratic residues, order p + 1; corner is the sign of the first column."""
    squares = {i * i % p for i in range(1, p)}
    symbol = np.array([0.0] + [1.0 if i in squares else -1.0 for i in range(1, p)])
    matrix: Matrix = np.zeros((p + 1, p + 1))
    matrix[0, 1:], matrix[1:, 0] = 1.0, corner
    matrix[1:, 1:] = symbol[(np.arange(p)[:, None] - np.arange(p)) % p]
    return matrix


def prime(n: int) -> bool:
    """Whether n is a prime."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def rotated(plan: Plan, read: Read, *, residual: bool = True, heads: bool = True, seed: int = 0) -> tuple[Plan, Read]:
    """The same model with its residual stream and, or, the values of its heads rotated.

    Returns a plan and a read to use in place of the given ones: same graph, same logits, other weights; entries of
    value caches are rotated too. Weights of folded norms read as ones. A tied head becomes a tensor of its own
    (`lm_head.weight`), so check the checkpoint against the plan given here, not the one returned. A read computes in
    float32; of the table and the head it reads rows too. RingstepError where the layers cannot be rotated.
    """
    head = plan.head
    if residual and head == plan.embedding:
        head = Source("lm_head.weight", plan.embedding.shape)
    stream = rotation(plan.hidden, seed)
    origin: dict[Source, Source] = {head: plan.head}
    changes: dict[Source, Change] = {}
    if residual:
        changes[plan.embedding] = stream.after
        changes[head] = reading(read, plan.norm, stream)
        changes[plan.norm] = np.ones_like
    for index, kind in enumerate(plan.layers):
        sources = plan.layer_sources(index)
        if residual:
            changes |= of_stream(plan.recipe, read, sources, stream)
        if heads:
            changes |= of_heads(changes, sources, rotation(plan.kinds[kind].head_dim, seed + HEAD_SEED))

    by_rows = (plan.embedding, head)  # what is done to them is done to each row by itself

    def changed(source: Source) -> Floats:
        whole = dataclasses.replace(source, rows=None)
        whole = whole if whole in by_rows else source
        weight = read(dataclasses.replace(origin.get(whole, whole), rows=source.rows))
        return changes[whole](weight) if whole in changes else weight

    return dataclasses.replace(plan, head=head), changed


def of_stream(recipe: str, read: Read, sources: dict[str, Source], stream: Rotation) -> dict[Source, Change]:
    """What rotating the residual stream does to a layer's parameters."""
    changes: dict[Source, Change] = {}
    for name, source in sources.items():
        norm = next((norm for norm, readers in NORMS.items() if name in readers), None)
        if norm is not None:
            changes[source] = reading(read, sources[norm], stream)
        elif name in WRITES:
            changes[source] = stream.before
        elif name in NORMS:
            changes[source] = np.ones_like
        elif name not in APART:
            raise RingstepError(
                f"recipe {recipe} has {name.removesuffix('.weight')}, which a rotation of the residual stream does not "
                "pass (norms behind attention or MLP scale each channel); leave the rotation out"
            )
    return changes


def reading(read: Read, norm: Source, stream: Rotation) -> Change:
    """W diag(norm weights) R."""
    return lambda weight: stream.after(weight, read(norm))


def of_heads(done: dict[Source, Change], sources: dict[str, Source], head: Rotation) -> dict[Source, Change]:
    """What rotating the values within each head does to v_proj and o_proj, after the changes already made."""
    v, o = sources["attn.v_proj.weight"], sources["attn.o_proj.weight"]
    first_v, first_o, size = done.get(v, same), done.get(o, same), len(head.signs)

    def values(weight: Floats) -> Floats:
        rows = first_v(weight).reshape(-1, size, weight.shape[1])
        return np.stack([head.before(part) for part in rows]).reshape(weight.shape)

    def output(weight: Floats) -> Floats:
        return head.after(first_o(weight).reshape(-1, size)).reshape(weight.shape)

    return {v: values, o: output}


def same(weight: Floats) -> Floats:
    """No change."""
    return weight
