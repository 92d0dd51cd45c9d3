"""Runs kept whole: every entry of a ring as it was when it was new, and comparisons of any two runs."""

from __future__ import annotations

import numpy as np
import pytest

from ringstep.contract import CacheSpec, GraphSpec, MaskSpec, RotarySpec, StepSpec, io_tensors
from ringstep.engines.base import Arrays
from ringstep.parity.metrics import max_rel
from ringstep.parity.report import Report, Truth, steps
from ringstep.parity.runs import compare_runs, greedy, record
from ringstep.session import DecodeSession

VOCAB, CONTEXT, WINDOW = 12, 40, 5


class CountEngine:
    """Logits say token + 1; keys of the ring are the token, values its square."""

    name = "count"

    def __init__(self) -> None:
        self.calls: list[int] = []

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        self.calls.append(n)
        ids = inputs["input_ids"].astype(np.float32)
        outputs["logits"][:] = np.eye(VOCAB, dtype=np.float32)[(inputs["input_ids"] + 1) % VOCAB]
        outputs["new_key_0"][0, 0], outputs["new_value_0"][0, 0] = ids[:, None], ids[:, None] ** 2

    def close(self) -> None:
        pass


def session(*chunks: int) -> DecodeSession:
    rotary, masks = (RotarySpec("r", (0.5,)),), (MaskSpec("w", "ring", WINDOW - 1, WINDOW),)
    caches = (CacheSpec(0, "ring", WINDOW - 1, 1, 2, "float32", "r", "w", WINDOW),)
    graphs = tuple(GraphSpec(n, *io_tensors(n, VOCAB, 4, "float32", rotary, masks, caches, True)) for n in chunks)
    spec = StepSpec(recipe="t", model="t", vocab=VOCAB, hidden=4, context=CONTEXT, dtype="float32", mask_value=-1e4,
                    eos=(), rotary=rotary, masks=masks, caches=caches, graphs=graphs)  # fmt: skip
    return DecodeSession(spec, CountEngine())


@pytest.mark.parametrize(("chunks", "each"), [((1,), None), ((1, 3), None), ((1, 3), 1), ((1, 4), 4)])
def test_every_entry_of_a_ring_is_kept(chunks: tuple[int, ...], each: int | None) -> None:
    ids = [i * 7 % VOCAB for i in range(23)]
    ticks: list[int] = []
    made = session(*chunks)
    run = record(made, ids, "it", ticks.append, each)
    ((positions, keys, values),) = run.caches
    assert positions.tolist() == list(range(23)) and sum(ticks) == 23
    assert keys.shape == (1, 23, 2) and keys[0, :, 1].tolist() == ids
    assert values[0, :, 0].tolist() == [i * i for i in ids]
    assert run.logits.argmax(1).tolist() == [(i + 1) % VOCAB for i in ids] and (run.source, run.ids) == ("it", ids)
    assert each != 1 or set(made.engine.calls) == {1}  # type: ignore[attr-defined]
    np.testing.assert_array_equal(record(made, ids, "it", each=each).logits, run.logits)  # it starts afresh


def test_a_chunk_longer_than_the_ring_shows_what_is_left() -> None:
    run = record(session(1, 6), list(range(12)), "it", each=6)
    assert run.caches[0][0].tolist() == [2, 3, 4, 5, 8, 9, 10, 11]


def truth(logits: np.ndarray, positions: list[int], offset: float = 0.0) -> Truth:
    keys = np.array(positions, float)[None, :, None] + 1 + offset
    return Truth("by hand", list(range(len(logits))), logits, [(np.array(positions), keys, 2 * keys)])


def test_runs_of_other_lengths_are_compared_as_far_as_both_go() -> None:
    logits = np.random.default_rng(0).standard_normal((8, VOCAB))
    noisy = logits + 0.01 * np.sign(logits)
    report = Report("e", "r", "float32", "native", False, 30.0)
    compare_runs(report, truth(logits, [4, 5, 6, 7]), truth(noisy[:6], [0, 1, 2, 3, 4, 5], 0.1), copied=1)
    assert [p.position for p in report.positions] == [1, 2, 3, 4, 5]
    error = 10 * np.log10(np.square(logits[1:6]).sum() / (5 * VOCAB * 1e-4))
    assert report.pooled_db == pytest.approx(error)
    for p in report.positions:
        assert p.max_rel == pytest.approx(0.01 / np.abs(logits[p.position]).max())
    assert report.summary()["max_rel"] == max(p.max_rel for p in report.positions)
    want = np.array([5.0, 6.0])  # keys at positions 4 and 5, which both hold
    db = 10 * np.log10(np.square(want).sum() / (2 * 0.1**2))
    assert [(c.layer, c.key_db, c.value_db) for c in report.caches] == [(0, pytest.approx(db), pytest.approx(db))]


def test_caches_without_a_common_position_are_left_out() -> None:
    logits = np.eye(VOCAB)[:6]
    report = Report("e", "r", "float32", "native", False, 30.0)
    compare_runs(report, truth(logits, [0, 1]), truth(logits, [4, 5]))
    assert report.caches == [] and report.summary()["caches_db"] is None and report.pooled_db == 300.0


def test_greedy() -> None:
    """The answer lies at 3..6; the run turns its third token over."""
    logits = np.eye(256)[[1, 2, 3, 4, 5, 6, 7]] * 5
    other = logits.copy()
    other[4, 9] = 9
    good, bad = truth(logits, [0]), truth(other, [0])
    assert greedy(good, good, 3, 4) == {"tokens": 4, "same": 4, "verdict": "equal"}
    assert greedy(good, bad, 3, 4) == {"tokens": 4, "same": 2, "verdict": "different"}
    assert greedy(good, bad, 1, 3) == {"tokens": 3, "same": 3, "verdict": "equal"}
    assert greedy(good, truth(logits[:5], [0]), 3, 4) is None  # not fed so far
    assert greedy(good, bad, 0, 0) is None
    tie = logits.copy()
    tie[4, 9] = 4.99
    near = tie.copy()
    near[4] += np.where(np.arange(256) % 4 == 1, 0.05, -0.05)  # 9 up, 5 up: still the first
    assert greedy(truth(tie, [0]), truth(near, [0]), 3, 4) == {"tokens": 4, "same": 4, "verdict": "equal"}
    near[4, 5] -= 0.1
    assert greedy(truth(tie, [0]), truth(near, [0]), 3, 4) == {"tokens": 4, "same": 2, "verdict": "ambiguous"}


def test_max_rel() -> None:
    assert max_rel(np.array([1.0, -4.0]), np.array([1.5, -4.0])) == 0.125
    assert max_rel(np.array([1.0, 2.0]), np.array([1.0, np.nan])) == float("inf")
    assert max_rel(np.zeros(2), np.zeros(2)) == 0.0


@pytest.mark.parametrize("count", [*range(1, 20), 32, 48])
@pytest.mark.parametrize("chunks", [(1,), (4,), (1, 4), (1, 16), (1, 2, 8)])
def test_every_text_of_two_tokens_runs_the_decode_graph(chunks: tuple[int, ...], count: int) -> None:
    spec = session(*chunks).spec
    sizes = steps(spec, count)
    assert sum(sizes) == count and min(sizes) >= 1 and max(sizes) <= max(chunks)
    if min(chunks) == 1 < max(chunks) and count > 1:
        # The chunk's graph too, padded if need be; a fault of either must show.
        assert sizes[-1] == 1 and (sizes[0] > 1 or count < 4)
