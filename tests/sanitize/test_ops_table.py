"""The committed operator tables: strict files, and what passes and lint ask of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringstep.errors import RingstepError
from sanitize.ops import table as tables
from sanitize.ops.catalog import all_forms
from sanitize.ops.table import FormResult, OpTable, Row, load, read, save

CHIPS = ("sm8550", "sm8650", "sm8750", "sm8850")


def row(form: str, low: float, high: float, snr: float, *, size: int = 1, ideal: float = 74.0) -> Row:
    return Row(form, low, high, size, snr, ideal, 1e-3, 2e-3, 0.0, 100, 0, 1)


def small() -> OpTable:
    sides = [row("SiLU/exp", -8.0, -4.0, 66.0), row("SiLU/exp", -4.0, -1.0, 60.0), row("SiLU/exp", -1.0, 1.0, 70.0)]
    nested = [row("Softmax/native", -s, s, 60.0 - s, size=n) for n in (64, 2048) for s in (1.0, 4.0, 16.0)]
    nested[-1] = row("Softmax/native", -16.0, 16.0, 11.0, size=2048)
    forms = [
        FormResult("SiLU/exp", 5, 5, "", tuple(sides)),
        FormResult("SiLU/native", 2, 2, "", (row("SiLU/native", -40.0, -17.0, 0.0, ideal=3.0),)),
        FormResult("Erf", 1, 0, "the plugin leaves it to the CPU", ()),
        FormResult("Softmax/native", 1, 1, "", tuple(nested)),
    ]
    return OpTable("sm8750", "v79", "fp16", "plugin 1", {form.name: form for form in forms})


def test_saved_and_read_again(tmp_path: Path) -> None:
    save(small(), tmp_path / "t.json")
    assert read(tmp_path / "t.json") == small()


def test_neighbouring_intervals_answer_with_the_worst_of_those_that_overlap() -> None:
    table = small()
    assert table.snr_db("SiLU/exp", -7.0, -5.0) == 66.0
    assert table.snr_db("SiLU/exp", -7.0, 0.5) == 60.0
    assert table.snr_db("SiLU/exp", 5.0, 9.0) is None
    assert table.worst("SiLU/exp", -7.0, 0.5) == row("SiLU/exp", -4.0, -1.0, 60.0)


def test_nested_intervals_answer_with_the_smallest_that_holds_the_range() -> None:
    table = small()
    assert table.snr_db("Softmax/native", -3.0, 3.0) == 56.0
    assert table.snr_db("Softmax/native", -9.0, 9.0) == 11.0
    assert table.snr_db("Softmax/native", -9.0, 9.0, size=100) == 44.0
    assert table.snr_db("Softmax/native", -9.0, 9.0, size=9999) == 11.0
    assert table.snr_db("Softmax/native", -99.0, 99.0, size=64) == 44.0  # wider than all: all that overlap


def test_a_function_that_runs_out_of_the_type_is_no_loss() -> None:
    worst = small().worst("SiLU/native", -20.0, -18.0)
    assert worst is not None and worst.snr_db == 0.0 and worst.loss_db == 3.0
    assert row("x", 0.0, 1.0, 70.0, ideal=300.0).loss_db == 4.0


def test_refused_and_unknown_forms_have_no_figures() -> None:
    table = small()
    assert table.snr_db("Erf", -1.0, 1.0) is None and table.worst("Nothing", -1.0, 1.0) is None
    assert table.of("Erf") == []
    assert [form.name for form in table.of("SiLU")] == ["SiLU/native", "SiLU/exp"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.pop("chip"), "want the keys"),
        (lambda d: d.update(extra=1), "want the keys"),
        (lambda d: d.update(format=2), "another version"),
        (lambda d: d["forms"].append(d["forms"][0]), "twice"),
        (lambda d: d["forms"][0]["rows"][0].pop(), "a row must hold"),
        (lambda d: d["forms"][0]["rows"][0].__setitem__(3, "60"), "snr_db is '60'"),
        (lambda d: d["forms"][0]["rows"][0].__setitem__(2, 1.5), "size is 1.5"),
        (lambda d: d["forms"][0].pop("refused"), "want the keys"),
        (lambda d: d["forms"][0].update(ops="5"), "ops"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, change, match: str) -> None:
    path = tmp_path / "t.json"
    save(small(), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(RingstepError, match=match):
        read(path)


def test_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{")
    for path in (tmp_path / "t.json", tmp_path / "none.json"):
        with pytest.raises(RingstepError, match="no operator table"):
            read(path)


def test_chips_find_their_table_by_any_name() -> None:
    assert load("galaxy-s25", "fp16") is load("galaxy-s25", "fp16")
    assert load("Galaxy-S25", "fp16").chip == "sm8750" and load("sm8750", "fp16").note == ""


def test_a_chip_that_was_not_measured_gets_the_nearest_architecture() -> None:
    table = load("sm8450", "fp16")
    assert table.chip == "sm8550" and table.note == "measured on sm8550 (v73), not on sm8450 (v69)"
    assert load("sc8380xp", "a16").chip == "sm8550" and load("qcs6490", "a16").chip == "sm8550"


def test_what_has_no_table_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RingstepError, match="qcs6490 has no fp16"):
        load("qcs6490", "fp16")
    with pytest.raises(RingstepError, match="precision 'fp61'"):
        load("sm8750", "fp61")
    with pytest.raises(RingstepError, match="unknown device"):
        load("sm1", "fp16")
    load.cache_clear()
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    with pytest.raises(RingstepError, match="ringstep ops --chip sm8750 --precision fp16 --out"):
        load("sm8750", "fp16")


@pytest.mark.parametrize("precision", ["fp16", "a16"])
@pytest.mark.parametrize("chip", CHIPS)
def test_the_committed_tables_hold_every_form(chip: str, precision: str) -> None:
    table = load(chip, precision)
    assert (table.chip, table.precision, table.note) == (chip, precision, "")
    wanted = [f.name for f in all_forms() if (f.cases if precision == "fp16" else f.a16_cases)]
    assert list(table.forms) == wanted
    assert all(bool(form.refused) != bool(form.rows) for form in table.forms.values())
    assert (tables.FOLDER / f"{chip}-{precision}.json").stat().st_size < 80_000


@pytest.mark.parametrize("chip", CHIPS)
def test_what_the_accurate_forms_rest_on(chip: str) -> None:
    """If a new version of the simulator turns one of these round, the passes must be looked at."""
    fp16, a16 = load(chip, "fp16"), load(chip, "a16")
    better = [
        ("SiLU/abs", "SiLU/native", -8.0, -4.0, 20.0),
        ("Gelu/relu", "Gelu/native", -4.0, 8.0, 10.0),
        ("Softmax/pow", "Softmax/native", -16.0, 16.0, 5.0),
        ("Exp/clip", "Exp/native", -1000.0, -100.0, 300.0),
        ("Reciprocal/pow", "Reciprocal/native", 1.0, 40.0, 3.0),
        ("Sin/reduced", "Sin/native", 40.0, 1000.0, 20.0),
        ("HardSwish/HardSigmoid*x", "HardSwish/x*HardSigmoid", -4.0, 8.0, 60.0),
    ]
    for good, bad, low, high, gain in better:
        assert (fp16.snr_db(good, low, high) or 0.0) > (fp16.snr_db(bad, low, high) or 0.0) + gain, good
    assert (a16.snr_db("MatMul/dynamic-int16", -4.0, 4.0) or 0.0) > (a16.snr_db("MatMul/dynamic", -4.0, 4.0) or 0) + 20


def test_where_the_chips_differ() -> None:
    """The docs say that three of them do not, and where sm8850 does."""
    forms = {(chip, p): load(chip, p).forms for chip in CHIPS for p in ("fp16", "a16")}
    for precision in ("fp16", "a16"):
        assert forms["sm8550", precision] == forms["sm8650", precision] == forms["sm8750", precision]
    assert forms["sm8850", "a16"] == forms["sm8750", "a16"]
    other = {name for name, form in forms["sm8850", "fp16"].items() if form != forms["sm8750", "fp16"][name]}
    assert other == {"LogSoftmax/native", "Erf/tanh", "QuickGelu/abs"}
