"""What a quantised export tells its user: sizes as they are, what `auto` raised, attention sinks, and warnings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporters.rounded import AUTO
from exporters.stages import versions
from ringstep import console
from ringstep.errors import RingstepError

if TYPE_CHECKING:
    from exporters.quantised import Quantised
    from quantize.grid import Grid
    from quantize.parameters import GridOf
    from quantize.sizes import Size, Storage
    from ringstep.manifest import Manifest, StageRecord

SIZES, REPORT = "quantize/sizes.json", "quantize/report.json"
SHOWN = 3  # sinks that are printed
WEIGHT_FILES = {
    "qdq": ("onnx/quantised.bin", "onnx/embedding.bin"), "gptq": ("gptq/model.safetensors",),
    "matmulnbits": ("onnx/weights.nbits.bin", "onnx/embedding.bin"),
}  # fmt: skip


def stage_report(own: Quantised, done: dict[str, dict[str, str]]) -> StageRecord:
    """quantize/sizes.json: what each format's weights take; quantize/report.json: sinks, prefix and warnings."""
    formats = [name for name in own.formats if name in WEIGHT_FILES]

    def build(folder: Path) -> dict[str, Any]:
        from quantize.report import warnings
        from quantize.sizes import as_json, rows

        (folder / SIZES).parent.mkdir()
        sizes = {}
        for name in formats:
            own_sizes, storage = sizes_of(own, name)
            sizes[name] = as_json(own_sizes, storage) | {
                "rows": [list(row) for row in rows(own_sizes)], "file_bytes": file_bytes(own, name),
            }  # fmt: skip
        (folder / SIZES).write_text(json.dumps(sizes, indent=1) + "\n")
        found, cut = own.calibration, {}
        if "qdq" in done:
            cut = own.line.manifest.stages["qdq"].facts["clipped"]
        prefix = found.prefix if own.scheme.sink_prefix == "auto" else ()
        texts = token_texts(own.job.out, [*(sink.token for sink in found.sinks), *prefix])
        lines = warnings(found.seen, cut) + unread(own)
        body = {
            # Of a scheme of weights alone rounding is all that reads text.
            "scheme": own.scheme.name, "tokens": found.tokens or tokens_rounded_on(own),
            "sinks": [dataclasses.asdict(sink) | {"text": texts.get(sink.token)} for sink in found.sinks],
            "prefix": {"ids": list(prefix), "texts": [texts.get(i) for i in prefix]},
            "warnings": lines,
        }  # fmt: skip
        (folder / REPORT).write_text(json.dumps(body, indent=1) + "\n")
        return {"warnings": len(lines)}

    names = ("tokenizer", "calibrate", "round", *formats)
    inputs = {f"{name}/{file}": sha for name in names for file, sha in done.get(name, {}).items()}
    options = {"formats": formats, "scheme": own.scheme.name, "sink_prefix": own.scheme.sink_prefix}
    return own.line.stage("report", inputs, options,
                          versions("quantize", "exporters/quantize_report.py"), build)  # fmt: skip


def tokens_rounded_on(own: Quantised) -> int:
    """How many tokens the rounding of weights reads: none where all is rounded to nearest."""
    from quantize.parameters import linears
    from quantize.scheme import weights_for

    read = any(weights_for(own.scheme, path).rounding != "nearest" for path in linears(own.line.plan))
    return sum(map(len, own.sequences)) if read else 0


def unread(own: Quantised) -> list[str]:
    """What a format cannot say to its readers."""
    if "gptq" not in own.formats or not own.calibration.prefix or own.scheme.sink_prefix == "off":
        return []
    return ["a GPTQ checkpoint has no sink prefix: its readers compute the first token with weights that were rounded "
            "without it; use a scheme with sink_prefix = \"off\", such as int4-g64"]  # fmt: skip


def sizes_of(own: Quantised, name: str) -> tuple[list[Size], Storage]:
    """The sizes of a format's parameters, and what it spends beside the numbers."""
    from quantize.scheme import EMBEDDING, HEAD
    from quantize.sizes import GPTQ, HTP, MATMUL_NBITS, sizes
    from quantize.table import FILE

    plan = own.line.plan
    grid_of: GridOf = own.grid_of
    if name == "qdq":
        head = own.weights().get(HEAD)
        shared = head is not None and head.q.file == FILE
        return sizes(plan, grid_of, HTP, shared_head=shared), HTP
    if name == "gptq":
        # The table is kept in float16, and blocks have scales of their own.
        return sizes(plan, lambda path: None if path == EMBEDDING else plain(grid_of(path)), GPTQ), GPTQ
    return cpu_sizes(own), MATMUL_NBITS


def cpu_sizes(own: Quantised) -> list[Size]:
    """The sizes of MatMulNBits graphs beside the host's table."""
    from quantize.formats.matmul_nbits import block_of
    from quantize.parameters import parameters
    from quantize.scheme import EMBEDDING
    from quantize.sizes import HTP, MATMUL_NBITS, sizes

    sources = parameters(own.line.plan)

    def grid_of(path: str) -> Grid | None:
        grid = plain(own.grid_of(path))
        return grid and dataclasses.replace(grid, block=block_of(grid, sources[path].out_shape[1], path))

    table = next(size for size in sizes(own.line.plan, own.grid_of, HTP) if size.path == EMBEDDING)
    others = sizes(own.line.plan, lambda path: None if path == EMBEDDING else grid_of(path), MATMUL_NBITS)
    return [table, *(size for size in others if size.path != EMBEDDING)]


def plain(grid: Grid | None) -> Grid | None:
    """A grid with a scale of its own for every block."""
    return grid and dataclasses.replace(grid, two_level=False)


def file_bytes(own: Quantised, name: str) -> int:
    """What the files of a format's weights take on disk."""
    home = own.job.out / "matmulnbits" if name == "matmulnbits" and own.scheme.activations.bits else own.job.out
    return sum((home / file).stat().st_size for file in WEIGHT_FILES[name])


def token_texts(artifact: Path, ids: list[int]) -> dict[int, str]:
    """The tokens' own texts, specials included; {} without a tokenizer."""
    from ringstep.text import Text

    try:
        tokenizer = Text(artifact).tokenizer
    except RingstepError:
        return {}
    return {i: text for i in ids if (text := tokenizer.id_to_token(i)) is not None}


def read_report(manifest: Manifest) -> dict[str, Any] | None:
    """What the report stage wrote, and under "auto" what `auto` raised where it did; None for an export of floats."""
    if "report" not in manifest.stages:
        return None
    body: dict[str, Any] = json.loads((manifest.folder / REPORT).read_text())
    if AUTO in manifest.stages["round"].outputs:
        body["auto"] = json.loads((manifest.folder / AUTO).read_text())
    return body | {"sizes": json.loads((manifest.folder / SIZES).read_text())}


def print_quantised(body: dict[str, Any]) -> None:
    """The size table of each format, what `auto` raised, and the attention sinks."""
    from quantize.sizes import COLUMNS

    for name, sizes in body["sizes"].items():
        print()
        console.table(f"{body['scheme']} as {name}", COLUMNS, sizes["rows"])
        console.line(f"{sizes['bits']:.3f} bits a weight, {console.human_bytes(sizes['file_bytes'])} on disk")
    if "auto" in body:
        print_auto(body["auto"])
    print()
    for text in sink_lines(body):
        console.line(text)


def print_auto(body: dict[str, Any]) -> None:
    """What `auto` raised in its order, with the SNR once that and all above it are raised, and how far it came."""
    print()
    if body["raised"]:
        rows = [(p["path"], f"{p['low']} -> {p['high']}", f"{100 * p['noise']:.1f}",
                 console.human_bytes(p["extra_bytes"]), f"{p['db']:.1f}",
                 f"{p['measured_db']:.1f}" if "measured_db" in p else None) for p in body["raised"]]  # fmt: skip
        console.table("raised by auto", ["linear", "bits", "noise %", "more", "dB then", "measured"], rows)
    goals = [f"{body['target_db']:.1f} dB"] if body["target_db"] is not None else []
    goals += [f"at most {console.human_bytes(body['max_bytes'])}"] if body["max_bytes"] is not None else []
    total = console.human_bytes(sum(p["extra_bytes"] for p in body["raised"]))
    console.line(f"auto: {body['start_db']:.1f} dB at the scheme's own bits, {body['measured_db']:.1f} dB with "
                 f"{len(body['raised'])} linears raised ({total} more)")  # fmt: skip
    console.line(f"      wanted: {', '.join(goals)}; logits on calibration text, weights alone")


def sink_lines(body: dict[str, Any]) -> list[str]:
    """The sinks in words."""
    sinks, prefix = body["sinks"], body["prefix"]
    if not sinks:
        return ["no attention sinks: no position has massive activations"]
    lines = []
    for sink in sinks[:SHOWN]:
        text = f" {sink['text']!r}" if sink["text"] else ""
        lines.append(f"attention sink at position {sink['position']}: token {sink['token']}{text}, "
                     f"{sink['ratio']:.0f} times the rest in layer {sink['layer']}")  # fmt: skip
    if len(sinks) > SHOWN:
        lines.append(f"... and at {len(sinks) - SHOWN} more positions")
    if prefix["ids"]:
        texts = " ".join(repr(t) if t else str(i) for i, t in zip(prefix["ids"], prefix["texts"], strict=True))
        lines.append(f"sink prefix: {texts}, its keys and values kept in float; every text begins with it")
    else:
        lines.append("no sink prefix: the sink is quantised with the rest")
    return lines
