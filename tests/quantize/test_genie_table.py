"""Embedding tables for Genie, read back by what the argument says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from random_models import LLAMA, save_model

from quantize.activations import Activation, from_range
from quantize.formats.genie import Table, requantise, write_table
from recipes import plan_for
from recipes.plan import Plan, Source
from recipes.weights import read
from ringstep.checkpoint import open_checkpoint
from ringstep.contract import Encoding
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db

TYPES = ("int8", "uint8", "int16", "uint16")


@pytest.fixture
def floats(tmp_path: Path) -> np.ndarray:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", LLAMA)))
    return read(checkpoint, plan_for(LLAMA).embedding)


def cut(table: np.ndarray, source: Source) -> Iterator[np.ndarray]:
    """The table in uneven pieces."""
    assert source.name == "model.embed_tokens.weight"
    yield from (table[:7].copy(), table[7:100].copy(), table[100:].copy())


def parsed(argument: str) -> tuple[np.ndarray, float, int]:
    """The file's integers and what they mean, by the argument alone."""
    path, dtype, scale, offset = argument.split(",")
    return np.fromfile(path, dtype).reshape(160, 64), float(scale), int(offset)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_file_holds_the_table(tmp_path: Path, floats: np.ndarray, dtype: str) -> None:
    floats[0, 0], floats[5, 3] = -0.9, 1.7  # not centred
    ticks: list[float] = []
    table = write_table(plan_for(LLAMA), partial(cut, floats), tmp_path / "t.bin", dtype, tick=ticks.append)
    q, scale, offset = parsed(table.argument())
    assert np.float32(scale) == np.float32(table.activation.encoding.scale)
    real = scale * (q.astype(np.float64) + offset)
    assert np.abs(real - floats).max() <= scale * 0.5001
    steps = 255 if "8" in dtype else 65535
    assert scale == pytest.approx(float(floats.max() - floats.min()) / steps, rel=1e-6)
    assert table.snr_db == pytest.approx(snr_db(floats, real), abs=0.01)
    assert int(q.max()) - int(q.min()) >= steps - 1  # the whole type is used
    assert (table.low, table.high) == (float(floats.min()), float(floats.max()))
    assert sum(ticks) == q.nbytes == (tmp_path / "t.bin").stat().st_size


def test_the_models_embedding_scale_is_inside(tmp_path: Path, floats: np.ndarray) -> None:
    plan: Plan = dataclasses.replace(plan_for(LLAMA), embedding_scale=8.0)
    q, scale, offset = parsed(write_table(plan, partial(cut, floats), tmp_path / "t.bin").argument())
    assert snr_db(8 * floats, scale * (q.astype(np.float64) + offset)) > 80


def test_clipping_wins_where_few_values_lie_far_out(tmp_path: Path, floats: np.ndarray) -> None:
    floats = floats**3 + 0.1 * floats
    floats[floats < -0.01] = -0.01  # and not on both sides
    plan = plan_for(LLAMA)
    whole = write_table(plan, partial(cut, floats), tmp_path / "a.bin", "uint8")
    clipped = write_table(plan, partial(cut, floats), tmp_path / "b.bin", "uint8", clip=True)
    assert clipped.snr_db > whole.snr_db + 0.3
    q, scale, offset = parsed(clipped.argument())
    assert clipped.snr_db == pytest.approx(snr_db(floats, scale * (q.astype(np.float64) + offset)), abs=0.01)
    # No other range does clearly better.
    best = 0.0
    for low in np.linspace(0.1, 1, 19):
        for high in np.linspace(0.1, 1, 37):
            own = from_range(low * clipped.low, high * clipped.high, "uint8", symmetric=False)
            best = max(best, snr_db(floats, own.fake(floats)))
    assert clipped.snr_db > best - 0.1
    wide = write_table(plan, partial(cut, floats), tmp_path / "c.bin", "uint16", clip=True)
    assert wide.snr_db > 75


def test_a_table_of_zeros(tmp_path: Path, floats: np.ndarray) -> None:
    table = write_table(plan_for(LLAMA), partial(cut, 0 * floats), tmp_path / "t.bin", "uint8", clip=True)
    q, scale, offset = parsed(table.argument())
    assert table.snr_db == 300 and scale > 0 and not (q.astype(int) + offset).any()


@pytest.mark.parametrize(
    ("dtype", "target"), [("uint8", "uint16"), ("uint16", "uint16"), ("int8", "int16"), ("uint8", "uint8")]
)
def test_requantisation_is_what_the_input_encoding_gives(
    tmp_path: Path, floats: np.ndarray, dtype: str, target: str
) -> None:
    table = write_table(plan_for(LLAMA), partial(cut, floats), tmp_path / "t.bin", dtype)
    activation = from_range(-1.3, 0.9, target, symmetric=False)  # type: ignore[arg-type]
    q, scale, offset = parsed(table.argument())
    real = scale * (q.astype(np.float64) + offset)
    found = requantise(table, activation).apply(q)
    assert found.dtype == target
    back = activation.encoding.scale * (found.astype(np.float64) - activation.encoding.zero)
    assert np.abs(back - real).max() <= activation.encoding.scale * 0.5001


def test_what_cannot_be_is_refused(tmp_path: Path, floats: np.ndarray) -> None:
    plan, file = plan_for(LLAMA), tmp_path / "t.bin"
    with pytest.raises(RingstepError, match=r"'int4': Genie knows .*\(did you mean int"):
        write_table(plan, partial(cut, floats), file, "int4")
    for bad in (np.nan, np.inf, -np.inf):
        floats[150, 2] = bad
        with pytest.raises(RingstepError, match=r"tensor model.embed_tokens.weight: values that are not finite"):
            write_table(plan, partial(cut, floats), file)
    floats[150, 2] = 0
    with pytest.raises(RingstepError, match=r"tensor model.embed_tokens.weight: 9600 values where \[160, 64\] belong"):
        write_table(plan, lambda _: [floats[:150]], file)
    assert not file.exists() and [path.name for path in tmp_path.iterdir()] == ["source"]
    table = write_table(plan, partial(cut, floats), file, "uint8")
    with pytest.raises(RingstepError, match="the table is uint8 and the graph's input int16; Genie needs both"):
        requantise(table, Activation("int16", Encoding(1.0, 0)))
    with pytest.raises(RingstepError, match=r"the table reaches .*, the graph's input only -0.1"):
        requantise(table, from_range(-0.1, 0.1, "uint16", symmetric=False))
    moved = Table(Path("a,b.bin"), table.shape, table.activation, 30.0, -1.0, 1.0)
    with pytest.raises(RingstepError, match=r"a,b.bin: Genie takes a comma"):
        moved.argument()
