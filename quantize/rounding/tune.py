"""Tuning end to end: the integers stay, scales and norms learn to give the original's logits.

    a batch of texts   forward, layer by layer, hidden states kept ─▶ how far the logits are from the original's
                       backward, layer by layer, each computed again ─▶ gradients of its scales and norms

Scales [out, blocks] are few against the tokens of a text, so that little is learned by heart (the second phase of
Chen et al. 2024, arXiv 2407.11062). A layer's weights are in memory while it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quantize.calibrate import Calibration, Tick
from quantize.grid import QuantisedWeight
from quantize.model import Model
from quantize.torch_graph import Block, run
from recipes.step import head_sources, layer_inputs
from recipes.weights import key

Load = Callable[[str], QuantisedWeight | None]
RATE = 1e-3  # Adam's, of factors that begin at 1
BATCH = 4  # texts a step


@dataclass
class Learned:
    """Factors that begin at 1: of each scale [out, blocks], and of each norm's elements [hidden]."""

    scales: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)

    def of(self, block: Block, floats: Mapping[str, Tensor], load: Load) -> dict[str, Tensor]:
        """A block's weights as the factors make them."""
        made = {}
        for name in block.weights:
            stored = load(name)
            if stored is None:
                made[name] = floats[name] * self.norms.setdefault(name, torch.ones_like(floats[name]).requires_grad_())
                continue
            factor = self.scales.setdefault(name, torch.ones(stored.scale.shape).requires_grad_())
            inputs = stored.q.shape[1]
            width = stored.grid.width(inputs)
            each = factor if width == inputs else factor.repeat_interleave(width, 1)[:, :inputs]
            made[name] = torch.from_numpy(stored.dequantised()) * each
        return made


class Tuner:
    """One chunk of n tokens after the sink prefix, through the model and back, a layer at a time."""

    def __init__(self, model: Model, found: Calibration, load: Load) -> None:
        self.model, self.load, self.learned = model, load, Learned()
        self.blocks = [model.block(layer) for layer in range(len(model.plan.layers))]
        self.head = model.head()
        self.feeds = [self.feeds_of(layer, found) for layer in range(len(self.blocks))]

    def feeds_of(self, layer: int, found: Calibration) -> dict[str, Tensor]:
        """A layer's inputs but the hidden state: they are the same for every text."""
        session, _ = self.model.open_layer(layer)
        entries = {k: array for k, array in found.entries.items() if k[0] == layer}
        if entries:
            session.seed(entries)
        buffers = session.buffers[self.model.n]
        buffers.fill(session.position, np.zeros((self.model.n, self.model.plan.hidden), np.float32), None)
        inputs = buffers.inputs | {name: session.caches[cache.layer, what] for name, cache, what in buffers.past}
        return {name: torch.from_numpy(inputs[name]) for name in layer_inputs(self.model.spec.caches[layer])}

    def floats(self, layer: int) -> dict[str, Tensor]:
        """A layer's parameters as they are, those that are quantised left out."""
        return {name: torch.from_numpy(self.model.read(source)) for name, (_, source) in
                self.model.sources(layer).items() if self.load(name) is None}  # fmt: skip

    def layer(self, layer: int, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The next hidden state [n, hidden]."""
        block, feeds = self.blocks[layer], self.feeds[layer]
        source = next(name for name in block.inputs if name not in feeds)
        return run(block, feeds | {source: x}, weights)[f"hidden_{layer}"]

    def original(self, texts: Sequence[np.ndarray]) -> list[Tensor]:
        """The original's last hidden states, [n, hidden] each."""
        states = [torch.from_numpy(text) for text in texts]
        with torch.inference_mode():
            for layer in range(len(self.blocks)):
                weights = {n: torch.from_numpy(self.model.read(s)) for n, (_, s) in self.model.sources(layer).items()}
                states = [self.layer(layer, x, weights) for x in states]
        return states

    def step(self, texts: Sequence[np.ndarray], wanted: Sequence[Tensor], head: Tensor, own_head: Tensor,
             norm: Tensor) -> float:  # fmt: skip
        """Accumulate the gradients of one batch; returns the mean loss."""
        states = [[torch.from_numpy(text)] for text in texts]
        with torch.no_grad():
            for layer in range(len(self.blocks)):
                weights = self.learned.of(self.blocks[layer], self.floats(layer), self.load)
                for kept in states:
                    kept.append(self.layer(layer, kept[-1], weights))
        total, back = 0.0, []
        norm_name, head_name = self.head_names()
        factor = self.learned.norms.setdefault(norm_name, torch.ones_like(norm).requires_grad_())
        for kept, goal in zip(states, wanted, strict=True):
            x = kept.pop().requires_grad_()
            with torch.no_grad():
                truth = run(self.head, {self.head.inputs[0]: goal}, {norm_name: norm, head_name: head})["logits"]
            have = run(self.head, {self.head.inputs[0]: x}, {norm_name: norm * factor, head_name: own_head})["logits"]
            loss = loss_of(have, truth) / len(states)
            loss.backward()
            total += loss.item()
            assert x.grad is not None
            back.append(x.grad)
        for layer in reversed(range(len(self.blocks))):
            weights = self.learned.of(self.blocks[layer], self.floats(layer), self.load)
            leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
            for i, kept in enumerate(states):
                x = kept.pop().requires_grad_()
                self.layer(layer, x, leaves).backward(back[i])
                assert x.grad is not None
                back[i] = x.grad
            for name, w in weights.items():
                w.backward(leaves[name].grad)
        return total

    def head_names(self) -> tuple[str, str]:
        """The head's norm and weight."""
        sources = head_sources(self.model.plan)
        return key(sources["norm.weight"]), key(sources["lm_head.weight"])


def loss_of(have: Tensor, truth: Tensor) -> Tensor:
    """KL of the original from ours, and the error of the logits against the size of the original's."""
    divergence = F.kl_div(have.log_softmax(-1), truth.log_softmax(-1), log_target=True, reduction="batchmean")
    return divergence + (have - truth).square().mean() / truth.square().mean()


def tune(model: Model, sequences: Sequence[Sequence[int]], found: Calibration, load: Load, epochs: int,
         rate: float = RATE, tick: Tick = lambda _: None) -> Learned:  # fmt: skip
    """Learn for `epochs` passes over the chunks of `sequences`; `load(name)` gives a rounded weight, None for a float.

    Every chunk of model.n ids is taken as a text of its own after the sink prefix.
    """
    n = model.n
    chunks = [ids[at : at + n] for ids in sequences for at in range(0, len(ids) - n + 1, n)]
    tuner = Tuner(model, found, load)
    norm_name, head_name = tuner.head_names()
    sources = head_sources(model.plan)
    norm, head = (torch.from_numpy(model.read(sources[k])) for k in ("norm.weight", "lm_head.weight"))
    rounded = load(head_name)
    own_head = head if rounded is None else torch.from_numpy(rounded.dequantised())
    texts = [model.embedded(ids) for ids in chunks]
    wanted = tuner.original(texts)
    steps = -(-len(chunks) // BATCH) * epochs
    optimiser, schedule, done = None, None, 0
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(chunks))
        for at in range(0, len(order), BATCH):
            batch = order[at : at + BATCH]
            tuner.step([texts[i] for i in batch], [wanted[i] for i in batch], head, own_head, norm)
            if optimiser is None:
                learned = [*tuner.learned.scales.values(), *tuner.learned.norms.values()]
                optimiser = torch.optim.Adam(learned, lr=rate, betas=(0.9, 0.95))
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
            optimiser.step()
            optimiser.zero_grad()
            assert schedule is not None
            schedule.step()
            done += 1
            tick(n * len(batch))
    return tuner.learned
