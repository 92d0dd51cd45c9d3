"""What a recipe hands over: the layers of a model, their kinds, and where each weight comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ringstep.contract import RotarySpec

if TYPE_CHECKING:
    from torch import nn

Layout = Literal["ring", "roll", "append", "join"]
LAYOUTS = ("ring", "roll", "append", "join")


@dataclass(frozen=True)
class Source:
    """A parameter's origin: rows [start, stop) of a checkpoint tensor, plus `add` (Gemma stores norms as w - 1)."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    add: float = 0.0

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the parameter itself."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])


@dataclass(frozen=True)
class LayerKind:
    """Layers of one kind share a traced graph: same modules, window and rotary."""

    name: str
    window: int | None
    rotary: RotarySpec
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Options:
    """How the step is written down; none of it changes what the model computes."""

    dtype: Literal["float32", "float16"] = "float32"
    activations: Literal["accurate", "native"] = "native"
    gelu: Literal["auto", "exact", "tanh", "sigmoid"] = "auto"
    layout: dict[str, Layout] = field(default_factory=dict)
    embedding_inside: bool = False
    quantised: bool = False
    """Written for quantised activations: keys are concatenated, so that one MatMul has one encoding."""

    @property
    def streams(self) -> int:
        """Tensors of the residual stream: with accurate activations its rounding error is carried along."""
        return 2 if self.activations == "accurate" else 1

    def layout_of(self, kind: LayerKind) -> Layout:
        """The cache layout of a kind: as asked ("*" stands for every kind), else ring for windows, else append."""
        default: Layout = "append" if kind.window is None else "ring"
        return self.layout.get(kind.name, self.layout.get("*", default))


@dataclass(frozen=True)
class FixedModule:
    """Part of a model that keeps nothing between calls, such as a windowed decoder: float tensors of fixed shapes."""

    make: Callable[[Options], nn.Module]
    sources: dict[str, Source]
    """Where its parameters come from, by their names in the module."""
    inputs: Callable[[int], dict[str, tuple[int, ...]]]
    """Shapes by name, in the order of forward, for a chunk of n."""
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One model laid out: `layers[i]` names the kind of layer i; `layer(kind, options)` makes its module."""

    recipe: str
    vocab: int
    hidden: int
    context: int
    layers: tuple[str, ...]
    kinds: dict[str, LayerKind]
    layer: Callable[[LayerKind, Options], nn.Module]
    layer_sources: Callable[[int], dict[str, Source]]
    embedding: Source
    head: Source
    norm: Source
    norm_eps: float
    embedding_scale: float = 1.0
    optional: Collection[str] = ()
    warnings: tuple[str, ...] = ()
    modules: Mapping[str, FixedModule] = field(default_factory=dict)
    """What `--method` exports by itself, besides every model's head (recipes/fixed.py)."""

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Every checkpoint tensor the model needs, by name, with its shape."""
        sources = [self.embedding, self.head, self.norm]
        for index in range(len(self.layers)):
            sources += self.layer_sources(index).values()
        return {source.name: source.shape for source in sources}


Config = dict[str, Any]
