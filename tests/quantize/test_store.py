"""The file of rounded weights: what is read back is what was written, and lies where the index says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from random_models import rounded

from quantize.grid import Grid
from quantize.qdq import refusal
from quantize.store import DATA, INDEX, Stored, Writer, load_index, save_index, weight_at
from ringstep.errors import RingstepError

GRIDS = [
    Grid(4), Grid(8), Grid(16), Grid(2), Grid(3), Grid(4, block=16), Grid(8, block=32), Grid(4, False, 16),
    Grid(8, False), Grid(2, False, 32), Grid(3, False, 16), Grid(4, True, 16, True), Grid(4, True, 32, True),
]  # fmt: skip
SHAPE = (6, 45)  # odd, and its last block shorter


def store(folder: Path, grids: list[Grid]) -> dict[str, Stored]:
    rng = np.random.default_rng(3)
    weights = {f"w{i}": rounded(rng.standard_normal(SHAPE).astype(np.float32), grid) for i, grid in enumerate(grids)}
    with open(folder / DATA, "wb") as file:
        writer = Writer(file)
        for name, weight in weights.items():
            writer.weight(name, weight)
    save_index(folder / INDEX, writer.index)
    return weights


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    weights = store(tmp_path, GRIDS)
    index = load_index(tmp_path / INDEX)
    assert list(index) == list(weights)
    for name, want in weights.items():
        have = weight_at(tmp_path, index[name])
        assert have.grid == want.grid and have.q.dtype == want.q.dtype, have.grid
        assert np.array_equal(have.dequantised(), want.dequantised()), have.grid
        for part in ("q", "scale", "zero", "steps", "channel_scale"):
            a, b = getattr(have, part), getattr(want, part)
            assert (a is None) == (b is None), (have.grid, part)
            assert a is None or (a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b)), (have.grid, part)


def test_bytes_are_where_the_index_says(tmp_path: Path) -> None:
    weights = store(tmp_path, [Grid(4), Grid(4, False, 16), Grid(4, True, 16, True)])
    raw, index = (tmp_path / DATA).read_bytes(), load_index(tmp_path / INDEX)
    for name, want in weights.items():
        own = index[name]
        assert all(p.offset % 64 == 0 for p in (own.q, own.scale, own.steps, own.zero) if p)
        count = SHAPE[0] * SHAPE[1]
        packed = np.frombuffer(raw, np.uint8, (count + 1) // 2, own.q.offset)
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[:count].astype(int)
        if want.grid.symmetric:
            nibbles = np.where(nibbles > 7, nibbles - 16, nibbles)
        assert np.array_equal(nibbles.reshape(SHAPE), want.q), name
    steps = index["w2"].steps
    assert steps is not None and steps.shape == (3, 6)
    assert np.array_equal(np.frombuffer(raw, np.uint8, 18, steps.offset).reshape(3, 6).T, weights["w2"].steps)
    scale = index["w1"].scale
    assert scale.shape == (6, 3)  # plain blocks keep a scale each
    assert np.array_equal(np.frombuffer(raw, "<f4", 18, scale.offset).reshape(6, 3), weights["w1"].scale)


def test_eight_bits_are_mapped(tmp_path: Path) -> None:
    store(tmp_path, [Grid(8)])
    q = weight_at(tmp_path, load_index(tmp_path / INDEX)["w0"]).q
    assert not q.flags.owndata and not q.flags.writeable


def test_a_short_or_missing_file_is_named(tmp_path: Path) -> None:
    store(tmp_path, [Grid(4), Grid(8)])
    index = load_index(tmp_path / INDEX)
    (tmp_path / DATA).write_bytes((tmp_path / DATA).read_bytes()[:100])
    for own in index.values():
        with pytest.raises(RingstepError, match=r"quantised.bin: no .* there .*quantise again"):
            weight_at(tmp_path, own)
    (tmp_path / DATA).unlink()
    with pytest.raises(RingstepError, match=r"quantised.bin: no .* there"):
        weight_at(tmp_path, index["w0"])


INDEXES: dict[str, bytes] = {
    "a list": b"[]", "deep": b"[" * 100_000, "UTF-16": "{}".encode("utf-16"), "no object": b'{"w0": 5}',
    "no scale": b'{"w0": {"q": null}}', "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(INDEXES[name])
    with pytest.raises(RingstepError, match=r"quantised\.json"):
        load_index(tmp_path / INDEX)


@pytest.mark.parametrize(("key", "value"), [("offset", -64), ("offset", 1.5), ("shape", [-1, 45]), ("file", "../q.bin"),
                                            ("file", 5), ("shape", 7)])  # fmt: skip
def test_places_that_are_none(key: str, value: object, tmp_path: Path) -> None:
    store(tmp_path, [Grid(8)])
    body = json.loads((tmp_path / INDEX).read_text())
    body["w0"]["scale"][key] = value
    (tmp_path / INDEX).write_text(json.dumps(body))
    with pytest.raises(RingstepError, match=r"quantised\.json: no index"):
        load_index(tmp_path / INDEX)


def test_weights_in_a_pipe(tmp_path: Path) -> None:
    """Refused at once: to open it would wait for ever."""
    store(tmp_path, [Grid(4), Grid(8)])
    index = load_index(tmp_path / INDEX)
    (tmp_path / DATA).unlink()
    os.mkfifo(tmp_path / DATA)
    for own in index.values():
        with pytest.raises(RingstepError, match="not an ordinary file"):
            weight_at(tmp_path, own)


def test_numbers_of_another_grid_are_refused(tmp_path: Path) -> None:
    store(tmp_path, [Grid(4), Grid(8, False)])
    index = load_index(tmp_path / INDEX)
    wrong = Stored(Grid(4), SHAPE, index["w1"].q, index["w0"].scale)
    with pytest.raises(RingstepError, match="uint8"):
        weight_at(tmp_path, wrong)


@pytest.mark.parametrize(("grid", "reason"), [
    (None, "float16"), (Grid(4, False), "zero points"), (Grid(4, block=32), "two_level = true"),
    (Grid(8, block=32), "plain blocks"), (Grid(2), "no weights of 2 bits"), (Grid(4), ""), (Grid(8), ""),
    (Grid(16), ""), (Grid(4, True, 32, True), ""),
])  # fmt: skip
def test_qdq_refuses_what_htp_does_not_keep(grid: Grid | None, reason: str) -> None:
    assert reason in refusal(grid) and bool(refusal(grid)) == bool(reason)
