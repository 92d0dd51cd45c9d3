"""Modules of a plan with fixed shapes, which are exported by themselves."""

from __future__ import annotations

import torch
from torch import nn

from recipes.blocks import Head
from recipes.plan import FixedModule, Options, Plan
from recipes.step import Read, bind, head_sources


def fixed_modules(plan: Plan) -> dict[str, FixedModule]:
    """By name: every model's head, hidden [n, hidden] to logits [n, vocab], and what the recipe adds."""
    head = FixedModule(lambda options: Head(plan.hidden, plan.vocab, plan.norm_eps), head_sources(plan),
                       lambda n: {"hidden": (n, plan.hidden)}, ("logits",))  # fmt: skip
    return {"head": head, **plan.modules}


def build(fixed: FixedModule, options: Options, read: Read) -> nn.Module:
    """The module with its parameters, in the type of the options."""
    with torch.device("meta"):
        module = fixed.make(options)
    bind(module, fixed.sources, read)
    return module.eval().to(getattr(torch, options.dtype))
