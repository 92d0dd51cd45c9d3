"""The profile store: what goes in comes out, once, from several processes, and nothing that is no measurement."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_profiles import OPS, made

from ringstep.errors import RingstepError
from ringstep.profiling.profile import Op, Profile
from ringstep.profiling.store import VERSION, add, add_all, find, find_id, get, numbered, open_store, set_parity


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "100% #1?.db"


def filled(path: Path, *profiles: Profile) -> Path:
    with open_store(path, write=True) as store:
        add_all(store, profiles)
    return path


def refusal(action: Any) -> str:
    with pytest.raises(RingstepError) as refused:
        action()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def reading(path: Path) -> str:
    def read() -> None:
        with open_store(path) as store:
            find(store)

    return refusal(read)


def test_what_goes_in_comes_out(db: Path) -> None:
    profiles = [
        made("j1", n=100),
        made("j2", snr_db=None, parity="unchecked", first_load_us=None, warm_load_us=None, peak_bytes=None, ops=()),
        made("a reference, 2025", origin="published", n=1, created="", versions={}),
        made("j5", snr_db=None, parity="failed"),
        made("j3", model="模型 'x' \"y\"; DROP TABLE profiles", times_us=(1.0, 3_599_999_999.5)),
        made("j4", ops=(Op("odd\x1b\nname", "", "UNSPECIFIED", 0.0, 2**63 - 1),), peak_bytes=(0, 2**63 - 1)),
    ]
    filled(db, *profiles)
    with open_store(db) as store:
        assert [get(store, number) for number in range(1, 7)] == profiles
        assert sorted(p.job for p in find(store)) == sorted(p.job for p in profiles)
    raw = sqlite3.connect(db)
    assert raw.execute("SELECT count(*) FROM iterations WHERE profile = 1").fetchone() == (100,)
    assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert raw.execute("PRAGMA user_version").fetchone() == (VERSION,)


def test_reading_makes_no_file(db: Path) -> None:
    with open_store(db) as store:
        assert find(store) == []
        assert "is not there" in refusal(lambda: get(store, 1))
    assert not db.parent.exists()


def test_reading_cannot_write(db: Path) -> None:
    filled(db, made())
    with pytest.raises(RingstepError, match="readonly"), open_store(db) as store:
        add(store, made("other"))


def test_a_job_is_stored_once(db: Path) -> None:
    with open_store(db, write=True) as store:
        assert add(store, made("j1")) == (1, True)
        assert add(store, made("j1")) == (1, False)
        assert add_all(store, [made("j2"), made("j2"), made("j1")]) == [(2, True), (2, False), (1, False)]
        assert len(find(store)) == 2
        message = refusal(lambda: add_all(store, [made("j9"), made("j1", seed=5)]))
        assert "job 'j1' is stored already, as profile 1, with another times_us" in message
        assert "another place" in refusal(lambda: add(store, made("j1", device="galaxy-s24")))
        assert [p.job for p in find(store)] == ["j1", "j2"]


def test_one_reference_may_give_many_published_figures(db: Path) -> None:
    figures = [made("table 1", origin="published", n=1, part=part, created="") for part in ("sliding", "full")]
    with open_store(db, write=True) as store:
        assert [new for _, new in add_all(store, [*figures, *figures])] == [True, True, False, False]
        assert "stands for 2 profiles: give the number of one: 1, 2" in refusal(lambda: get(store, "table 1"))


def test_parity_can_come_later(db: Path) -> None:
    with open_store(db, write=True) as store:
        add(store, made("j1", snr_db=None, parity="unchecked"))
        set_parity(store, "j1", 58.5, "passed")
        assert get(store, 1) == made("j1", snr_db=58.5)
        assert "snr_db" in refusal(lambda: set_parity(store, 1, float("nan"), "passed"))
        assert add(store, made("j1", snr_db=None, parity="unchecked")) == (1, False)
        assert get(store, 1).parity == "passed"


def test_references(db: Path) -> None:
    filled(db, made("jabc1"), made("jabc2"), made("jx_%"), made("77"))
    with open_store(db) as store:
        assert [find_id(store, ref) for ref in (1, "2", "jabc2", "jx", "jx_%", "77", "7")] == [1, 2, 2, 3, 3, 4, 4]
        assert "stands for 2 profiles" in refusal(lambda: find_id(store, "jabc"))
        assert "did you mean jabc" in refusal(lambda: find_id(store, "jabd1"))
        for ref in ("", "%", "_", "9" * 30, "²", "\ud800", "-1"):
            assert "no profile" in refusal(lambda ref=ref: find_id(store, ref))


def test_filters(db: Path) -> None:
    filled(db, made("j1"), made("j2", part="head", layout="", count=1), made("j3", device="galaxy-s24", chip="sm8650"),
           made("j4", precision="fp16", context=4096, unit="gpu", runtime="tflite"), made("j5", model="Other"),
           made("j6", origin="synthetic"))  # fmt: skip
    with open_store(db) as store:
        def jobs(**filters: Any) -> str:
            return "".join(sorted(p.job[1] for p in find(store, **filters)))

        assert jobs() == "123456"
        assert jobs(part="head") == "2" and jobs(precision="FP16") == "4" and jobs(context=4096) == "4"
        assert jobs(unit="gpu", runtime="tflite") == "4" and jobs(unit="gpu", runtime="qnn") == ""
        assert jobs(model="spark-x2.5-1.7b", origin="aihub") == "1234" and jobs(job="j5") == "5"
        assert jobs(device="galaxy-s24") == jobs(device="SM8650") == jobs(device="Samsung Galaxy S24") == "3"
        with pytest.raises(ValueError, match="no filter"):
            find(store, color="red")


def test_the_order_is_that_of_their_dates(db: Path) -> None:
    dates = ["2026-03-01T01:00:00+02:00", "2026-02-28T23:30:00Z", "2025-01-01"]
    filled(db, *(made(f"j{i}", created=created) for i, created in enumerate(dates)))
    with open_store(db) as store:
        assert list(numbered(store)) == [3, 1, 2]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"times_us": ()}, "nothing was measured"),
        ({"times_us": (0.0, 5.0)}, "no measurement"),
        ({"times_us": (0.2, 5.0)}, "no measurement"),
        ({"times_us": (float("nan"),)}, "no number"),
        ({"times_us": (5e9,)}, "out of range"),
        ({"model": ""}, "model"),
        ({"device": "a\x1b[31m"}, "device"),
        ({"model": "\ud800"}, "model"),
        ({"model": "m" * 301}, "model"),
        ({"job": ""}, "job"),
        ({"count": 0}, "count"),
        ({"context": -1}, "context"),
        ({"tokens": 2**63}, "tokens"),
        ({"runtime": "qmm"}, "runtime"),
        ({"unit": "NPU"}, "unit"),
        ({"origin": "guess"}, "origin"),
        ({"first_load_us": 0.0}, "first_load_us"),
        ({"warm_load_us": float("nan")}, "warm_load_us"),
        ({"peak_bytes": (5, 3)}, "peak_bytes"),
        ({"snr_db": float("inf")}, "snr_db"),
        ({"snr_db": None}, "parity is passed"),
        ({"parity": "unchecked"}, "parity is unchecked"),
        ({"created": ""}, "without a date"),
        ({"created": "yesterday"}, "no date"),
        ({"created": "9999-01-01"}, "yet to come"),
        ({"created": "0001-01-01T00:00:00+23:00"}, "no date"),
        ({"versions": {"a\n": "b"}}, "versions"),
        ({"ops": (Op("a", "b", "TPU", 1.0, 0),)}, "ops[0]"),
        ({"ops": (Op("a", "b", "NPU", float("nan"), 0),)}, "ops[0]"),
        ({"ops": (Op("a", "b", "NPU", 1.0, 2**63),)}, "ops[0]"),
        ({"ops": (Op("\ud800", "b", "NPU", 1.0, 0),)}, "ops"),
    ],
)
def test_no_measurement_gets_in(db: Path, fields: dict[str, Any], says: str) -> None:
    with open_store(db, write=True) as store:
        assert says in refusal(lambda: add_all(store, [made("good"), made(**fields)]))
        assert find(store) == []


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    text, other, newer = tmp_path / "text.db", tmp_path / "other.db", tmp_path / "newer.db"
    text.write_text("these are no profiles " * 100)
    with sqlite3.connect(other) as foreign:
        foreign.execute("CREATE TABLE profiles (id INTEGER)")
    with sqlite3.connect(filled(newer, made())) as later:
        later.execute(f"PRAGMA user_version = {VERSION + 1}")
    foreign.close()
    later.close()
    os.mkfifo(tmp_path / "pipe.db")
    says = {text: "no profile store", other: "another program", newer: "update it", tmp_path: "folder",
            tmp_path / "pipe.db": "not an ordinary file", text / "x.db": "cannot be used"}  # fmt: skip
    for path, message in says.items():
        before = path.read_bytes() if path.is_file() else b""
        if path != text / "x.db":
            assert message in reading(path)
        assert message in refusal(lambda path=path: filled(path, made("x")))
        assert not path.is_file() or path.read_bytes() == before


def test_a_damaged_store_is_one_line(db: Path) -> None:
    whole = filled(db, *(made(f"j{i}", n=500, seed=i) for i in range(8))).read_bytes()
    refused = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        broken = bytearray(whole[: random.integers(200, len(whole))] if seed % 2 else whole)
        for at in random.integers(100, len(broken), 60):
            broken[at] = random.integers(256)
        db.write_bytes(broken)
        try:
            with open_store(db) as store:
                assert all(isinstance(profile, Profile) for profile in find(store))
        except RingstepError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 20


@pytest.mark.parametrize("change", [
    "UPDATE profiles SET count = 'x'", "UPDATE profiles SET snr_db = 'high'", "UPDATE iterations SET us = 0",
    "UPDATE profiles SET versions = '['", "UPDATE profiles SET versions = '{\"a\": 1}'", "DELETE FROM iterations",
    "UPDATE profiles SET snr_db = 9e999", "UPDATE ops SET name = NULL", "UPDATE ops SET cycles = 'x'", "DROP TABLE ops",
    "UPDATE iterations SET us = 'fast'", "ALTER TABLE profiles DROP COLUMN unit", "UPDATE profiles SET created = 'x'",
])  # fmt: skip
def test_what_was_changed_by_hand_is_checked_again(db: Path, change: str) -> None:
    with sqlite3.connect(filled(db, made())) as raw:
        raw.execute(change)
    raw.close()
    assert str(db) in reading(db)


def test_deleting_a_profile_takes_its_iterations(db: Path) -> None:
    with open_store(filled(db, made("j1"), made("j2")), write=True) as store:
        store.db.execute("DELETE FROM profiles WHERE id = 1")
        left = [store.db.execute(f"SELECT DISTINCT profile FROM {table}").fetchall() for table in ("iterations", "ops")]
    assert [[row[0] for row in rows] for rows in left] == [[2], [2]]


def test_processes_that_write_at_once_wait_for_one_another(db: Path) -> None:
    script = """
import sys; from pathlib import Path
from made_profiles import made
from ringstep.profiling.store import add, open_store
for i in range(12):
    with open_store(Path(sys.argv[1]), write=True) as store:
        add(store, made(f"shared{i}")); add(store, made(f"{sys.argv[2]}-{i}"))
"""
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths}
    several = [subprocess.Popen([sys.executable, "-c", script, str(db), str(n)], env=environment) for n in range(4)]
    assert [one.wait(120) for one in several] == [0] * 4
    with open_store(db) as store:
        found = find(store)
    assert len(found) == 12 + 4 * 12 and all(len(p.times_us) == 50 and p.ops == OPS for p in found)


def test_a_writer_that_dies_leaves_nothing_half_written(db: Path) -> None:
    filled(db, made("j1"))
    script = """
import os, sys; from pathlib import Path
from made_profiles import made
from ringstep.profiling import store
with store.open_store(Path(sys.argv[1]), write=True) as opened, store._writing(opened.db):
    store._add(opened, made("j2"))
    os._exit(9)
"""
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    done = subprocess.run([sys.executable, "-c", script, str(db)], env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 9
    with open_store(db) as store:
        assert [p.job for p in find(store)] == ["j1"]
    filled(db, made("j2"))
