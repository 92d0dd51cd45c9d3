"""The embedding table: rows that a host reads back, the same as a head's weights, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from random_models import LLAMA, save_model

from quantize.grid import Grid
from quantize.store import weight_at
from quantize.table import FILE, write_table
from recipes import plan_for
from recipes.plan import Plan
from recipes.weights import pieces
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import EmbeddingSpec, StepSpec
from ringstep.encoding import open_table
from ringstep.errors import RingstepError

PLAN = plan_for(LLAMA)
SHAPE = (PLAN.vocab, PLAN.hidden)


def values(seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, one of them zero."""
    random = np.random.default_rng(seed)
    made = random.normal(size=SHAPE) * 10.0 ** random.uniform(-6, 4, (SHAPE[0], 1))
    made[7] = 0
    return made.astype(np.float32)


def in_pieces(array: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    return (array[at : at + rows] for at in range(0, len(array), rows))


def opened(folder: Path, made: EmbeddingSpec) -> np.ndarray:
    """All rows as a host reads them."""
    spec = StepSpec("r", "m", *SHAPE, 8, "uint16", -1.0, (), (), (), (), (), embedding=made)
    table = open_table(folder.parent, spec)
    assert table is not None
    return table[np.arange(SHAPE[0])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "onnx").mkdir()
    return tmp_path / "onnx"


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rows", [1, 7, 160, 1000])
def test_rows_are_rounded_one_by_one(bits: int, rows: int, folder: Path) -> None:
    """Against each row's own largest element; pieces of any size give one file."""
    want = values()
    made, stored, largest = write_table(in_pieces(want, rows), PLAN, Grid(bits), folder)
    assert largest == np.abs(want).max()
    assert (made.file, made.offset, made.shape, made.dtype) == ("onnx/embedding.bin", 0, SHAPE, f"int{bits}")
    raw = (folder / FILE).read_bytes()
    assert made.scales is not None and made.scales % 64 == 0 and made.scales >= 160 * 64 * bits // 8
    assert len(raw) == made.scales + 4 * SHAPE[0]
    q = np.frombuffer(raw, f"<i{bits // 8}", 160 * 64).reshape(SHAPE).astype(np.float64)
    scale = np.frombuffer(raw, "<f4", 160, made.scales).astype(np.float64)
    assert (scale > 0).all()
    top = np.abs(want).max(1)
    # The whole type is used: a row's largest number is its last or its first.
    assert (np.abs(q * scale[:, None] - want).max(1) <= 0.51 * scale + 1e-30).all()
    used = np.maximum(q.max(1) / (2 ** (bits - 1) - 1), q.min(1) / -(2.0 ** (bits - 1)))
    assert (used[top > 0] > 0.99).all() and (q[7] == 0).all()
    np.testing.assert_allclose(opened(folder, made), q * scale[:, None], rtol=1e-6, atol=1e-35)
    assert stored is not None
    np.testing.assert_allclose(weight_at(folder, stored).dequantised(), q * scale[:, None], rtol=1e-6, atol=1e-35)


def test_floats(folder: Path) -> None:
    want = values()
    made, stored, largest = write_table(in_pieces(want, 9), PLAN, None, folder)
    assert stored is None and made == EmbeddingSpec("onnx/embedding.bin", 0, SHAPE, "float16")
    np.testing.assert_array_equal(opened(folder, made), want.astype(np.float16))
    assert largest == np.abs(want).max()
    want[150, 3] = 7e4
    with pytest.raises(RingstepError, match=r"tensor model\.embed_tokens\.weight: values beyond float16's 65504"):
        write_table(in_pieces(want, 9), PLAN, None, folder)
    assert write_table(in_pieces(want, 9), PLAN, Grid(8), folder)[2] == 7e4


@pytest.mark.parametrize("grid", [Grid(4), Grid(8, False), Grid(8, True, 32), Grid(2), Grid(4, True, 16, True)])
def test_grids_that_no_host_reads(grid: Grid, folder: Path) -> None:
    with pytest.raises(RingstepError, match=r"embedding: .*change \[embedding\]"):
        write_table(in_pieces(values(), 9), PLAN, grid, folder)


@pytest.mark.parametrize("grid", [Grid(8), Grid(16), None])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(grid: Grid | None, bad: float, folder: Path) -> None:
    want = values()
    want[159, 63] = bad
    with pytest.raises(RingstepError, match=r"tensor model\.embed_tokens\.weight: values that are not finite"):
        write_table(in_pieces(want, 9), PLAN, grid, folder)


def test_of_a_checkpoint(tmp_path: Path, folder: Path) -> None:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "model", LLAMA)))
    plan: Plan = dataclasses.replace(plan_for(checkpoint.config))
    made, _, _ = write_table(pieces(checkpoint, plan.embedding), plan, Grid(16), folder)
    want = np.asarray(checkpoint.read(plan.embedding.name, None))
    assert np.abs(opened(folder, made) - want).max() <= 0.51 * np.abs(want).max() / 32767
