"""Spark-X2.5 against its golden logits, through ONNX Runtime and eager torch, in every layout and chunk size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipe_runs import decibels, feed, ort_session, torch_session

from exporters.line import Job, Line
from ringstep.checkpoint import Checkpoint
from ringstep.parity.report import generate
from ringstep.session import DecodeSession

CONTEXT = 64
LAYOUTS: dict[str, dict[str, Any]] = {
    "ring": {},
    "roll": {"sliding": "roll"},
    "join": {"sliding": "join", "full": "join"},
    "append": {"sliding": "append"},
    "roll everywhere": {"sliding": "roll", "full": "roll"},
}
CHUNKS = (1, 5, 16, 20)  # the window is 16: a chunk of 20 passes it
Golden = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def ring(spark: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeSession]:
    with ort_session(spark, tmp_path_factory.mktemp("ring"), CONTEXT, CHUNKS) as session:
        yield session


@pytest.fixture(scope="module")
def layouts(
    spark: Checkpoint, golden: Golden, ring: DecodeSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    """Logits of the golden text by layout, token by token on ONNX Runtime."""
    found = {"ring": feed(ring, golden["input_ids"])}
    for name in ("roll", "join"):
        with ort_session(spark, tmp_path_factory.mktemp(name), CONTEXT, layout=LAYOUTS[name]) as session:
            found[name] = feed(session, golden["input_ids"])
    return found


@pytest.mark.parametrize("name", ["ring", "roll", "join"])
def test_decode_matches_the_golden(layouts: dict[str, np.ndarray], golden: Golden, name: str) -> None:
    found = decibels(golden["logits"], layouts[name])
    assert found.shape == (48,)
    assert found.min() >= 105
    assert np.median(found) >= 112


def test_layouts_agree(layouts: dict[str, np.ndarray]) -> None:
    for a, b in (("ring", "roll"), ("ring", "join"), ("roll", "join")):
        found = decibels(layouts[a], layouts[b])
        assert np.median(found) >= 112
        assert found.min() >= 110


@pytest.mark.parametrize("n", CHUNKS[1:])
def test_prefill_matches_the_golden(ring: DecodeSession, golden: Golden, n: int) -> None:
    assert decibels(golden["logits"], feed(ring, golden["input_ids"], n)).min() >= 105


def test_any_split_matches_the_golden(ring: DecodeSession, golden: Golden) -> None:
    ids, at, logits = golden["input_ids"], 0, []
    ring.reset()
    for count in (3, 1, 16, 7, 20, 1):  # padded, decoded, whole, padded, past the window, decoded
        logits.append(ring.step(ids[at : at + count]))
        at += count
    assert at == len(ids)
    assert decibels(golden["logits"], np.concatenate(logits)).min() >= 105


@pytest.mark.parametrize("n", [1, 20])
def test_greedy_answer(ring: DecodeSession, golden: Golden, n: int) -> None:
    if n == 1:
        ids = [int(i) for i in golden["input_ids"]]
        ring.reset()
        answer = []
        row = feed(ring, ids)[-1]
        for _ in golden["greedy_ids"]:
            answer.append(int(row.argmax()))
            if ring.position < CONTEXT:
                row = ring.step([answer[-1]])[-1]
    else:
        answer, _ = generate(ring, golden["input_ids"].tolist(), len(golden["greedy_ids"]), ())
    assert answer == golden["greedy_ids"].tolist()


@pytest.fixture(scope="module")
def double(spark: Checkpoint, golden: Golden) -> dict[str, np.ndarray]:
    """Logits by layout and n in float64, which leaves nothing to rounding."""
    found = {}
    for name, layout in LAYOUTS.items():
        chunks = (1,) if "roll" in name else CHUNKS
        session = torch_session(spark, CONTEXT, chunks, dtype="float64", layout=layout)
        for n in chunks:
            found[f"{name} {n}"] = feed(session, golden["input_ids"], n)
    return found


def test_layouts_and_chunks_are_one_function(double: dict[str, np.ndarray]) -> None:
    want = double["ring 1"]
    for name, have in double.items():
        assert decibels(want, have).min() >= 140, name  # logits leave the session as float32


def test_float64_matches_the_golden(double: dict[str, np.ndarray], golden: Golden) -> None:
    found = decibels(golden["logits"], double["ring 1"])
    assert found.min() >= 112  # the rotary angles stay float32 as in the reference model
    assert np.median(found) >= 125


@pytest.mark.parametrize("n", [5, 20])
def test_roll_takes_whole_chunks(spark: Checkpoint, golden: Golden, n: int) -> None:
    session = torch_session(spark, CONTEXT, (n,), dtype="float64", layout=LAYOUTS["roll"])
    count = 48 // n * n
    have = feed(session, golden["input_ids"][:count], n)
    assert decibels(golden["logits"][:count], have).min() >= 112


def test_the_line_in_fp16_with_accurate_activations(spark: Checkpoint, golden: Golden, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = Job(model=str(spark.path), out=out, format="onnx", precision="fp16", context=CONTEXT, parity=False)
    Line(job).run()
    with DecodeSession.open(job.out, threads=1) as session:
        assert (session.spec.dtype, session.spec.activations) == ("float16", "accurate")
        found = decibels(golden["logits"], feed(session, golden["input_ids"]))
    assert found.min() >= 35


@pytest.mark.parametrize("context", [64, 4096])
@pytest.mark.parametrize("layout", ["ring", "roll", "join", "append"])
def test_accurate_forms_cost_little_by_themselves(
    spark: Checkpoint, golden: Golden, layout: str, context: int
) -> None:
    """In float64 only the fit of GELU and the clamped exponent of masked slots are left: 55 dB on this model."""
    session = torch_session(spark, context, dtype="float64", activations="accurate", layout=LAYOUTS[layout])
    assert decibels(golden["logits"], feed(session, golden["input_ids"])).min() >= 54
