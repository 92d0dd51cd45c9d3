"""Fixtures of the recipe tests: Spark's tiny golden."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ringstep.checkpoint import Checkpoint, open_checkpoint

torch.set_num_threads(1)  # tensors this small only lose by a second thread
SPARK = Path(__file__).parent.parent / "data" / "spark2_5_tiny"


@pytest.fixture(scope="session")
def spark() -> Checkpoint:
    """The tiny Spark-X2.5: 8 layers, window 16."""
    return open_checkpoint(str(SPARK))


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """input_ids [48], logits [48, 320] in float64 arithmetic, greedy_ids [16]."""
    return load_file(SPARK / "golden.safetensors")
