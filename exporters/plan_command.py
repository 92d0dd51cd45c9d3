"""`ringstep plan`: what a model would cost on a phone, before anything is exported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringstep import completion, console
from ringstep.errors import RingstepError
from ringstep.options import as_json, common

if TYPE_CHECKING:
    from recipes.plan import Plan
    from ringstep.devices import Device
    from ringstep.profiling.cost import ModelShape, Precision
    from ringstep.profiling.profile import Profile

DEFAULT_CONTEXTS = (1024, 4096)


@dataclass(frozen=True)
class Choice:
    """One way to run a model on a device."""

    device: str
    precision: str
    context: int
    layout: str
    basis: str
    """measured, predicted, or none where neither is possible."""
    ms: float | None
    median_error: float | None
    """Of a prediction: leave-one-out, as a share."""
    worst_error: float | None
    nearest: str
    extrapolated: tuple[str, ...]
    predicted_genie_ms: float | None
    weight_bytes: int
    kv_bytes: int
    embedding_bytes: int
    parts: int
    """Graphs that the chip's limit needs at least."""
    snr: str
    impossible: str
    """Why the device cannot run it; empty where it can."""
    meets_target: str
    """yes, likely (a worst error would miss it), perhaps (a worst error would meet it), no; empty without a target."""

    def plain(self) -> dict[str, Any]:
        """For --json: every key of a prediction says so."""
        word = self.basis if self.basis == "measured" else "predicted"
        rate = None if self.ms is None else 1000 / self.ms
        return {
            "device": self.device, "precision": self.precision, "context": self.context, "layout": self.layout,
            f"{word}_ms": self.ms, f"{word}_tokens_per_second": rate,
            **({} if word == "measured" else {
                "predicted_error": {"median": self.median_error, "worst": self.worst_error, "nearest": self.nearest},
                "predicted_by_extrapolation": self.extrapolated, "predicted_genie_ms": self.predicted_genie_ms}),
            "memory_bytes": {"weights": self.weight_bytes, "kv": self.kv_bytes, "embedding": self.embedding_bytes},
            "graph_parts": self.parts, "snr": self.snr or "not measured", "impossible": self.impossible or None,
            "meets_target": self.meets_target or None,
        }  # fmt: skip


@click.command(short_help="Say what MODEL would cost on a phone, in predicted milliseconds.")
@click.argument("model", shell_complete=completion.model)
@click.option("--device", "devices", required=True, multiple=True, metavar="NAME", shell_complete=completion.device,
              help="Phone or chip; may be given several times.")  # fmt: skip
@click.option("--target-tokens-per-second", "target", type=click.FloatRange(0, min_open=True), metavar="N",
              help="Say which choices reach it; leaves with 1 when none does.")  # fmt: skip
@click.option("--context", "contexts", type=click.IntRange(2), multiple=True, metavar="N", help="Default: 1024, 4096.")
@click.option("--precision", "precisions", multiple=True, metavar="NAME", help="Default: fp16, w8a16, w4a16.")
@click.option("--db", type=click.Path(path_type=Path), help="The profile store. Default: artifacts/profiles.db.")
@as_json
@common
def plan(model: str, devices: tuple[str, ...], target: float | None, contexts: tuple[int, ...],
         precisions: tuple[str, ...], db: Path | None, json_: bool) -> int:  # fmt: skip
    """List MODEL's precision x context x layout choices on a phone: predicted time, memory, known SNR.

    MODEL is a folder with config.json (no weights are needed), a GGUF file, or smollm2-135m. Leaves with 1 when a
    target is given and no choice reaches it.
    """
    from ringstep.devices import find_device
    from ringstep.profiling.cost import PRECISIONS, precision_named

    if target is not None and not math.isfinite(target):
        raise click.BadParameter(f"{target:g} is no rate", param_hint="--target-tokens-per-second")
    found = [find_device(name) for name in devices]
    kinds = [precision_named(name) for name in precisions or PRECISIONS]
    laid_out, label = open_plan(model)
    shape = shape_of(laid_out, label)
    for context in contexts:
        if context > laid_out.context:
            raise RingstepError(f"--context {context}: {label} was trained for {laid_out.context} tokens")
    wanted = contexts or sorted({min(context, laid_out.context) for context in DEFAULT_CONTEXTS})
    choices = [
        choice(shape, device, precision, context, layouts, target, db)
        for device in dict.fromkeys(found) for precision in kinds for context in wanted
        for layouts in layouts_of(shape, context)
    ]  # fmt: skip
    if json_:
        console.print_json({"model": label, "target_tokens_per_second": target,
                            "choices": [one.plain() for one in choices]})  # fmt: skip
    else:
        for device in dict.fromkeys(found):
            print_choices(label, device, [one for one in choices if one.device == device.id], target)
    reached = any(one.meets_target in ("yes", "likely") for one in choices)
    return 0 if target is None or reached else console.GATE_FAILED


def open_plan(model: str) -> tuple[Plan, str]:
    """A model's layers and its label, from its config alone. Raises RingstepError as `open_checkpoint` and recipes."""
    from recipes import plan_for
    from ringstep.checkpoint import HUB_ID, open_checkpoint
    from ringstep.tensor_file import read_json

    config = Path(model) / "config.json"
    if config.is_file():
        return plan_for(read_json(config)), Path(model).resolve().name
    if not Path(model).exists() and HUB_ID.fullmatch(model) and "/" in model and not Path(model).parent.exists():
        raise RingstepError(f"{model}: nothing is downloaded for a plan: give a folder with its config.json")
    checkpoint = open_checkpoint(model)
    return plan_for(checkpoint.config), checkpoint.label


def shape_of(laid_out: Plan, label: str) -> ModelShape:
    """What the latency model needs of a recipe's plan."""
    from ringstep.profiling.cost import LayerShape, ModelShape

    layers = []
    for name, kind in laid_out.kinds.items():
        sources = laid_out.layer_sources(laid_out.layers.index(name))
        matrices = [source.out_shape for source in sources.values() if len(source.out_shape) == 2]
        heads = sources["attn.q_proj.weight"].out_shape[0] // kind.head_dim
        layers.append(LayerShape(
            name, laid_out.layers.count(name), sum(map(math.prod, matrices)), sum(rows for rows, _ in matrices), heads,
            kind.kv_heads, kind.head_dim, 2 * len(kind.rotary.inv_freq), kind.window,
        ))  # fmt: skip
    return ModelShape(label, laid_out.recipe, laid_out.hidden, laid_out.vocab, tuple(layers))


def layouts_of(shape: ModelShape, context: int) -> list[dict[str, str]]:
    """The default layout of each kind (a ring that would never wrap is an append), and roll."""
    ring = {layer.name: "append" if layer.window is None or layer.window >= context else "ring"
            for layer in shape.layers}  # fmt: skip
    return [ring, dict.fromkeys(ring, "roll")]


def choice(shape: ModelShape, device: Device, precision: Precision, context: int, layouts: dict[str, str],
           target: float | None, db: Path | None) -> Choice:  # fmt: skip
    """One row: measured where the store has it, else predicted."""
    from exporters.known_snr import known_snr
    from ringstep.profiling.cost import kv_cache_bytes, step_cost, stored
    from ringstep.profiling.latency_model import predict_step

    chip, layout = device.chip, "+".join(dict.fromkeys(layouts.values()))
    graph = step_cost(shape, precision, context, layouts).weight_bytes
    snr = known_snr(shape.label, precision.name)
    impossible = "" if precision.scaled or chip.fp16 else f"{chip.htp_arch} has no fp16"
    ms = median = worst = genie = None
    basis, nearest = "none", ""
    extrapolated: tuple[str, ...] = ()
    measured = None if impossible else measured_step(shape.label, device, precision.name, context, layouts, db)
    if measured is not None:
        basis, ms = "measured", measured.median_us / 1000
        snr = "" if measured.snr_db is None else f"{measured.snr_db:.1f} dB"
        if measured.parity != "passed":
            impossible = f"measured, but its parity is {measured.parity}: no latency of a proven model"
    elif not impossible:
        try:
            found = predict_step(shape, precision.name, context, layouts, chip.name)
            basis, ms, median, worst = "predicted", found.predicted_ms, found.median_error, found.worst_error
            nearest, extrapolated = f"{found.nearest} ({100 * found.nearest_error:+.0f} %)", found.extrapolated
            if precision.name == "w4a16":
                other = predict_step(shape, precision.name, context, layouts, chip.name, "genie")
                # Weights are all that its costs know: far smaller models are not its measurements' kind.
                genie = None if any(why.startswith("layers of") for why in other.extrapolated) else other.predicted_ms
        except RingstepError as error:
            extrapolated = (str(error),)
    return Choice(
        device.id, precision.name, context, layout, basis, ms, median, worst, nearest, extrapolated, genie, graph,
        kv_cache_bytes(shape, precision, context),
        stored(shape.head_weights, shape.vocab, precision.embedding),
        math.ceil(graph / (chip.graph_limit_mb << 20)), snr, impossible,
        "" if target is None else "no" if impossible else verdict(ms, worst, target, bool(extrapolated)),
    )  # fmt: skip


def verdict(ms: float | None, worst_error: float | None, target: float, extrapolated: bool = False) -> str:
    """Whether a time reaches a rate; `worst_error` None for a measured one. An extrapolation is never sure."""
    if ms is None:
        return "no"
    rate, error = 1000 / ms, worst_error or 0.0
    # predicted = measured x (1 + error): the measured rate is the predicted one x (1 + error).
    if rate >= target:
        return "yes" if rate * (1 - error) >= target and not extrapolated else "likely"
    return "perhaps" if rate * (1 + error) >= target else "no"


def measured_step(label: str, device: Device, precision: str, context: int, layouts: dict[str, str],
                  db: Path | None) -> Profile | None:  # fmt: skip
    """The newest phone profile of just this step in the store."""
    from ringstep.profiling.store import DEFAULT, find, open_store

    with open_store(db or DEFAULT) as store:
        found = find(store, model=label, device=device.id, part="step", precision=precision, context=context,
                     runtime="qnn", unit="npu", origin="aihub")  # fmt: skip
    same = [p for p in found if p.subject.tokens == 1 and set(p.subject.layout.split("+")) == set(layouts.values())]
    return same[-1] if same else None


def print_choices(label: str, device: Device, choices: Sequence[Choice], target: float | None) -> None:
    """A device's choices as a table, and what the predictions are worth."""
    console.line(f"{label} on {device.id} ({device.chip.marketing}, HTP {device.chip.htp_arch})")
    columns = ["", "ctx", "layout", "basis", "ms", "tok/s", "error", "memory", "SNR"]
    rows = [
        (c.precision, c.context, c.layout, c.basis + "*" * bool(c.extrapolated and c.ms),
         "-" if c.ms is None else f"{c.ms:.1f}", "-" if c.ms is None else f"{1000 / c.ms:.0f}", error_text(c),
         console.human_bytes(c.weight_bytes + c.kv_bytes + c.embedding_bytes), c.snr or "-",
         *([c.meets_target] if target else []))
        for c in choices
    ]  # fmt: skip
    console.table("", [*columns, *(["target"] if target else [])], rows)
    predicted = [c for c in choices if c.basis == "predicted"]
    if predicted:
        console.line("predicted: not measured; error is leave-one-out over the published measurements, median-worst; "
                     "docs/latency-model.md")  # fmt: skip
        for why in dict.fromkeys(why for c in predicted for why in c.extrapolated):
            names = ", ".join(dict.fromkeys(c.precision for c in predicted if why in c.extrapolated))
            console.line(f"* predicted by extrapolation, {names}: {why}")
        for c in predicted if console.settings.verbose else ():
            console.line(f"predicted {c.ms:.1f} ms, {c.precision} at {c.context}, {c.layout}: nearest measurement "
                         f"{c.nearest}")  # fmt: skip
        genie = [c for c in predicted if c.predicted_genie_ms is not None]
        if genie:
            console.line(f"Genie's published w4a16 rates instead fit a predicted {genie[0].predicted_genie_ms:.1f} ms, "
                         "the cache's length left aside: another runtime, another graph")  # fmt: skip
    for why in dict.fromkeys(c.extrapolated[0] for c in choices if c.basis == "none" and c.extrapolated):
        console.line(why)
    for text in dict.fromkeys(f"{c.precision}: {c.impossible}" for c in choices if c.impossible):
        console.line(text)
    for text in dict.fromkeys(f"{c.precision}: weights need at least {c.parts} graphs (a graph may allocate "
                              f"{device.chip.graph_limit_mb} MiB)" for c in choices if c.parts > 1):  # fmt: skip
        console.line(text)
    if device.memory_gb and (large := [c for c in choices if total(c) > device.memory_gb * 1e9]):
        names = ", ".join(dict.fromkeys(c.precision for c in large))
        console.line(f"{names}: more than the device's {device.memory_gb} GB of memory")
    if not device.chip.weight_sharing:
        console.line(f"{device.chip.htp_arch} shares no weights: a prefill graph doubles them")
    console.line("SNR: of an export's logits on the simulator or a CPU, a measured row's on the phone; -: not measured")


def total(c: Choice) -> int:
    """Bytes of weights, caches and the embedding table."""
    return c.weight_bytes + c.kv_bytes + c.embedding_bytes


def error_text(c: Choice) -> str:
    """ "6-38 %", or nothing for what is not predicted."""
    return "-" if c.worst_error is None or c.median_error is None else (
        f"{100 * c.median_error:.0f}-{100 * c.worst_error:.0f} %")  # fmt: skip
