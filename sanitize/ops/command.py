"""`ringstep ops`: measure a chip's operators on the simulator, and write the table that passes and lint read."""

from __future__ import annotations

from pathlib import Path

import click

from ringstep import completion, console
from ringstep.errors import RingstepError
from ringstep.options import as_json, common


@click.command(short_help="Measure a chip's operators on the simulator.")
@click.option("--chip", required=True, metavar="NAME", shell_complete=completion.device,
              help="Chip or phone, such as sm8750 (see ringstep devices).")  # fmt: skip
@click.option("--precision", type=click.Choice(["fp16", "a16"]), default="fp16", show_default=True,
              help="a16: kernels between 16-bit quantised tensors.")  # fmt: skip
@click.option("--op", "names", multiple=True, help="Only forms whose name holds this, such as SiLU; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the table, as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw relative errors, .svg or .png (needs matplotlib).")
@as_json
@common
def ops(chip: str, precision: str, names: tuple[str, ...], out: Path | None, plot: Path | None, json_: bool) -> int:
    """Measure how accurately CHIP's operators compute, over intervals of their inputs.

    Each operator, and each form of a function that has several, is compiled by Qualcomm's compiler and run on
    its HTP simulator; the truth is float64 on the very inputs that the NPU got. All figures are simulated.
    """
    from ringstep.devices import find_device
    from sanitize.ops.catalog import all_forms
    from sanitize.ops.measure import measure
    from sanitize.ops.table import save

    if plot is not None:
        from sanitize.ops.plot import draw, require_plot

        require_plot(plot)
    for path in (out, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise RingstepError(f"{path}: its folder does not exist")
    target = find_device(chip).chip
    forms = [f for f in all_forms() if not names or any(name.casefold() in f.name.casefold() for name in names)]
    if not forms:
        raise RingstepError(f"--op {' '.join(names)}: no form has this in its name; leave it out to see all names")
    with console.progress(f"measuring {len(forms)} forms for {target.name}", len(forms)) as advance:
        table = measure(target, precision, forms, advance)
    if out is not None:
        save(table, out)
    if plot is not None:
        draw(table, plot)
    if json_:
        console.print_json({**vars(table), "forms": list(table.forms.values()), "simulated": True})
        return 0
    rows = []
    for form in table.forms.values():
        worst = max(form.rows, key=lambda row: row.loss_db, default=None)
        if worst is None:
            rows.append((form.name, form.ops, "refused", "", "", ""))
        else:
            at = f"{worst.low:g}..{worst.high:g}" + f" ({worst.size})" * (worst.size > 1)
            error = f"{worst.max_steps:g} steps" if precision == "a16" else f"{worst.max_rel:.1e}"
            rows.append((form.name, form.ops, f"{worst.snr_db:.1f}", f"{worst.ideal_db:.1f}", error, at))
    console.line(f"HTP {precision}, {table.chip} ({table.arch}), simulated, {table.version}")
    console.table("the worst interval of each", ["form", "nodes", "dB", "rounded dB", "error", "at"], rows)
    for form in table.forms.values():
        if form.refused:
            console.line(f"{form.name}: refused: {form.refused}")
    return 0
