"""How accurate a chip's operators are, as `ringstep ops` measured it on the simulator: the committed tables."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from ringstep.devices import find_device, load_devices
from ringstep.errors import RingstepError, did_you_mean

FOLDER = Path(__file__).parent
PRECISIONS = ("fp16", "a16")
FORMAT = 1
ROUNDED_DB = {"fp16": 74.0, "a16": 98.0}  # one rounding of values spread evenly


@dataclass(frozen=True)
class Row:
    """One form over one interval of its input, against float64 on the very inputs that the NPU got."""

    form: str
    low: float
    high: float
    size: int
    """Length that a reduction or product runs over; 1 for elementwise forms."""
    snr_db: float
    """300: identical or nothing to tell apart; -300: values that are not finite, or anything where zero is due."""
    ideal_db: float
    """What a correctly rounded result would reach: fp16's, or the output grid's, own limit."""
    max_rel: float
    """Largest relative error where the truth is a normal fp16 number (6.1e-5 and more)."""
    max_abs: float
    max_steps: float
    """Largest error in steps of the output's grid; 0 for fp16."""
    count: int
    """Values compared: those whose truth fits in the type."""
    nonfinite: int
    """Values that came out as NaN or infinity (beyond 65504 HTP's fp16 has codes that read as NaN)."""
    flushed: int
    """Values that came out as 0 where the rounded truth is not."""

    @property
    def loss_db(self) -> float:
        """What the kernel loses against correct rounding.

        Exact results, whose ideal is 300, count as if rounded: a kernel that adds one rounding loses little.
        """
        return max(0.0, min(self.ideal_db, ROUNDED_DB["a16" if self.max_steps else "fp16"]) - self.snr_db)


@dataclass(frozen=True)
class FormResult:
    """A form on a chip."""

    name: str
    ops: int
    """Nodes as written."""
    npu_ops: int
    """Nodes that the compiler took, after ONNX Runtime's rewrites and without Q/DQ; 0 where refused."""
    refused: str
    """Why the compiler refused it; "" if it did not."""
    rows: tuple[Row, ...]

    @property
    def function(self) -> str:
        """What it computes: SiLU of SiLU/newton."""
        return self.name.split("/")[0]


@dataclass(frozen=True)
class OpTable:
    """Every form of one chip and precision. All figures are simulated."""

    chip: str
    arch: str
    precision: str
    version: str
    """Plugin and SDK that measured."""
    forms: dict[str, FormResult]
    note: str = ""
    """Says so where the table is of another chip than the one asked for."""

    def rows(self) -> Iterator[Row]:
        """Every row."""
        for form in self.forms.values():
            yield from form.rows

    def of(self, function: str) -> list[FormResult]:
        """The forms of a function that the chip takes, fewest operators first: of("SiLU")."""
        found = [f for f in self.forms.values() if f.function == function and not f.refused]
        return sorted(found, key=lambda form: form.ops)

    def overlapping(self, form: str, low: float, high: float, size: int | None = None) -> list[Row]:
        """Rows that speak of inputs in low..high.

        The smallest interval that holds low..high if one does, else all that overlap it; of several sizes the
        one nearest to `size`, None: all. Empty for a form that was not measured or was refused.
        """
        rows: Iterable[Row] = self.forms[form].rows if form in self.forms else ()
        # An interval that only touches low..high says nothing of what lies within.
        touches = lambda row: row.high == low or row.low == high
        rows = [row for row in rows if row.low <= high and row.high >= low and (low == high or not touches(row))]
        if size is not None and rows:
            ratio = lambda row: max(row.size / max(size, 1), size / max(row.size, 1))
            best = min(map(ratio, rows))
            rows = [row for row in rows if ratio(row) == best]
        holding = [row for row in rows if row.low <= low and high <= row.high]
        if holding:
            width = min(row.high - row.low for row in holding)
            return [row for row in holding if row.high - row.low == width]
        return rows

    def worst(self, form: str, low: float, high: float, size: int | None = None) -> Row | None:
        """The row that loses most for inputs in low..high (see overlapping); None where nothing was measured.

        By loss, not SNR: where a function runs out into values that fp16 can hardly tell apart, the best kernel
        has few dB.
        """
        return max(self.overlapping(form, low, high, size), key=lambda row: row.loss_db, default=None)

    def snr_db(self, form: str, low: float, high: float, size: int | None = None) -> float | None:
        """The SNR of `worst`."""
        row = self.worst(form, low, high, size)
        return None if row is None else row.snr_db


@functools.cache
def load(chip_name: str, precision: str) -> OpTable:
    """The committed table of a chip (any name that devices.toml knows) and precision, fp16 or a16.

    A chip that was not measured gets the table of the nearest architecture, which `note` says. Raises
    RingstepError for an unknown chip or precision, fp16 on a chip without it, and where no table is there.
    """
    chip = find_device(chip_name).chip
    if precision not in PRECISIONS:
        raise RingstepError(f"no operator table for precision {precision!r}{did_you_mean(precision, PRECISIONS)}")
    if precision == "fp16" and not chip.fp16:
        raise RingstepError(f"{chip.name} has no fp16, so no table of it; quantise the model and ask for a16")
    own = FOLDER / f"{chip.name}-{precision}.json"
    if own.is_file():
        return read(own)
    chips = {device.chip.name: device.chip for device in load_devices().values()}
    measured = [c for name, c in chips.items() if (FOLDER / f"{name}-{precision}.json").is_file()]
    if not measured:
        raise RingstepError(
            f"no operator table for {chip.name} {precision}; make one: "
            f"ringstep ops --chip {chip.name} --precision {precision} --out {own.name}"
        )
    nearest = min(measured, key=lambda other: abs(other.arch - chip.arch))
    table = read(FOLDER / f"{nearest.name}-{precision}.json")
    note = f"measured on {nearest.name} ({nearest.htp_arch}), not on {chip.name} ({chip.htp_arch})"
    return OpTable(table.chip, table.arch, table.precision, table.version, table.forms, note)


def save(table: OpTable, path: Path) -> None:
    """Write a table as JSON, a line a row."""
    forms = []
    for form in table.forms.values():
        rows = ",\n".join("[" + ",".join(f"{value:.6g}" for value in astuple(row)[1:]) + "]" for row in form.rows)
        head = {"name": form.name, "ops": form.ops, "npu_ops": form.npu_ops, "refused": form.refused}
        text = json.dumps(head)[:-1] + ', "rows": ['
        forms.append(f"  {text}\n{rows}\n  ]}}" if rows else f"  {text}]}}")
    head = {"format": FORMAT, "chip": table.chip, "arch": table.arch, "precision": table.precision,
            "version": table.version, "columns": COLUMNS}  # fmt: skip
    try:
        path.write_text(json.dumps(head)[:-1] + ', "forms": [\n' + ",\n".join(forms) + "\n]}\n", "utf-8")
    except OSError as error:
        raise RingstepError(f"{path}: {error.strerror}") from error


def read(path: Path) -> OpTable:
    """Read a table that `save` wrote. Raises RingstepError for anything else."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RingstepError(f"{path}: no operator table: {error}") from error
    head = _keys(data, ("format", "chip", "arch", "precision", "version", "columns", "forms"), str(path))
    if head["format"] != FORMAT or head["columns"] != COLUMNS or not isinstance(head["forms"], list):
        raise RingstepError(f"{path}: written by another version of ringstep; make it again with ringstep ops")
    forms: dict[str, FormResult] = {}
    for entry in head["forms"]:
        form = _keys(entry, ("name", "ops", "npu_ops", "refused", "rows"), f"{path}: a form")
        name = form["name"]
        if not isinstance(name, str) or name in forms or not isinstance(form["rows"], list):
            raise RingstepError(f"{path}: form {name!r} is listed twice or malformed")
        for key, kind in (("ops", int), ("npu_ops", int), ("refused", str)):
            if type(form[key]) is not kind:
                raise RingstepError(f"{path}: {name}: {key} is {form[key]!r}")
        rows = tuple(_row(name, values, f"{path}: {name}") for values in form["rows"])
        forms[name] = FormResult(name, form["ops"], form["npu_ops"], form["refused"], rows)
    return OpTable(head["chip"], head["arch"], head["precision"], head["version"], forms)


COLUMNS = [field.name for field in fields(Row)][1:]
_WHOLE = {"size", "count", "nonfinite", "flushed"}


def _keys(value: Any, keys: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(keys):
        raise RingstepError(f"{where}: want the keys {', '.join(keys)}")
    return value


def _row(form: str, values: Any, where: str) -> Row:
    if not isinstance(values, list) or len(values) != len(COLUMNS):
        raise RingstepError(f"{where}: a row must hold {len(COLUMNS)} numbers")
    for column, value in zip(COLUMNS, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int if column in _WHOLE else (int, float)):
            raise RingstepError(f"{where}: {column} is {value!r}, no number")
    typed: list[Any] = [v if c in _WHOLE else float(v) for c, v in zip(COLUMNS, values, strict=True)]
    return Row(form, *typed)
