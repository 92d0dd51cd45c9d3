"""The published figures as data: what the table says, and what the reader refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringstep.errors import RingstepError
from ringstep.profiling.checks import checked
from ringstep.profiling.profile import Profile
from ringstep.profiling.published import _TOML, load_published

# Typed in again from the published table, apart from the data file: ms a layer, None where nothing was measured.
SPARK = {
    ("sliding", "roll", 512): (1.689, 0.912, 0.917),
    ("sliding", "ring", 512): (1.486, None, 0.838),
    ("sliding", "join", 512): (1.483, None, None),
    ("full", "roll", 1024): (1.559, 1.129, 1.127),
    ("full", "append", 1024): (1.567, None, None),
    ("full", "roll", 4096): (2.964, 1.681, 1.662),
}
TTS = {"talker": (15.8, 29.9, 29.8), "predictor": (33.9, 65.0, 72.3), "vocoder": (182, 21.7, 109)}
GENIE = {"Qwen3-0.6B": 125, "Llama-3.2-1B": 67, "Qwen3-1.7B": 57, "Llama-3.2-3B": 26.5, "Qwen3-4B": 26,
         "Llama-3.1-8B": 13}  # fmt: skip


def of_system(system: str) -> list[Profile]:
    return [p for p in load_published().profiles if p.versions["system"] == system]


def test_every_figure_of_the_spark_table_is_there_and_no_other() -> None:
    found = {(p.subject.part, p.subject.layout, p.subject.context, p.subject.precision): p.median_us / 1000
             for p in of_system("qnn") if p.subject.recipe == "spark2_5"}  # fmt: skip
    want = {(*key, precision): ms for key, row in SPARK.items()
            for precision, ms in zip(("fp16", "w8a16", "w4a16"), row, strict=True) if ms is not None}  # fmt: skip
    assert found == pytest.approx(want)
    tanh = [p for p in of_system("qnn") if p.subject.recipe == "spark2_5 (tanh GELU)"]
    assert [(p.median_us, p.subject.layout) for p in tanh] == [(1535.0, "join")]


def test_counts_are_the_step_s() -> None:
    counts = {p.subject.part: p.subject.count for p in of_system("qnn") if p.subject.model == "Spark-X2.5-1.7B"}
    assert counts == {"sliding": 21, "full": 7}


def test_the_placement_table_of_speech() -> None:
    for part, row in TTS.items():
        found = {p.place.unit: p.median_us / 1000 * p.subject.count for p in of_system("qnn") if p.subject.part == part}
        assert found == pytest.approx(dict(zip(("npu", "gpu", "cpu"), row, strict=True))), part
    # "2.25 each" was published too, by its own rounding.
    predictor = next(p for p in of_system("qnn") if p.subject.part == "predictor" and p.place.unit == "npu")
    assert predictor.subject.count == 15 and predictor.median_us == pytest.approx(2250, abs=15)


def test_rates_of_other_systems() -> None:
    assert {p.subject.model: 1e6 / p.median_us for p in of_system("genie")} == pytest.approx(GENIE)
    (llama,) = of_system("executorch")
    assert (1e6 / llama.median_us, llama.place.chip) == (pytest.approx(54.9), "sm8650")
    assert load_published().gates["llama3.2-1b"] == (45, 15, 18)


def test_every_profile_is_one_that_the_store_takes() -> None:
    for profile in load_published().profiles:
        assert checked(profile, profile.job).origin == "published" and len(profile.times_us) == 1


def test_rounding_is_half_of_the_last_digit() -> None:
    table = load_published()
    by_ms = {round(p.median_us / 1000, 3): table.rounding_us[p.job] for p in table.profiles}
    assert by_ms[1.689] == pytest.approx(0.5) and by_ms[182.0] == pytest.approx(500)
    assert by_ms[2.26] == pytest.approx(50 / 15)
    llama = next(p for p in table.profiles if p.subject.model == "Llama-3.1-8B")
    # 12.5 tokens a second would have been published as 13 too: 80 ms.
    assert llama.median_us + table.rounding_us[llama.job] == pytest.approx(80_000)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('ms = "1.689"', "ms = 1.689", "want a figure as text"),
        ('ms = "1.689"', 'ms = "-1.689"', "want a figure as text"),
        ('ms = "1.689"', 'ms = "0.000"', "want a figure as text"),
        ('ms = "1.689"', 'ms = "nan"', "want a figure as text"),
        ('ms = "1.689"', 'ms = "1.689", tokens_per_second = "5"', "either ms or tokens_per_second"),
        ('ms = "1.689"', 'calls = 1', "either ms or tokens_per_second"),
        ('layout = "ring"', 'layout = "rings"', "unknown layout 'rings' (did you mean ring?)"),
        ('model = "spark-x2_5-1_7b"', 'model = "spark"', "unknown model 'spark'"),
        ('part = "sliding"', 'part = "slid\\u0007ing"', "no short line of text"),
        ('unit = "gpu"', 'unit = "tpu"', "want npu, gpu or cpu"),
        ("hidden = 2048", "hidden = 2048.0", "no whole number"),
        ("hidden = 2048", "hiden = 2048", "unknown key 'hiden' (did you mean hidden?)"),
        ("memory_gb_s = 51.2", "memory_gb_s = nan", "no positive number"),
        ("memory_gb_s = 51.2", "memory_gb_s = -1", "no positive number"),
        ("[260, 19, 23]", "[260, 19]", "want tokens a second, dB and perplexity"),
        ('{row = "GPU", part = "talker"', '{row = "NPU", part = "talker"', "is there twice"),
        ("[gate]", "[gates]", "unknown key 'gates'"),
        ("[gate]", "[gate", "published.toml"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = _TOML.read_text()
    assert old in text
    path = tmp_path / "published.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RingstepError) as error:
        load_published(path)
    assert message in str(error.value) and "\n" not in str(error.value)
