"""`ringstep profiles`: what each command says, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_profiles import OPS, aihub_body, made, write

from exporters.cli import cli
from ringstep import console
from ringstep.profiling.exchange import to_json
from ringstep.profiling.profile import Op, Profile
from ringstep.profiling.stats import median_ratio
from ringstep.profiling.store import add_all, find, open_store

WHAT = ["--model", "m", "--recipe", "r", "--part", "sliding", "--count", "21", "--layout", "ring", "--precision",
        "w4a16", "--context", "1024", "--device", "galaxy-s25"]  # fmt: skip
CPU = Op("/layers.0/Add_1", "ElementWiseAdd", "CPU", 40.0, 0)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "profiles.db"


@pytest.fixture
def run(db: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = console.run(cli, ["profiles", *map(str, args), "--db", str(db)])
        return code, *capsys.readouterr()

    yield call
    console.settings.quiet = console.settings.verbose = False


def fill(db: Path, *profiles: Profile) -> None:
    with open_store(db, write=True) as store:
        add_all(store, profiles)


def error(found: tuple[int, str, str]) -> str:
    code, out, err = found
    assert (code, out) == (2, "") and err.startswith("ringstep: error: ") and err.count("\n") == 1
    return err


def test_list_fits_80_columns_and_marks_every_doubtful_figure(db: Path, run: Run) -> None:
    unchecked: dict[str, Any] = {"snr_db": None, "parity": "unchecked"}
    fill(db, made("j1"), made("j2", layout="roll", ops=(*OPS, CPU)), made("j3", part="head", layout="", ops=()),
         made("j4", model="M", precision="w4a16-mixed", parity="failed", snr_db=-3.25),
         made("j5", model="M", **unchecked),
         made("table", origin="published", ms=27.2, n=1, noise=0, created="", ops=(), **unchecked),
         made("made-up", origin="synthetic"))  # fmt: skip
    code, out, err = run("list")
    assert code == 0 and all(len(line) <= 80 for line in out.splitlines())
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line[:2].strip().isdigit()}
    assert rows["1"] == "1 sliding ring w4a16 1024 0.843 0.781 0.878 50 NPU 61.5"
    assert "sliding roll" in rows["2"] and rows["2"].endswith("NPU+CPU! 61.5")
    assert rows["3"].endswith("50 ? 61.5")
    assert rows["4"].endswith("FAILED -3.2") and rows["5"].endswith("unchecked")
    assert rows["6"] == "6 sliding ring w4a16 1024 27.20 - - 1 ? unchecked"
    titles = [line for line in out.splitlines() if line.startswith("Spark")]
    assert sum("published" in t for t in titles) == sum("synthetic" in t for t in titles) == 1 and len(titles) == 3
    assert "warning: PROFILE 2 FELL TO THE CPU: 1 of 4 operations and 4.8 % of the time" in err
    assert err.count("FELL TO THE CPU") == 1


def test_list_filters_and_json(db: Path, run: Run) -> None:
    fill(db, made("j1"), made("j2", device="galaxy-s24", chip="sm8650"))
    code, out, _ = run("list", "--device", "sm8650", "--json")
    (row,) = json.loads(out)
    assert (row["id"], row["job"], row["iterations"], row["median_us"]) == (2, "j2", 50, made().median_us)
    assert "times_us" not in row and row["origin"] == "aihub"
    code, out, _ = run("list", "--model", "none", "--context", 7)
    assert code == 0 and "matches --model none, --context 7" in out
    assert "j2" in run("list", "-v")[1]


def test_an_empty_store(db: Path, run: Run) -> None:
    code, out, _ = run("list")
    assert code == 0 and "is not there yet" in out and not db.exists()
    assert json.loads(run("list", "--json")[1]) == []
    assert "is not there" in error(run("show", 1))
    assert json.loads(run("export", "json")[1])["profiles"] == []


def test_show_says_everything(db: Path, run: Run) -> None:
    fill(db, made("j1", ops=(*OPS, CPU), versions={"qairt": "2.40", "ai\u2010hub": "[red]x"}), made("j2", ops=()))
    code, out, err = run("show", "j1")
    text = " ".join(out.split())
    for part in ("0.843 ms of 50 iterations", "0.781, 0.878 ms", "90.00, 60.00 ms", "3.00 MB to 5.00 MB", "2.40",
                 "[red]x", "passed, 61.5 dB", "NPU 3 95.2", "CPU 1 4.8", "MatMul 83.3", "mlp/down_proj 47.6",
                 "attn/q_proj 35.7", "attn 11.9", "residual 4.8", "j1", "sm8750"):  # fmt: skip
        assert part in text, part
    assert code == 0 and "FELL TO THE CPU" in err and "/layers.0/Add_1" in err
    assert "where it ran is not known" in run("show", 2)[1]
    body = json.loads(run("show", 1, "--json")[1])
    assert len(body["times_us"]) == 50 and body["on_cpu"] == 1 and body["shares_by"] == "time"
    assert body["by_block"]["mlp/down_proj"] == pytest.approx(400 / 840) and sum(body["by_layer"].values()) == 1


def test_show_takes_cycles_where_there_are_no_times(db: Path, run: Run) -> None:
    fill(db, made("j1", ops=tuple(Op(op.name, op.type, op.unit, 0.0, op.cycles) for op in OPS)))
    text = " ".join(run("show", 1)[1].split())
    assert "% of cycles" in text and "% of time" not in text and "mlp/down_proj 50.0" in text


def test_a_latency_without_parity_is_shown_as_one(db: Path, run: Run) -> None:
    fill(db, made("j1", snr_db=None, parity="unchecked"), made("j2", parity="failed", snr_db=3.0),
         made("j3", parity="failed", snr_db=None))  # fmt: skip
    assert "unchecked: this latency may be of a graph that computes wrong" in run("show", 1)[1]
    assert "FAILED, 3.0 dB: this latency is of a graph that computes wrong" in " ".join(run("show", 2)[1].split())
    assert "FAILED, no output to compare: this latency is of a graph" in " ".join(run("show", 3)[1].split())
    assert " FAILED\n" in run("list")[1].replace(" " * 4, "")
    _, _, err = run("compare", 1, 2)
    assert "A: parity unchecked" in err and "B: parity failed" in err


def test_compare(db: Path, run: Run) -> None:
    a, b, c = made("j1"), made("j2", ms=0.924, seed=1, device="galaxy-s24", chip="sm8650"), made("j3", seed=8)
    fill(db, a, b, c)
    ratio = median_ratio(a.times_us, b.times_us)
    code, out, _ = run("compare", "j1", "j2")
    assert code == 0 and "they differ in device, chip" in out
    assert f"B is slower: B's median is {ratio.value:.3f} of A's, 95 % interval {ratio.low:.3f} to" in out
    assert "B is faster" in run("compare", 2, 1)[1]
    assert "no difference beyond noise" in run("compare", 1, 3)[1]
    assert "no difference beyond noise: B's median is 1.000" in run("compare", 1, 1)[1]
    body = json.loads(run("compare", 1, 2, "--json")[1])
    assert body["within_noise"] is False and body["ratio"]["value"] == ratio.value and body["b"]["job"] == "j2"


def test_a_single_figure_has_no_interval(db: Path, run: Run) -> None:
    fill(db, made("j1"), made("table", origin="published", n=1, ms=27.2, created=""))
    _, out, err = run("compare", 1, 2)
    assert "no interval: 1 iteration on a side" in out and "difference beyond" not in out
    assert "warning: B is published" in err
    body = json.loads(run("compare", 1, 2, "--json")[1])
    assert body["within_noise"] is None and body["ratio"]["low"] is None


def test_json_goes_out_and_comes_back_the_same(db: Path, tmp_path: Path, run: Run) -> None:
    there = [made("j1", n=3), made("j2", ops=(), peak_bytes=None, snr_db=None, parity="unchecked"),
             made("table", origin="published", n=1, created="")]  # fmt: skip
    fill(db, *there)
    out = tmp_path / "new" / "all.json"
    assert run("export", "json", "-o", out)[1] == f"3 profiles in {out}\n"
    assert run("export", "json")[1] == out.read_text()
    assert "0 profiles added; 3 were there already: 3, 1, 2" in run("import", out)[1]
    db.unlink()
    assert "3 profiles added: 1, 2, 3" in run("import", out)[1]
    assert json.loads(run("import", out, "--json")[1]) == {"added": [], "known": [1, 2, 3]}
    with open_store(db) as store:
        assert sorted(find(store), key=lambda p: p.job) == there


def test_csv(db: Path, run: Run) -> None:
    fill(db, made("=cmd|' /C calc'!A0", model='-2+3, "x"', snr_db=-4.5, parity="failed"), made("+1", ops=()))
    first, second = csv.DictReader(io.StringIO(run("export", "csv")[1]))
    assert first["job"] == "'=cmd|' /C calc'!A0" and first["model"] == "'-2+3, \"x\"" and first["snr_db"] == "-4.5"
    assert [first[name] for name in ("median_ms", "min_ms", "iterations", "npu_ops")] == ["0.8425", "0.781", "50", "3"]
    assert second["job"] == "'+1" and second["npu_ops"] == ""


def test_export_without_a_place(db: Path, tmp_path: Path, run: Run) -> None:
    fill(db, made())
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error(run("export", "csv", "-o", tmp_path / "file" / "x.csv"))
    assert "add --out" in error(run("export", "csv", "--json"))
    assert "is not one of" in error(run("export", "xml"))


def test_aihubs_json_is_imported_with_what_it_was(db: Path, tmp_path: Path, run: Run) -> None:
    file = write(tmp_path / "profile.json", aihub_body())
    assert "1 profile added: 1" in run("import", file, *WHAT, "--job", "jabc")[1]
    assert "0 profiles added; 1 were there already" in run("import", file, *WHAT, "--job", "jabc")[1]
    assert "1 profile added: 2" in run("import", file, *WHAT)[1]
    assert "were there already: 2" in run("import", file, *WHAT)[1]
    assert "another subject" in error(run("import", file, *WHAT, "--job", "jabc", "--tokens", 32))
    with open_store(db) as store:
        profile = find(store, job="jabc")[0]
    assert profile.times_us == (850, 840, 860, 900, 845) and (profile.parity, profile.snr_db) == ("unchecked", None)
    assert vars(profile.place) == {"device": "galaxy-s25", "chip": "sm8750", "runtime": "qnn", "unit": "npu"}
    assert (profile.subject.count, profile.subject.tokens, profile.origin) == (21, 1, "aihub")
    assert "FELL TO THE CPU" in run("show", "jabc")[2]


def test_aihubs_json_without_what_it_was_is_refused(db: Path, tmp_path: Path, run: Run) -> None:
    file = write(tmp_path / "profile.json", aihub_body())
    missing = "add --model, --recipe, --part, --count, --layout, --precision, --context, --device"
    assert missing in error(run("import", file))
    head = ["--model", "m", "--part", "head", "--precision", "fp16", "--context", 0, "--recipe", "r"]
    assert "add --device" in error(run("import", file, *head))
    assert "is a chip" in error(run("import", file, *head, "--device", "sm8750"))
    assert "did you mean galaxy-s25" in error(run("import", file, *head, "--device", "galaxy-s25x"))
    assert "says itself" in error(run("import", write(tmp_path / "ours.json", json.loads(to_json([made()]))), *WHAT))
    assert not db.exists()


def ours(**fields: Any) -> dict[str, Any]:
    body = json.loads(to_json([made("j1"), made("j2")]))
    body["profiles"][1].update(fields)
    return body


NESTED = {"a": 1}
for _ in range(90):
    NESTED = {"a": NESTED}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "list"),
        ("{}", "holds no profiles"),
        (b"\xff\xfe", "UTF-8"),
        ('{"format": "ringstep-profiles", "format": "x"}', "twice"),
        ({"format": "ringstep-profiles"}, "version"),
        ({"format": "ringstep-profiles", "version": True, "profiles": []}, "version"),
        ({"format": "ringstep-profiles", "version": 2, "profiles": []}, "version 2"),
        ({"format": "ringstep-profiles", "version": 1, "profiles": {}}, "expected a list"),
        ({"format": "ringstep-profiles", "version": 1, "profiles": [], "rows": 1}, "rows"),
        (ours(times_us=[]), "nothing was measured"),
        (ours(times_us=[0]), "no measurement"),
        (ours(times_us=["1"]), "expected float"),
        (ours(times_us=[float("nan")]), "not a finite number"),
        (ours(times_us=[float("inf")]), "not a finite number"),
        (ours(times_us=[1e300]), "out of range"),
        (ours(times_us=[10**300]), "too large"),
        (ours(times_us=[[1.0]]), "expected float"),
        (ours(times_us=NESTED), "expected a list"),
        (ours(subject=NESTED), "subject.a: unknown field"),
        (ours(subject={}), "subject.model: missing"),
        (ours(origin="guess"), "none of aihub, published, synthetic"),
        (ours(parity=None), "none of passed, failed, unchecked"),
        (ours(parity=["passed"]), "none of passed, failed, unchecked"),
        (ours(ops=[{"name": "a", "type": "b", "unit": "TPU", "us": 1, "cycles": 0}]), "no operation"),
        (ours(ops=[{"name": "\ud800", "type": "b", "unit": "NPU", "us": 1, "cycles": 0}]), "no text"),
        (ours(versions={"a": 1}), "expected str"),
        (ours(job="a\x1b]0;x\x07"), "job"),
        (ours(job="j1", created="2026-01-01", times_us=[5]), "stored already"),
        (ours(medain=1), "unknown field"),
        (aihub_body([0]), "add --"),
    ],
)
def test_a_bad_file_leaves_nothing(db: Path, tmp_path: Path, run: Run, body: Any, says: str) -> None:
    file = tmp_path / "bad.json"
    raw = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    file.write_bytes(raw)
    message = error(run("import", file))
    assert says in message and len(message) < 500
    with open_store(db) as store:
        assert find(store) == []


def test_a_file_too_large_or_absent_is_refused(tmp_path: Path, run: Run) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(65_000_000)
    assert "far more than it can need" in error(run("import", tmp_path / "large.json"))
    assert "cannot be read" in error(run("import", tmp_path / "none.json"))
    assert "cannot be read" in error(run("import", tmp_path))


def test_a_bad_profile_of_aihub_is_refused(db: Path, tmp_path: Path, run: Run) -> None:
    assert "no measurement" in error(run("import", write(tmp_path / "p.json", aihub_body([0, 5])), *WHAT))
    assert not db.exists()


def test_gate(db: Path, tmp_path: Path, run: Run) -> None:
    baseline = tmp_path / "b.json"
    gate = ["gate", "--baseline", baseline]
    assert "--update-baseline" in error(run(*gate))
    assert "no profile of a phone" in error(run(*gate, "--update-baseline"))
    fill(db, made("old", created="2026-01-01"), made("full", created="2026-01-01", part="full", ms=1.13))
    assert run(*gate, "--update-baseline")[1] == f"{baseline}: 2 entries, 2 of them new\n"

    code, out, err = run(*gate)
    assert code == 1 and "failed: 2 not measured" in out and "2 of the baseline's 2 not measured since" in err

    fill(db, made("same", created="2026-01-02", seed=1))
    code, out, err = run(*gate)
    assert code == 0 and "passed: 1 same, 1 not measured" in out and "1 of the baseline's 2" in err
    assert all(len(line) <= 80 for line in out.splitlines())
    assert run(*gate, "--require-all")[0] == 1

    fill(db, made("slow", created="2026-01-03", ms=0.95, seed=2), made("head", created="2026-01-03", part="head"))
    code, out, _ = run(*gate)
    assert code == 1 and "SLOWER" in out and "failed: 1 slower, 1 not measured; 1 measured without a baseline" in out
    assert run(*gate, "--max-rise", 30)[0] == 0
    body = json.loads(run(*gate, "--json")[1])
    assert body["passed"] is False and [e["verdict"] for e in body["entries"]] == ["slower", "not measured"]
    assert body["entries"][0]["ratio"]["low"] > 1.05 and body["without_baseline"] == 1

    assert "3 entries, 2 of them new" in run(*gate, "--update-baseline")[1]
    fill(db, made("fast", created="2026-01-04", seed=2))
    code, out, _ = run(*gate)
    assert code == 0 and "1 faster, 2 not measured" in out


@pytest.mark.parametrize("rise", ["nan", "inf", "-1", "x"])
def test_a_rise_that_nothing_exceeds_is_refused(run: Run, rise: str) -> None:
    error(run("gate", "--max-rise", rise))
