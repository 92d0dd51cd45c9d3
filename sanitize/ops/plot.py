"""Draw a table: a panel a function, its forms' largest error over each interval of the input. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from pathlib import Path

from ringstep.errors import RingstepError
from sanitize.ops.table import FormResult, OpTable, Row

SUFFIXES = (".svg", ".png")
COLUMNS = 3
TOP = 10.0
HALF_STEP = 2.0**-11
"""Half a step of fp16: what correct rounding may err."""


def require_plot(path: Path) -> None:
    """Raise RingstepError where matplotlib is missing or the path's ending is none of .svg and .png."""
    if path.suffix not in SUFFIXES:
        raise RingstepError(f"{path}: a plot must end in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise RingstepError("plots need matplotlib: pip install 'ringstep[plot]'")


def draw(table: OpTable, path: Path, functions: Iterable[str] | None = None) -> None:
    """Write the plot: relative errors for fp16, steps of the output's grid for a16.

    `functions` chooses the panels, None: those that have several forms, or all if none has. Raises RingstepError
    as require_plot does, and for a function that the table does not have.
    """
    require_plot(path)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    forms: dict[str, list[FormResult]] = {}
    for form in table.forms.values():
        if not form.refused:
            forms.setdefault(form.function, []).append(form)
    names = list(functions) if functions is not None else [n for n, several in forms.items() if len(several) > 1]
    names = names or list(forms)
    missing = [name for name in names if name not in forms]
    if missing or not names:
        raise RingstepError(f"{path}: nothing to draw: no figures of {', '.join(missing) or 'any form'} in the table")
    columns = min(COLUMNS, len(names))
    height = math.ceil(len(names) / columns)
    # fp16's intervals lie side by side, a16's hold one another.
    order = (lambda span: span[1] - span[0]) if table.precision == "a16" else (lambda span: span[0])
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ringstep", "font.size": 7}):
        figure, axes = pyplot.subplots(height, columns, squeeze=False, figsize=(3.6 * columns, 2.5 * height))
        for axis in list(axes.flat)[len(names) :]:
            axis.set_visible(False)
        for axis, name in zip(axes.flat, names, strict=False):
            intervals = sorted({(row.low, row.high) for form in forms[name] for row in form.rows}, key=order)
            for form in forms[name]:
                label = f"{form.name.partition('/')[2] or form.name} ({form.ops})"
                errors = [error(table.precision, rows_of(form, *interval)) for interval in intervals]
                axis.plot(range(len(intervals)), errors, label=label, linewidth=0.9)
            if table.precision == "fp16":
                axis.axhline(HALF_STEP, color="grey", linewidth=0.6, linestyle=":")
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            axis.set_ylim(*((HALF_STEP / 4.0, 2.0 * TOP) if table.precision == "fp16" else (max(low, 0.3), high)))
            axis.minorticks_off()
            labels = [f"{low:g}..{high:g}" for low, high in intervals]
            axis.set_xticks(range(len(intervals)), labels, rotation=60, ha="right", fontsize=5)
            axis.set_title(name)
            axis.legend(fontsize=5)
        what = "largest relative error" if table.precision == "fp16" else "largest error in steps of the output's grid"
        figure.suptitle(f"HTP {table.precision}, {table.chip}, simulated: {what} (number of nodes)")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def rows_of(form: FormResult, low: float, high: float) -> list[Row]:
    """A form's rows of one interval, of every size."""
    return [row for row in form.rows if (row.low, row.high) == (low, high)]


def error(precision: str, rows: list[Row]) -> float:
    """The largest error; NaN, a gap, where there is none to show, TOP at most for fp16."""
    if precision == "a16":
        return max((row.max_steps for row in rows), default=math.nan) or math.nan
    if any(row.nonfinite for row in rows):
        return TOP
    return min(max((row.max_rel for row in rows), default=math.nan), TOP) or math.nan
