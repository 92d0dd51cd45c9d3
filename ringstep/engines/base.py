"""What a session asks of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

Arrays = Mapping[str, np.ndarray]


class Engine(Protocol):
    """Runs the graphs of one artifact."""

    name: str

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        """Run the graph of n tokens: read `inputs`, fill `outputs` in place (shapes and dtypes of the contract)."""

    def close(self) -> None:
        """Free what the engine holds."""
