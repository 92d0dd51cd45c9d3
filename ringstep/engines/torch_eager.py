"""A recipe's own modules in eager torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringstep.engines.base import Arrays

if TYPE_CHECKING:
    from torch import nn


class TorchEngine:
    """Runs a module that takes the contract's inputs by name and returns a dict of its outputs."""

    name = "torch"

    def __init__(self, step: nn.Module) -> None:
        self.step = step

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        import torch

        with torch.inference_mode():
            results = self.step({name: torch.from_numpy(array) for name, array in inputs.items()})
        for name, array in outputs.items():
            np.copyto(array, results[name].numpy(), casting="no")

    def close(self) -> None:
        del self.step
