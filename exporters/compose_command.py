"""`ringstep profiles compose`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringstep import completion, console
from ringstep.errors import RingstepError, did_you_mean
from ringstep.options import as_json, common

if TYPE_CHECKING:
    from ringstep.profiling.compose import Composed
    from ringstep.profiling.profile import Profile

CHUNKED = "vocoder"  # once a chunk of frames, not once a step


@click.command(short_help="Add a step's latency up from its parts.")
@click.argument("model")
@click.option("--device", required=True, metavar="NAME", shell_complete=completion.device, help="Phone or chip.")
@click.option("--precision", required=True, metavar="NAME", help="Such as w4a16.")
@click.option("--context", "contexts", type=click.IntRange(1), multiple=True,
              help="Of the full layers. Default: every one that was measured.")  # fmt: skip
@click.option("--layout", type=click.Choice(["ring", "roll", "append", "join"]),
              help="Cache layout; ring stands for ring with append for full layers.")  # fmt: skip
@click.option("--unit", type=click.Choice(["npu", "gpu", "cpu"]), default="npu", show_default=True,
              help="Where the parts ran.")  # fmt: skip
@click.option("--runtime", type=click.Choice(["qnn", "tflite", "onnx"]), help="Where a unit was measured with several.")
@click.option("--published", is_flag=True, help="From the figures that others published, not from the store.")
@click.option("--db", type=click.Path(path_type=Path), help="The profile store. Default: artifacts/profiles.db.")
@as_json
@common
def compose(model: str, device: str, precision: str, contexts: tuple[int, ...], layout: str | None, unit: str,
            runtime: str | None, published: bool, db: Path | None, json_: bool) -> int:  # fmt: skip
    """Add MODEL's decode step up from profiles of its parts, such as 21 sliding and 7 full layers and the head."""
    from ringstep.profiling.compose import all_full
    from ringstep.profiling.compose import compose as add_up

    found, rounding = candidates(model, published, db)
    expected = {p.subject.part: p.subject.count for p in found if is_part(p)}
    if expected.keys() & {"full", "sliding"}:
        expected.setdefault("head", 1)
    own = matching(found, device, precision, layout, unit, runtime)
    steps = []
    for context in contexts or measured_contexts(own):
        parts = choose(own, context)
        if contexts and "full" in expected and all(p.subject.part != "full" for p in parts):
            known = ", ".join(map(str, measured_contexts(own))) or "none"
            raise RingstepError(f"no full layer of {model} at context {context}, {precision}; measured: {known}")
        full = all_full(parts)
        steps.append((add_up(parts, rounding=rounding, expected=expected),
                      add_up(full, rounding=rounding) if full else None))  # fmt: skip
    if json_:
        console.print_json({"model": model, "device": device, "precision": precision, "published": published,
                            "steps": [as_plain(step, flat) for step, flat in steps]})  # fmt: skip
    else:
        for step, flat in steps:
            print_step(step, flat)
    return 0


def candidates(model: str, published: bool, db: Path | None) -> tuple[list[Profile], dict[str, float]]:
    """A model's profiles and their rounding by job. Raises RingstepError where there are none."""
    if published:
        from ringstep.profiling.published import load_published

        table = load_published()
        every, rounding = list(table.profiles), table.rounding_us
        # A variant of a layer, such as another GELU, is no part of the model.
        found = [p for p in every if p.subject.model.casefold() == model.casefold() and "(" not in p.subject.recipe]
        where = "the published figures"
    else:
        from ringstep.profiling.store import DEFAULT, find, open_store

        path, rounding = db or DEFAULT, {}
        with open_store(path) as store:
            found = find(store, model=model)
            every = found or find(store)
        where = str(path)
    if not found:
        names = {p.subject.model for p in every}
        hint = did_you_mean(model, names) or ("" if published else "; --published has what others measured")
        raise RingstepError(f"no profile of {model!r} in {where}{hint}")
    return found, rounding


def is_part(profile: Profile) -> bool:
    """Whether it is of one layer or the head: no whole step, or piece of one, and nothing that runs once a chunk."""
    return not profile.subject.part.startswith(("step", "prefill")) and profile.subject.part != CHUNKED


def matching(found: Sequence[Profile], device: str, precision: str, layout: str | None, unit: str,
             runtime: str | None = None) -> list[Profile]:  # fmt: skip
    """Those of one device, precision, layout, unit and runtime.

    Raises RingstepError where none is left, and where layouts or runtimes differ and none was named.
    """
    from ringstep.devices import find_device

    names = {device.casefold()}
    try:
        known = find_device(device)
        names |= {known.id.casefold(), known.name.casefold(), known.aihub.casefold()} - {""}
    except RingstepError:
        pass  # a store may hold devices that devices.toml does not
    here = [p for p in found if p.place.device.casefold() in names and p.place.unit == unit and is_part(p)]
    own = [p for p in here if p.subject.precision == precision and runtime in (None, p.place.runtime)]
    if not own:
        have = sorted({f"{p.place.device} {p.place.unit} {p.subject.precision}" for p in found})
        raise RingstepError(f"no part measured on {device} {unit} in {precision}; there are {', '.join(have)[:200]}")
    if len(runtimes := sorted({p.place.runtime for p in own})) > 1:
        raise RingstepError(f"{unit} was measured with {', '.join(runtimes)}: choose one with --runtime")
    # ring is what windows are in, append the same for a full layer: only the new entry is returned.
    wanted = {"ring": ("ring", "append", ""), None: None}.get(layout, (layout, ""))
    if wanted is not None:
        own = [p for p in own if p.subject.layout in wanted]
    for part in dict.fromkeys(p.subject.part for p in own):
        layouts = sorted({p.subject.layout for p in own if p.subject.part == part})
        if len(layouts) > 1:
            raise RingstepError(f"{part} was measured in layouts {', '.join(layouts)}: choose one with --layout")
    if not own:
        raise RingstepError(f"no part measured in layout {layout}; leave --layout out to see which there are")
    return own


def measured_contexts(own: Sequence[Profile]) -> list[int]:
    """Contexts of the full layers, [0] where there are none."""
    return sorted({p.subject.context for p in own if p.subject.part == "full"}) or [0]


def choose(own: Sequence[Profile], context: int) -> list[Profile]:
    """One profile a part: full layers of that context, the newest of the others, of that context first."""
    parts: dict[str, Profile] = {}
    for profile in sorted(own, key=lambda p: p.subject.context == context):
        if profile.subject.part != "full" or profile.subject.context == context:
            parts[profile.subject.part] = profile
    order = ["sliding", "full", "head"]
    return sorted(parts.values(), key=lambda p: order.index(p.subject.part) if p.subject.part in order else -1)


def as_plain(step: Composed, flat: Composed | None) -> dict[str, Any]:
    """For --json."""
    return {
        "context": step.context, "unit": step.unit,
        "terms": [{"part": t.part, "count": t.count, "ms": t.ms, "total_ms": t.total_ms, "layout": t.layout,
                   "context": t.context, "job": t.job, "origin": t.origin} for t in step.terms],
        "ms": step.ms, "low_ms": step.low_ms, "high_ms": step.high_ms, "tokens_per_second": step.tokens_per_second,
        "layers_only": step.layers_only, "missing": step.missing, "notes": step.notes,
        "every_layer_full_ms": flat.ms if flat else None, "times_faster_than_full": flat.ms / step.ms if flat else None,
    }  # fmt: skip


def print_step(step: Composed, flat: Composed | None) -> None:
    """The sum as a table, and what it means."""
    origins = "/".join(sorted({term.origin for term in step.terms}))
    at = f", context {step.context}" if step.context else ""
    title = f"{step.model}, {step.device} {step.unit.upper()}, {step.precision}{at} ({origins})"
    rows: list[tuple[object, ...]] = [
        (t.part, t.layout or "-", f"{t.count} x {t.ms:.3f}", f"{t.total_ms:.2f}") for t in step.terms
    ]
    console.line(title)
    console.table("", ["part", "layout", "count x ms", "ms"], [*rows, ("sum", "", "", f"{step.ms:.2f}")])
    bounds = "" if step.low_ms is None else f" (between {step.low_ms:.2f} and {step.high_ms:.2f})"
    rate = step.tokens_per_second
    speed = "no step without the missing parts" if rate is None else f"{rate:.1f} tokens/s"
    console.line(f"{step.ms:.2f} ms{bounds}, {speed}{', layers only' if step.layers_only else ''}")
    if step.missing:
        console.line(f"not measured: {', '.join(step.missing)}")
    if flat and not set(step.missing) - {"head"}:
        console.line(f"every layer full: {flat.ms:.2f} ms; this step is {flat.ms / step.ms:.2f}x as fast")
    for note in step.notes:
        (console.warn if note.startswith("PARITY") else console.line)(note)
