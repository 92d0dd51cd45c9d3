"""Composing a step: the published table reproduced, bounds, and parts that no step has."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporters.compose_command import compose as command
from ringstep import console
from ringstep.errors import RingstepError
from ringstep.profiling.compose import all_full, compose
from ringstep.profiling.profile import Place, Profile, Subject

SPARK = ("Spark-X2.5-1.7B", "--device", "galaxy-s25", "--published")


def part(name: str, ms: float | list[float], count: int = 1, context: int = 1024, **other: Any) -> Profile:
    times = tuple(1000 * t for t in (ms if isinstance(ms, list) else [ms]))
    layout = other.pop("layout", "roll")
    subject = Subject("m", "r", name, count, 1, layout, "w4a16", context)
    profile = Profile(subject, Place("galaxy-s25", "sm8750", "qnn", "npu"), "synthetic", f"made {name} {ms}", "", times)
    for key, value in other.items():
        holder = "subject" if hasattr(subject, key) else "place"
        changed = dataclasses.replace(getattr(profile, holder), **{key: value})
        profile = dataclasses.replace(profile, **{holder: changed})
    return profile


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    assert console.run(command, [*args, "--json"]) == 0
    body: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["steps"]
    return body


# The published sums: precision, context, the step, every layer full, how many times as fast, each as rounded there.
@pytest.mark.parametrize(
    ("precision", "context", "step", "flat", "times"),
    [
        ("w4a16", 1024, "27.2", "31.6", "1.16"),
        ("w4a16", 4096, "30.9", "46.5", "1.51"),
        ("fp16", 1024, None, None, "0.94"),
    ],
)
def test_the_published_sums_are_reproduced(precision: str, context: int, step: str | None, flat: str | None, times: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (body,) = run_json(capsys, *SPARK, "--precision", precision, "--context", str(context), "--layout", "roll")
    if step and flat:
        # 27.146 is the parts' sum, and 27.2 what was published: within the parts' rounding lies what rounds to it.
        assert round(body["low_ms"], 1) <= float(step) <= round(body["high_ms"] + 1e-9, 1)
        assert f"{body['every_layer_full_ms']:.1f}" == flat
    assert f"{body['times_faster_than_full']:.2f}" == times
    assert body["layers_only"] and body["missing"] == ["head"]


def test_the_numbers_behind_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    (body,) = run_json(capsys, *SPARK, "--precision", "w4a16", "--context", "1024", "--layout", "roll")
    assert [(t["count"], t["ms"]) for t in body["terms"]] == [(21, 0.917), (7, 1.127)]
    assert body["ms"] == pytest.approx(21 * 0.917 + 7 * 1.127) == pytest.approx(27.146)
    assert body["high_ms"] - body["ms"] == pytest.approx(28 * 0.0005) == pytest.approx(body["ms"] - body["low_ms"])
    assert console.run(command, [*SPARK, "--precision", "w4a16", "--layout", "roll"]) == 0
    text = capsys.readouterr().out
    assert "21 x 0.917" in text and "27.15 ms (between 27.13 and 27.16), 36.8 tokens/s, layers only" in text
    assert "published" in text and max(map(len, text.splitlines()[:9])) <= 80


def test_speech_by_unit(capsys: pytest.CaptureFixture[str]) -> None:
    for unit, ms in (("npu", 15.8 + 33.9), ("gpu", 29.9 + 65.0), ("cpu", 29.8 + 72.3)):
        (body,) = run_json(capsys, "qwen3-tts-0.6b", *SPARK[1:], "--precision", "fp16", "--unit", unit)
        assert body["ms"] == pytest.approx(ms) and body["missing"] == []


def test_ring_at_w4a16_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    (body,) = run_json(capsys, *SPARK, "--precision", "w4a16", "--layout", "ring")
    assert body["missing"] == ["full", "head"] and body["tokens_per_second"] is None
    assert body["times_faster_than_full"] is None


def test_the_store_s_profiles_compose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ringstep.profiling.store import add_all, open_store

    stored = [dataclasses.replace(p, origin="published") for p in (part("sliding", 1.0, 3), part("full", 2.0, 1))]
    with open_store(tmp_path / "p.db", write=True) as store:
        add_all(store, [*stored, dataclasses.replace(part("head", 4.0, layout=""), origin="published")])
    args = ("M", "--device", "Samsung Galaxy S25", "--precision", "w4a16", "--db", str(tmp_path / "p.db"))
    (body,) = run_json(capsys, *args)
    assert body["ms"] == pytest.approx(3 + 2 + 4) and body["missing"] == [] and not body["layers_only"]
    assert body["tokens_per_second"] == pytest.approx(1000 / 9) and body["low_ms"] is None
    assert body["every_layer_full_ms"] == pytest.approx(4 * 2 + 4)
    assert console.run(command, [*args, "--context", "4096"]) == 2
    assert "no full layer of M at context 4096, w4a16; measured: 1024" in capsys.readouterr().err


def test_random_parts_against_a_sum_by_hand() -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        sizes = {"sliding": int(random.integers(1, 40)), "full": int(random.integers(1, 40)), "head": 1}
        times = {name: list(random.uniform(0.1, 9, int(random.integers(5, 30)))) for name in sizes}
        parts = [part(name, times[name], sizes[name]) for name in sizes]
        have = compose(parts)
        middle = {name: sorted(t)[len(t) // 2] if len(t) % 2 else sum(sorted(t)[len(t) // 2 - 1 : len(t) // 2 + 1]) / 2
                  for name, t in times.items()}  # fmt: skip
        assert have.ms == pytest.approx(sum(sizes[name] * middle[name] for name in sizes))
        assert have.low_ms is not None and have.high_ms is not None and have.low_ms <= have.ms <= have.high_ms
        assert have.low_ms >= sum(sizes[n] * min(times[n]) for n in sizes) - 1e-9
        flat = all_full(parts)
        assert flat and compose(flat).ms == pytest.approx((sizes["sliding"] + sizes["full"]) * middle["full"]
                                                          + middle["head"])  # fmt: skip


def test_bounds_hold_what_other_runs_give() -> None:
    """95 % bounds of a median, by drawing whole runs anew."""
    random = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        have = compose([part("full", list(random.exponential(1.0, 41)), 2)])
        assert have.low_ms is not None and have.high_ms is not None
        hits += have.low_ms <= 2 * np.log(2) <= have.high_ms
    assert 180 <= hits <= 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "must have one model"),
        ({"recipe": "other"}, "must have one recipe"),
        ({"precision": "fp16"}, "must have one precision, these have fp16, w4a16"),
        ({"tokens": 16}, "must have one number of tokens"),
        ({"device": "galaxy-s24"}, "must have one device"),
        ({"unit": "gpu"}, "must have one unit"),
        ({"runtime": "onnx"}, "must have one runtime"),
    ],
)
def test_parts_of_different_steps_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RingstepError, match=message):
        compose([part("full", 1.0), part("sliding", 1.0, **change)])


def test_what_no_step_has_is_refused() -> None:
    with pytest.raises(RingstepError, match="nothing to compose"):
        compose([])
    with pytest.raises(RingstepError, match=r"full is there 2 times .roll at context 1024, roll at context 4096"):
        compose([part("full", 1.0), part("full", 2.0, context=4096)])
    with pytest.raises(RingstepError, match="roll at context 1024, append at context 1024"):
        compose([part("full", 1.0), part("full", 2.0, layout="append")])
    with pytest.raises(RingstepError, match="whole step is no part"):
        compose([part("full", 1.0), part("step", 2.0)])
    with pytest.raises(RingstepError, match="counted 6 times, the step has 7"):
        compose([part("full", 1.0, 6)], expected={"full": 7})
    with pytest.raises(RingstepError, match="the step has none"):
        compose([part("linear", 1.0)], expected={"full": 1})


def test_a_window_is_the_same_at_any_context_and_that_is_said() -> None:
    have = compose([part("sliding", 1.0, 3, context=512), part("full", 1.0, 1, context=4096)])
    assert have.context == 4096 and have.notes[0].startswith("sliding was measured at context 512")
    assert all("was measured at" not in note for note in compose([part("sliding", 1.0), part("full", 1.0)]).notes)


def test_the_order_of_parts_does_not_matter() -> None:
    parts = [part("sliding", 1.0, 3), part("full", 2.0, 2), part("head", 5.0, layout="")]
    assert {compose(order).ms for order in itertools.permutations(parts)} == {12.0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["Spark-X2.5-1.7", *SPARK[1:], "--precision", "fp16"], "did you mean Spark-X2.5-1.7B?"),
        ([*SPARK, "--precision", "fp16"], "sliding was measured in layouts join, ring, roll: choose one with --layout"),
        ([*SPARK, "--precision", "w2a16"], "no part measured on galaxy-s25 npu in w2a16; there are"),
        (["Spark-X2.5-1.7B", "--device", "galaxy-s25", "--precision", "fp16"], "--published has what others measured"),
    ],
)
def test_refusals_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str],
                               tmp_path: Path) -> None:  # fmt: skip
    given = args if "--published" in args else [*args, "--db", str(tmp_path / "none.db")]
    assert console.run(command, given) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
