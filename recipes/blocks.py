"""The shared blocks of a decode step: norm, rotary, grouped-query attention over a cache, gates, MLPs.

Shapes: n tokens a step, x [n, hidden], past keys and values [1, kv_heads, length, head_dim], cos and sin
[n, rotated / 2], mask [1, 1, n, length + n]. Nothing has more than four dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.plan import Layout, Options

# Exp's argument on HTP fp16: from -88.5 on it returns garbage, at -40 a clean 0.
EXP_LOW = -40.0
# logit(Phi(x)) = x (c0 + c1 x^2 + c2 x^4), fitted by what GELU errs on [-8, 8] (sanitize/ops/elementwise.py).
GELU_LOGIT = (1.594678, 0.07433558, -0.0007548742)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)


def reciprocal(x: Tensor, accurate: bool) -> Tensor:
    """1 / x; accurate writes Pow, which HTP's fp16 rounds right where Reciprocal and Div come out 2.8e-4 too small."""
    return torch.pow(x, -1.0) if accurate else torch.reciprocal(x)


def twice_sigmoid(x: Tensor) -> Tensor:
    """2 sigmoid(x) = (1 + tanh(|x| / 2)) exp(min(x, 0)): no division, and the negative tail keeps its precision."""
    return (1.0 + torch.tanh(torch.abs(0.5 * x))) * torch.exp(torch.clamp(x, EXP_LOW, 0.0))


def sigmoid(x: Tensor, accurate: bool) -> Tensor:
    """Sigmoid; the accurate form avoids HTP's fp16 kernel (46 % off at -8, see docs/htp-accuracy.md)."""
    return 0.5 * twice_sigmoid(x) if accurate else torch.sigmoid(x)


def silu(x: Tensor, accurate: bool) -> Tensor:
    """x * sigmoid(x)."""
    return 0.5 * x * twice_sigmoid(x) if accurate else F.silu(x)


def gelu(x: Tensor, form: str, accurate: bool) -> Tensor:
    """GELU: `exact` (erf), `tanh`, or `sigmoid` (x * sigmoid(1.702 x), Hendrycks and Gimpel 2016).

    The accurate exact form uses a least-squares fit of the normal CDF's logit where GELU errs (GELU_LOGIT); the
    accurate tanh form is an identity: 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3).
    """
    if form == "sigmoid":
        return 0.5 * x * twice_sigmoid(1.702 * x) if accurate else x * torch.sigmoid(1.702 * x)
    if not accurate:
        return F.gelu(x, approximate="tanh" if form == "tanh" else "none")
    # Beyond 8 the fit turns back and the square would overflow fp16; there GELU is x or 0 anyway.
    bounded = torch.clamp(x, -8.0, 8.0)
    square = bounded * bounded
    if form == "tanh":
        logit = x * (1.5957691216 + 0.0713548163 * square)
    else:
        logit = x * (GELU_LOGIT[0] + square * (GELU_LOGIT[1] + GELU_LOGIT[2] * square))
    return 0.5 * x * twice_sigmoid(logit)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rotary on the leading 2 * cos.shape[-1] dims of x [heads, n, head_dim]; the rest pass through."""
    half = cos.shape[-1]
    rest = x.shape[-1] - 2 * half
    first, second, *tail = torch.split(x, [half, half, rest] if rest else [half, half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, *tail], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention over a cache, the query grouped by reshaping so that keys are never repeated.

        x ─ q_proj ─ [heads, n, d] ─ (norm) ┬ rotary ─ [1, kv, group * n, d] ─┐
        x ─ k_proj ─ [kv, n, d] ─ (norm) ───┘          concat(past_key) ─── MatMul + mask ─ Softmax ─┐
        x ─ v_proj ─ [kv, n, d] ────────────────────── concat(past_value) ──────────────────────── MatMul
        x ─ g_proj ─ sigmoid or silu, one scalar a head ────────────────────────────────────────────── Mul ─ o_proj

    Returns (out [n, hidden], key, value): the new entries [1, kv_heads, n, head_dim], or under `roll` the
    shifted window [1, kv_heads, length, head_dim].
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        layout: Layout,
        options: Options,
        scale: float | None = None,
        qk_norm_eps: float | None = None,
        gate: str | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.layout, self.accurate = layout, options.activations == "accurate"
        # On phones one Softmax over concatenated keys was as fast as any form; a CPU, where float32 graphs run,
        # is spared a copy of every cache.
        self.concat_scores = options.dtype == "float32" and not options.quantised
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = RMSNorm(head_dim, qk_norm_eps), RMSNorm(head_dim, qk_norm_eps)
        self.gate = gate
        self.g_proj = nn.Linear(hidden, heads, bias=False) if gate else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        n = x.shape[0]
        q = self.by_head(self.q_proj(x), self.heads, self.q_norm)
        k = self.by_head(self.k_proj(x), self.kv_heads, self.k_norm)
        v = self.by_head(self.v_proj(x), self.kv_heads, None)
        # Rotated together: six operations fewer a layer.
        axis = 2 if n == 1 else 0
        q, k = torch.split(rotate(torch.cat([q, k], axis), cos, sin), [q.shape[axis], k.shape[axis]], axis)
        q, k, v = self.by_group(q) * self.scale, self.by_group(k), self.by_group(v)
        if self.layout == "join":
            out = self.join(q, k, v, mask, past_key, past_value)
        elif self.concat_scores and self.layout != "roll":
            scores = torch.cat([self.scores(q, past_key, n), self.scores(q, k, n)], dim=-1)
            old, new = torch.split(self.softmax(scores + mask), [past_key.shape[2], n], dim=-1)
            out = self.weigh(old, past_value, n) + self.weigh(new, v, n)
        else:
            keys, values = torch.cat([past_key, k], dim=2), torch.cat([past_value, v], dim=2)
            out = self.weigh(self.softmax(self.scores(q, keys, n) + mask), values, n)
            if self.layout == "roll":
                k, v = keys[:, :, n:], values[:, :, n:]
        if self.g_proj is not None:
            gates = self.g_proj(x)
            gates = silu(gates, self.accurate) if self.gate == "silu" else sigmoid(gates, self.accurate)
            out = out * self.by_group(gates.transpose(0, 1).reshape(self.heads, n, 1))
        if n > 1:
            out = out.reshape(self.heads, n, self.head_dim).transpose(0, 1)
        return self.o_proj(out.reshape(n, self.heads * self.head_dim)), k, v

    def by_head(self, x: Tensor, heads: int, norm: RMSNorm | None) -> Tensor:
        """[n, heads * head_dim] to [heads, n, head_dim]; one token goes to [1, kv_heads, group, head_dim] at once."""
        n = x.shape[0]
        if norm is not None:
            # HTP's RMSNormalization returns garbage at rank 3 when the third dim from the end exceeds 8.
            x = norm(x.reshape(n * heads, self.head_dim))
        if n == 1:
            return x.reshape(1, self.kv_heads, heads // self.kv_heads, self.head_dim)
        return x.reshape(n, heads, self.head_dim).transpose(0, 1)

    def by_group(self, x: Tensor) -> Tensor:
        """[heads, n, d] to [1, kv_heads, group * n, d], the order in which a kv head's queries are stacked."""
        return x if x.dim() == 4 else x.reshape(1, self.kv_heads, -1, x.shape[-1])

    def scores(self, q: Tensor, keys: Tensor, n: int) -> Tensor:
        """Scores of q [1, kv_heads, group * n, head_dim], to which mask [1, 1, n, keys] can be added.

        [kv_heads, group, n, keys], or [1, kv_heads, group, keys] for one token.
        """
        scores = q @ keys.transpose(2, 3)
        return scores if n == 1 else scores.reshape(self.kv_heads, self.heads // self.kv_heads, n, -1)

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax over keys. HTP's fp16 kernel loses 12 dB against this accurate form (docs/htp-accuracy.md)."""
        if not self.accurate:
            return torch.softmax(scores, dim=-1)
        weights = self.exp(scores - scores.amax(-1, keepdim=True))
        return weights * reciprocal(weights.sum(-1, keepdim=True), True)

    def weigh(self, weights: Tensor, values: Tensor, n: int) -> Tensor:
        """Weights, in the shape of scores, times values: [1, kv_heads, group * n, head_dim]."""
        if n > 1:
            weights = weights.reshape(1, self.kv_heads, self.heads // self.kv_heads * n, -1)
        return weights @ values

    def exp(self, x: Tensor) -> Tensor:
        """exp of scores minus their maximum; masked ones reach far below what HTP's Exp can take."""
        return torch.exp(torch.clamp(x, min=EXP_LOW) if self.accurate else x)

    def join(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, past_key: Tensor, past_value: Tensor) -> Tensor:
        """Score-space join: past and new scores share one max and one sum, and no key is concatenated."""
        n = mask.shape[2]
        old_mask, new_mask = torch.split(mask, [past_key.shape[2], n], dim=-1)
        old, new = self.scores(q, past_key, n) + old_mask, self.scores(q, k, n) + new_mask
        top = torch.maximum(old.amax(-1, keepdim=True), new.amax(-1, keepdim=True))
        old, new = self.exp(old - top), self.exp(new - top)
        # Normalised before the values: the sum of many values would overflow fp16.
        inverse = reciprocal(old.sum(-1, keepdim=True) + new.sum(-1, keepdim=True), self.accurate)
        return self.weigh(old * inverse, past_value, n) + self.weigh(new * inverse, v, n)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)); act is "silu", or a GELU form "exact", "tanh", "sigmoid"."""

    def __init__(self, hidden: int, inner: int, act: str, options: Options) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act = act if act == "silu" or options.gelu == "auto" else options.gelu
        self.accurate = options.activations == "accurate"

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = silu(gate, self.accurate) if self.act == "silu" else gelu(gate, self.act, self.accurate)
        return self.down_proj(gate * self.up_proj(x))


Stream = list[Tensor]


def add(stream: Stream, update: Tensor) -> Stream:
    """Add to the residual stream: [x], or [x, rest] with the rounding error of x carried along (Kahan 1965).

    In fp16 the roundings of two additions a layer are the largest single loss of a step (docs/htp-accuracy.md).
    """
    x, *rest = stream
    if rest:
        update = update + rest[0]
        total = x + update
        return [total, update - (total - x)]
    return [x + update]


class Layer(nn.Module):
    """The pre-norm layer of Llama, Qwen3 and Spark: x + attn(norm(x)), then x + mlp(norm(x)).

    Takes the residual stream (x, or x and rest, see add), cos, sin, mask, past key and value; returns the
    stream, key and value.
    """

    def __init__(self, hidden: int, eps: float, attn: Attention, mlp: MLP) -> None:
        super().__init__()
        self.input_norm, self.attn = RMSNorm(hidden, eps), attn
        self.post_norm, self.mlp = RMSNorm(hidden, eps), mlp

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        stream, cache = list(inputs[:-5]), inputs[-5:]
        out, key, value = self.attn(self.input_norm(stream[0]), *cache)
        stream = add(stream, out)
        stream = add(stream, self.mlp(self.post_norm(stream[0])))
        return *stream, key, value


class Embed(nn.Module):
    """The first block: table lookup of ids [n] when the table is inside, then the model's embedding scale."""

    def __init__(self, vocab: int, hidden: int, scale: float, inside: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab, hidden)) if inside else None
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x = F.embedding(x, self.weight) if self.weight is not None else x
        return x if self.scale == 1.0 else x * self.scale


class Head(nn.Module):
    """The last block: final norm and logits [n, vocab]."""

    def __init__(self, hidden: int, vocab: int, eps: float) -> None:
        super().__init__()
        self.norm, self.lm_head = RMSNorm(hidden, eps), nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))
