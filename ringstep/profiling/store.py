"""The profile store: one SQLite file with every profile, its iterations and its operations.

Made by the first write. Several processes may use it at once: writers wait for one another, readers for nobody. What is
read back passes the same checks as what goes in, since the file may have come from elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ringstep.contract import build
from ringstep.errors import RingstepError, did_you_mean
from ringstep.files import ordinary_size
from ringstep.profiling.checks import checked, moment
from ringstep.profiling.profile import Op, Place, Profile, Subject

DEFAULT = Path("artifacts/profiles.db")
VERSION = 1
MARK = 0x72696E67  # SQLite's application_id: "ring"
WAIT_SECONDS = 60.0
BUSY_SECONDS = 1.0  # of it in SQLite itself, which Ctrl-C does not reach
_KEYS = [field.name for field in (*dataclasses.fields(Subject), *dataclasses.fields(Place))]
_PLAIN = ["job", "origin", "created", "first_load_us", "warm_load_us", "snr_db", "parity"]
_COLUMNS = ["key", *_KEYS, *_PLAIN, "versions", "peak_low", "peak_high"]
_SCHEMA = (
    "CREATE TABLE profiles (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, model TEXT, recipe TEXT, part TEXT,"
    " count INTEGER, tokens INTEGER, layout TEXT, precision TEXT, context INTEGER, device TEXT, chip TEXT,"
    " runtime TEXT, unit TEXT, job TEXT, origin TEXT, created TEXT, first_load_us REAL, warm_load_us REAL,"
    " snr_db REAL, parity TEXT, versions TEXT, peak_low INTEGER, peak_high INTEGER)",
    "CREATE TABLE iterations (profile INTEGER NOT NULL REFERENCES profiles ON DELETE CASCADE, position INTEGER,"
    " us REAL NOT NULL, PRIMARY KEY (profile, position)) WITHOUT ROWID",
    "CREATE TABLE ops (profile INTEGER NOT NULL REFERENCES profiles ON DELETE CASCADE, position INTEGER,"
    " name TEXT, type TEXT, unit TEXT, us REAL, cycles INTEGER, PRIMARY KEY (profile, position)) WITHOUT ROWID",
    f"PRAGMA application_id = {MARK}",
    f"PRAGMA user_version = {VERSION}",
)


@dataclass(frozen=True)
class Store:
    """An open store."""

    path: Path
    db: sqlite3.Connection


@contextmanager
def open_store(path: Path = DEFAULT, write: bool = False) -> Iterator[Store]:
    """Open the store; to read, a file that is not there is an empty store.

    Raises RingstepError for a file that is no store, is damaged, was made by a newer ringstep, or cannot be written;
    and for whatever SQLite meets inside of the block.
    """
    db = None
    try:
        db = _connect(path, write)
        yield Store(path, db)
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise RingstepError(f"{path}: {_explained(error)}") from None
    finally:
        if db is not None:
            db.close()


def add(store: Store, profile: Profile) -> tuple[int, bool]:
    """Store one profile; its id, and whether it is new. As `add_all`."""
    return add_all(store, [profile])[0]


def add_all(store: Store, profiles: Sequence[Profile]) -> list[tuple[int, bool]]:
    """Store all of them or none; for each its id, and whether it is new: a job that is there already is left as it is.

    A job of AI Hub is known by its id, other profiles by their reference and what was measured where. Raises
    RingstepError for a profile that is no measurement, and for a known job with other times, subject or place.
    """
    for profile in profiles:
        checked(profile, f"profile {profile.job!r}"[:120])
    with _writing(store.db):
        return [_add(store, profile) for profile in profiles]


def set_parity(store: Store, ref: str | int, snr_db: float, parity: Literal["passed", "failed"]) -> None:
    """Say what a stored profile came to when it was checked later. Raises RingstepError as `find_id` and `add`."""
    number = find_id(store, ref)
    profile = dataclasses.replace(_read(store, number), snr_db=snr_db, parity=parity)
    checked(profile, f"profile {number}")
    with _writing(store.db):
        store.db.execute("UPDATE profiles SET snr_db = ?, parity = ? WHERE id = ?", (snr_db, parity, number))


def find(store: Store, **filters: str | int | None) -> list[Profile]:
    """Profiles in the order of their dates; filters as for `numbered`."""
    return list(numbered(store, **filters).values())


def numbered(store: Store, **filters: str | int | None) -> dict[int, Profile]:
    """Profiles by id, in the order of their dates.

    Filters (None is none): model, part, precision, context, runtime, unit, origin, job, in any case; `device` is also a
    device's other names, or a chip for every device that carries it.
    """
    wanted = {name: value for name, value in filters.items() if value is not None}
    terms, values = [], []
    for name, value in wanted.items():
        if name == "device":
            terms.append("(device IN (?, ?) COLLATE NOCASE OR chip = ? COLLATE NOCASE)")
            values += [value, _device_id(str(value)), value]
        elif name in ("model", "part", "precision", "context", "runtime", "unit", "origin", "job"):
            terms.append(f"{name} = ? COLLATE NOCASE")
            values.append(value)
        else:
            raise ValueError(f"no filter {name!r}")
    where = " WHERE " + " AND ".join(terms) if terms else ""
    ids = [row["id"] for row in store.db.execute(f"SELECT id FROM profiles{where} ORDER BY id", values)]
    found = {number: _read(store, number) for number in ids}
    return dict(sorted(found.items(), key=lambda item: (moment(item[1].created), item[0])))


def get(store: Store, ref: str | int) -> Profile:
    """The profile of a number or a job id. Raises RingstepError as `find_id`."""
    return _read(store, find_id(store, ref))


def find_id(store: Store, ref: str | int) -> int:
    """The number of a profile: of that number, that job id, or a job id that begins so and no other does.

    Raises RingstepError for an unknown reference, and one that several profiles answer to.
    """
    ref = str(ref)
    if ref.isascii() and ref.isdigit() and len(ref) < 19:
        rows = store.db.execute("SELECT id FROM profiles WHERE id = ?", (int(ref),)).fetchall()
        if rows:
            return int(rows[0]["id"])
    jobs = {row["id"]: str(row["job"]) for row in store.db.execute("SELECT id, job FROM profiles ORDER BY id")}
    for found in ([i for i, job in jobs.items() if job == ref], [i for i, job in jobs.items() if job.startswith(ref)]):
        if len(found) == 1 and ref:
            return int(found[0])
        if found and ref:
            some = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
            raise RingstepError(f"{ref!r} stands for {len(found)} profiles: give the number of one: {some}")
    if not jobs:
        raise RingstepError(f"no profile {ref!r}: {store.path} {'is empty' if store.path.exists() else 'is not there'}")
    raise RingstepError(f"no profile {ref!r} in {store.path}{did_you_mean(ref, {*jobs.values(), *map(str, jobs)})}; "
                        "`ringstep profiles list` shows them")  # fmt: skip


def _device_id(name: str) -> str:
    from ringstep.devices import load_devices

    wanted = " ".join(name.split()).casefold()
    alike = [d.id for d in load_devices().values() if wanted in (d.id.casefold(), d.name.casefold(),
                                                                 d.aihub.casefold())]  # fmt: skip
    return alike[0] if alike else name


def _add(store: Store, profile: Profile) -> tuple[int, bool]:
    db, key = store.db, _key(profile)
    row = db.execute("SELECT id FROM profiles WHERE key = ?", (key,)).fetchone()
    if row:
        known = _read(store, row["id"])
        other = [name for name in ("times_us", "subject", "place") if getattr(known, name) != getattr(profile, name)]
        if other:
            raise RingstepError(f"job {profile.job!r} is stored already, as profile {row['id']}, with another "
                                f"{' and '.join(other)}: one of the two is wrong")  # fmt: skip
        return int(row["id"]), False
    low, high = profile.peak_bytes or (None, None)
    values = {**dataclasses.asdict(profile.subject), **dataclasses.asdict(profile.place),
              **{name: getattr(profile, name) for name in _PLAIN}, "key": key,
              "versions": json.dumps(profile.versions), "peak_low": low, "peak_high": high}  # fmt: skip
    marks = ", ".join(f":{name}" for name in _COLUMNS)
    number = db.execute(f"INSERT INTO profiles ({', '.join(_COLUMNS)}) VALUES ({marks})", values).lastrowid
    assert number is not None
    times = ((number, i, us) for i, us in enumerate(profile.times_us))
    db.executemany("INSERT INTO iterations VALUES (?, ?, ?)", times)
    ops = ((number, i, op.name, op.type, op.unit, op.us, op.cycles) for i, op in enumerate(profile.ops))
    db.executemany("INSERT INTO ops VALUES (?, ?, ?, ?, ?, ?, ?)", ops)
    return number, True


def _key(profile: Profile) -> str:
    if profile.origin == "aihub":
        return f"aihub {profile.job}"
    where = [*dataclasses.astuple(profile.subject), *dataclasses.astuple(profile.place)]
    return f"{profile.origin} {json.dumps([profile.job, *where])}"


def _read(store: Store, number: int) -> Profile:
    where = f"{store.path}: profile {number}"
    row = store.db.execute(f"SELECT {', '.join(_COLUMNS)} FROM profiles WHERE id = ?", (number,)).fetchone()
    of_it = "WHERE profile = ? ORDER BY position"
    times = store.db.execute(f"SELECT us FROM iterations {of_it}", (number,))
    ops = store.db.execute(f"SELECT name, type, unit, us, cycles FROM ops {of_it}", (number,))
    try:
        versions = json.loads(row["versions"])
    except (TypeError, ValueError, RecursionError):
        raise RingstepError(f"{where}: versions is not valid JSON: the store is damaged") from None
    peak = (row["peak_low"], row["peak_high"])
    body = {name: row[name] for name in _PLAIN} | {
        "subject": {field.name: row[field.name] for field in dataclasses.fields(Subject)},
        "place": {field.name: row[field.name] for field in dataclasses.fields(Place)},
        "versions": versions, "times_us": [us for (us,) in times], "peak_bytes": None if None in peak else peak,
    }  # fmt: skip
    profile = build(Profile, body, where)
    return checked(dataclasses.replace(profile, ops=tuple(Op(*op) for op in ops)), where)


def _connect(path: Path, write: bool) -> sqlite3.Connection:
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise RingstepError(f"{path} is a folder, no profile store")
    if path.exists():
        ordinary_size(path)
    if not write and (not path.exists() or ordinary_size(path) == 0):
        return _create(sqlite3.connect(":memory:", isolation_level=None))
    uri = f"{path.resolve().as_uri()}?mode={'rwc' if write else 'ro'}"
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        return _opened(db, path, write)
    except BaseException:
        db.close()
        raise


def _opened(db: sqlite3.Connection, path: Path, write: bool) -> sqlite3.Connection:
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA trusted_schema = OFF")
    if write and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        _create(db)
    (mark,), (version,) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version"))
    if mark != MARK:
        raise RingstepError(f"{path} is another program's database, no profile store; give another --db")
    if version != VERSION:
        raise RingstepError(f"{path} is a profile store of version {version}, this ringstep reads {VERSION}: update it")
    db.row_factory = sqlite3.Row
    return db


def _create(db: sqlite3.Connection) -> sqlite3.Connection:
    db.execute("PRAGMA journal_mode = WAL")
    db.row_factory = sqlite3.Row
    with _writing(db):
        # Another process may have made it while this one waited.
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _SCHEMA:
                db.execute(statement)
    return db


@contextmanager
def _writing(db: sqlite3.Connection) -> Iterator[None]:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            db.execute("BEGIN IMMEDIATE")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # SQLite's own wait is deaf to Ctrl-C
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _explained(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be used: {error.strerror or error}"
    text = str(error)
    if "not a database" in text:
        return "this is no profile store; give another --db"
    damage = ("malformed", "no such table", "no such column")
    if isinstance(error, UnicodeDecodeError) or any(word in text for word in damage):
        return f"the store is damaged ({text}); move it away and import the profiles again"
    if "locked" in text:
        return f"another process has been writing for {WAIT_SECONDS:g} s; try again"
    return f"cannot be used: {text}"
