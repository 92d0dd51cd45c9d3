"""Fixtures of the export tests: Spark's tiny golden."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from export_runs import SPARK
from safetensors.numpy import load_file

torch.set_num_threads(1)  # tensors this small only lose by a second thread


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """input_ids [48], logits [48, 320] in float64 arithmetic, greedy_ids [16]."""
    return load_file(SPARK / "golden.safetensors")
