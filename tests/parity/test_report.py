"""Reports, greedy answers and their parity, on an engine that is a table of next tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringstep.contract import CacheSpec, GraphSpec, MaskSpec, RotarySpec, StepSpec, io_tensors
from ringstep.engines.base import Arrays
from ringstep.parity.report import (
    Position,
    Report,
    Truth,
    answer_parity,
    generate,
    stream,
    teacher_forced,
    threshold_db,
)
from ringstep.session import DecodeSession

VOCAB, CONTEXT, EOS = 256, 16, 9
Row = Callable[[int], np.ndarray]


def count_up(token: int) -> np.ndarray:
    """Logits that say token + 1."""
    row = (np.arange(VOCAB) % 7 / 100).astype(np.float32)
    row[(token + 1) % VOCAB] = 8
    return row


class TableEngine:
    """Logits from a function of the token; keys are the token, values twice that."""

    name = "table"

    def __init__(self, row: Row) -> None:
        self.row, self.calls = row, [0]

    def run(self, n: int, inputs: Arrays, outputs: Arrays) -> None:
        ids = inputs["input_ids"]
        self.calls.append(n)
        outputs["logits"][:] = [self.row(int(i)) for i in ids]
        outputs["new_key_0"][0, 0, :, :] = ids[:, None]
        outputs["new_value_0"][0, 0, :, :] = 2.0 * ids[:, None] + 1

    def close(self) -> None:
        self.calls.clear()


def session(row: Row = count_up, chunks: tuple[int, ...] = (1, 4), **changes: Any) -> DecodeSession:
    rotary, masks = (RotarySpec("r", (0.5,)),), (MaskSpec("full", "append", CONTEXT - 1, None),)
    caches = (CacheSpec(0, "append", CONTEXT - 1, 1, 2, "float32", "r", "full"),)
    graphs = tuple(GraphSpec(n, *io_tensors(n, VOCAB, 4, "float32", rotary, masks, caches, True)) for n in chunks)
    fields = {"dtype": "float32", "activations": "native"} | changes
    spec = StepSpec(
        recipe="t", model="t", vocab=VOCAB, hidden=4, context=CONTEXT, mask_value=-1e4, eos=(EOS,), rotary=rotary,
        masks=masks, caches=caches, graphs=graphs, **fields,
    )  # fmt: skip
    return DecodeSession(spec, TableEngine(row))


def truth(ids: list[int], fed: int | None = None) -> Truth:
    """What count_up says of a text of which the first `fed` ids were fed."""
    count = len(ids) if fed is None else fed
    keys = np.repeat(np.array(ids[:count], float)[None, :, None], 2, axis=2)
    logits = np.array([count_up(i) for i in ids[:count]])
    return Truth("by hand", ids, logits, [(np.arange(count), keys, 2 * keys + 1)])


def answered(prompt: list[int], count: int) -> Truth:
    ids = prompt + [prompt[-1] + 1 + i for i in range(count)]
    return truth(ids, len(ids) - 1)


def test_stream_stops_at_eos_limit_and_context() -> None:
    ids, logits = generate(session(), [2, 3, 4, 5, 6], 10, [EOS])
    assert ids == [7, 8, 9] and logits.shape == (5 + 2, VOCAB)
    ids, logits = generate(session(), [2, 3, 4, 5, 6], 2, [EOS])
    assert ids == [7, 8] and logits.shape == (5 + 1, VOCAB)
    ids, logits = generate(session(), [0] * 12, 99, [])
    assert ids == [1, 2, 3, 4, 5] and len(logits) == CONTEXT  # the last one needs no slot of its own
    assert generate(session(), [0] * CONTEXT, 99, [])[0] == [1]
    assert generate(session(), [8], 10, [EOS, 3])[0] == [9]


def test_stream_feeds_chunks_and_ticks() -> None:
    ticks: list[int] = []
    made = session()
    parts = list(stream(made, [1] * 6, 3, [], ticks.append))
    assert ticks == [4, 2, 1, 1] and [len(logits) for _, logits in parts] == [6, 1, 1]
    assert [int(token) for token, _ in parts] == [2, 3, 4]
    assert made.position == 8
    list(stream(made, [1], 1, []))
    assert made.position == 1  # it starts afresh


def test_teacher_forced_on_an_exact_engine() -> None:
    ids = [1, 5, 3, 2, 8, 0, 4]
    report = teacher_forced(session(), truth(ids))
    assert [p.token for p in report.positions] == ids
    assert report.min_db == 300.0 and report.failures == []
    assert [(c.key_db, c.value_db) for c in report.caches] == [(300.0, 300.0)]
    summary = report.summary()
    assert summary["passed"] and summary["top1"] == 1.0 and summary["tokens"] == 7
    assert summary["kl"] == {"mean": 0.0, "max": 0.0} and summary["caches_db"]["min"] == 300.0
    assert (summary["engine"], summary["simulated"], summary["reference"]) == ("table", False, "by hand")


def test_teacher_forced_finds_one_wrong_position() -> None:
    def wrong(token: int) -> np.ndarray:
        return np.roll(count_up(token), 3) if token == 8 else count_up(token)

    report = teacher_forced(session(wrong), truth([1, 5, 8, 2]))
    assert [p.top1 for p in report.positions] == ["equal", "equal", "different", "equal"]
    assert report.failures[0].startswith("logits -") and "at position 2, below 90 dB" in report.failures[0]
    assert report.failures[1:] == ["another first token at position 2"]
    assert teacher_forced(session(wrong), truth([1, 5, 2])).failures == []
    # Gated lower, the wrong token still fails.
    assert teacher_forced(session(wrong), truth([8]), threshold=-50.0).failures == ["another first token at position 0"]


def test_failures() -> None:
    report = Report("e", "r", "float32", "native", False, 30.0)
    report.positions = [Position(i, 0, 40.0 - i, "equal", 1.0, 0.0) for i in range(3)]
    assert report.failures == [] and report.min_db == 38.0
    report.threshold_db = 38.5
    assert report.failures == ["logits 38.0 dB at position 2, below 38 dB"]
    report.threshold_db = 30.0
    report.positions.append(Position(3, 0, 31.0, "ambiguous", 1.0, 0.0))
    assert report.failures == []
    report.positions += [Position(i, 0, 31.0, "different", 1.0, 0.0) for i in (4, 5, 6)]
    assert report.failures == ["another first token at position 4 and 2 more"]
    report.answer = {"verdict": "different"}
    assert report.failures[1] == "another answer to the prompt"
    assert not report.summary()["passed"] and report.summary()["caches_db"] is None
    assert (report.summary()["ambiguous"], report.summary()["different"]) == (1, 3)


def test_thresholds() -> None:
    assert threshold_db(session().spec, "ort") == 90.0
    assert threshold_db(session().spec, "qnn-sim") == 20.0
    accurate = session(activations="accurate").spec
    assert threshold_db(accurate, "qnn-sim") == 35.0 and threshold_db(accurate, "ort") == 90.0


def test_equal_answer() -> None:
    report = answer_parity(session(), answered([1, 2], 3), 2, [EOS])
    assert report.answer == {"reference_ids": [3, 4, 5], "ids": [3, 4, 5], "prompt_tokens": 2, "verdict": "equal"}
    assert len(report.positions) == 4 and report.failures == []
    assert report.caches[0].key_db == 300.0


@pytest.mark.parametrize("k", [0, 1, 2])
def test_answer_that_diverges(k: int) -> None:
    """Compared up to and with the position where the tokens part, not after; caches of other texts not at all."""
    turn = 2 + k

    def wrong(token: int) -> np.ndarray:
        return np.roll(count_up(token), 5) if token == turn else count_up(token)

    want = answered([1, 2], 4)
    report = answer_parity(session(wrong), want, 2, [EOS])
    assert report.answer is not None and report.answer["verdict"] == "different"
    assert report.answer["ids"][:k] == want.ids[2 : 2 + k] and report.answer["ids"][k] != want.ids[2 + k]
    assert len(report.positions) == 2 + k and report.caches == []
    assert [p.top1 for p in report.positions] == ["equal"] * (1 + k) + ["different"]
    assert report.failures[-1] == "another answer to the prompt"


def test_answer_that_stops_early_is_different() -> None:
    """An engine that says an eos which the original does not."""

    def stops(token: int) -> np.ndarray:
        return np.where(np.arange(VOCAB) == EOS, 9.0, 0.0) if token == 4 else count_up(token)

    report = answer_parity(session(stops), answered([1, 2], 5), 2, [EOS])
    assert report.answer is not None
    assert report.answer["ids"] == [3, 4, 9] and report.answer["verdict"] == "different"


def test_answer_turned_by_a_near_tie_is_ambiguous() -> None:
    ids = [1, 2, 3]
    rows = np.array([count_up(i) for i in ids[:2]], np.float64)
    rows[1] = np.linspace(-3, -2, VOCAB)
    rows[1, [3, 5]] = 1.0, 0.999

    def noisy(token: int) -> np.ndarray:
        noise = 0.01 * np.where(np.arange(VOCAB) % 4 == 1, 1, -1)
        return rows[1] + noise if token == 2 else count_up(token)

    report = answer_parity(session(noisy), Truth("r", ids, rows, []), 2, [EOS], threshold=20.0)
    assert report.answer is not None
    assert report.answer["ids"] == [5] and report.answer["verdict"] == "ambiguous"
    assert report.failures == []
