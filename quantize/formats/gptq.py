"""Hugging Face GPTQ checkpoints: linears as packed integers, the rest in float16, written one tensor at a time.

Of a linear [out, in] with b bits in groups, real = scales * (q - zero) with q and zero counted from 0:

    qweight  int32   [in * b / 32, out]      packed along in, the first number in the lowest bits
    scales   float16 [groups, out]
    qzeros   int32   [groups, out * b / 32]  packed along out; checkpoint_format "gptq" stores zero - 1, "gptq_v2" zero
    g_idx    int32   [in]                    the group of an input

Symmetric weights are written as "gptq", which every reader knows, and asymmetric ones as "gptq_v2": readers turn the
first into the second by adding 1 to the packed words, which carries into the neighbour where a zero is 0 and stored as
-1, and gptqmodel refuses such files. vLLM and most kernels refuse groups that do not divide `in`.

gptqmodel 7.7 loads these folders as they are, a head of its own bits included. transformers 5.24 (through optimum 2.3)
reads quantised layers alone unless `block_name_to_quantize` says otherwise, and without a word fills a head that it
does not find with random numbers; hence the empty name here, which means every linear.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quantize.grid import Grid, QuantisedWeight
from quantize.pack import BITS, pack
from quantize.parameters import GridOf, Pieces, WeightOf, linears, parameters
from quantize.scheme import HEAD
from recipes.plan import Plan, Source
from ringstep import __version__
from ringstep.checkpoint import Checkpoint
from ringstep.errors import RingstepError
from ringstep.files import new_folder

CONFIG = "quantize_config.json"
GROUPS = (16, 32, 64, 128, 256, 512, 1024)  # what gptqmodel's kernels know, and one group a row
CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
BYTES = {"I32": 4, "F16": 2}
SCALE_LOSS = 2.0**-8  # relative; float16 keeps 2^-11 unless the scale is nearly too small for it
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "chat_template.jinja")  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor of the safetensors file: `offset` bytes into its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * BYTES[self.dtype]


def write_gptq(
    checkpoint: Checkpoint,
    plan: Plan,
    grid_of: GridOf,
    weight_of: WeightOf,
    pieces: Pieces,
    folder: Path,
    *,
    tick: Callable[[float], None] = lambda _: None,
) -> int:
    """Write a GPTQ checkpoint of a llama, mistral or qwen3 model into `folder`; return the bytes of its weights.

    Every linear and the head are written from weight_of(path), which must be on grid_of(path) and is asked for once;
    those whose grid is not the commonest one become gptqmodel's "dynamic" entries, which transformers refuses. A head
    of grid None stays in float16, as embedding and norms do, which come from `pieces`. `tick` is told the bytes
    written. The folder appears whole or not at all, and replaces one of an earlier run. Raises RingstepError naming the
    tensor for what the format or its readers cannot hold.
    """
    grids = check_gptq(checkpoint, plan, grid_of)
    kind = str(checkpoint.config["model_type"])
    common = Counter(grid for path, grid in grids.items() if path != HEAD).most_common(1)[0][0]
    entries = {entry.name: entry for entry in _layout(plan, grids)}
    form = "gptq" if all(grid.symmetric for grid in grids.values()) else "gptq_v2"
    with new_folder(folder, CONFIG) as out:
        with open(out / "model.safetensors", "wb") as file:
            start = _header(file, list(entries.values()))
            _write(plan, grids, weight_of, pieces, form, Writer(file, start, entries, tick))
            file.truncate(start + sum(entry.nbytes for entry in entries.values()))
            total = os.fstat(file.fileno()).st_size
        quantization = _quantization(plan, grids, common, form)
        # Older readers look for a file of its own.
        (out / CONFIG).write_text(json.dumps(quantization, indent=2) + "\n", encoding="utf-8")
        config = checkpoint.config | {
            "architectures": [CLASSES[kind]], "torch_dtype": "float16", "tie_word_embeddings": False,
            "quantization_config": quantization,
        }  # fmt: skip
        config.pop("dtype", None)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _text_files(checkpoint, out)
    return total


def check_gptq(checkpoint: Checkpoint, plan: Plan, grid_of: GridOf) -> dict[str, Grid]:
    """The grid of every linear that is quantised by path; RingstepError for a model or grid the format cannot hold."""
    kind = checkpoint.config.get("model_type")
    if kind not in CLASSES:
        raise RingstepError(f"a GPTQ checkpoint of model_type {kind!r} is not supported, only {', '.join(CLASSES)}")
    found: dict[str, Grid] = {}
    widths = [source.out_shape[1] for source in linears(plan).values()]
    for path, source in linears(plan).items():
        grid, where = grid_of(path), f"tensor {source.name} ({path})"
        if grid is None:
            if path != HEAD:
                raise RingstepError(f"{where} has no grid; a GPTQ checkpoint quantises every linear of a layer")
            continue
        if grid.bits not in BITS:
            raise RingstepError(f"{where}: GPTQ checkpoints have no {grid.bits} bits, only {', '.join(map(str, BITS))}")
        if source.rows is not None or source.add:
            raise RingstepError(f"{where} is part of a larger tensor, which this format cannot hold")
        outputs, inputs = source.out_shape
        if grid.block is not None and grid.block not in GROUPS:
            known = ", ".join(map(str, GROUPS))
            raise RingstepError(f"{where}: no reader knows groups of {grid.block}; use one of {known}")
        if grid.block is not None and inputs % grid.block:
            fits = [group for group in GROUPS if group < grid.block and not any(width % group for width in widths)]
            advice = f"use groups of {fits[-1]}" if fits else "use one scale a channel"
            raise RingstepError(
                f"{where}: its {inputs} inputs are no multiple of groups of {grid.block}, which vLLM and most GPTQ "
                f"kernels refuse; {advice}"
            )
        for what, count in (("inputs", inputs), ("outputs", outputs)):
            if count * grid.bits % 32:
                raise RingstepError(f"{where}: {count} {what} of {grid.bits} bits do not fill words of 32 bits")
        found[path] = grid
    return found


def _layout(plan: Plan, grids: dict[str, Grid]) -> Iterator[Entry]:
    """Every tensor of the file in order, int32 first so that all are aligned."""
    offset = 0

    def entry(name: str, dtype: str, *shape: int) -> Entry:
        nonlocal offset
        made = Entry(name, dtype, shape, offset)
        offset += made.nbytes
        return made

    all_sources = parameters(plan)
    for path, grid in grids.items():
        (outputs, inputs), module = all_sources[path].out_shape, _module(path, all_sources[path])
        yield entry(f"{module}.qweight", "I32", inputs * grid.bits // 32, outputs)
        yield entry(f"{module}.qzeros", "I32", grid.blocks(inputs), outputs * grid.bits // 32)
        yield entry(f"{module}.g_idx", "I32", inputs)
    for path, grid in grids.items():
        outputs, inputs = all_sources[path].out_shape
        yield entry(f"{_module(path, all_sources[path])}.scales", "F16", grid.blocks(inputs), outputs)
    for path, source in all_sources.items():
        if path not in grids:
            yield entry(_float_name(path, source), "F16", *source.out_shape)


def _module(path: str, source: Source) -> str:
    """The name of a linear in transformers' model; a tied head is one of its own there."""
    return "lm_head" if path == HEAD else source.name.removesuffix(".weight")


def _float_name(path: str, source: Source) -> str:
    return "lm_head.weight" if path == HEAD else source.name


def _header(file: BinaryIO, entries: list[Entry]) -> int:
    """Write the safetensors header; returns where the data starts."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        offsets = [entry.offset, entry.offset + entry.nbytes]
        fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    raw = json.dumps(fields).encode("utf-8")
    raw += b" " * (-len(raw) % 8)  # the data stays aligned
    file.write(len(raw).to_bytes(8, "little") + raw)
    return 8 + len(raw)


@dataclass
class Writer:
    """The safetensors file being written; entries by name."""

    file: BinaryIO
    start: int
    entries: dict[str, Entry]
    tick: Callable[[float], None]

    def put(self, name: str, array: NDArray[Any], at: int = 0) -> None:
        """Write an array `at` bytes into its tensor."""
        self.file.seek(self.start + self.entries[name].offset + at)
        self.file.write(np.ascontiguousarray(array).data)
        self.tick(array.nbytes)


def _write(
    plan: Plan, grids: dict[str, Grid], weight_of: WeightOf, pieces: Pieces, form: str, writer: Writer
) -> None:
    for path, source in parameters(plan).items():
        if path not in grids:
            at = 0
            for piece in pieces(source):
                half = _half(piece, source, path)
                writer.put(_float_name(path, source), half, at)
                at += half.nbytes
            continue
        grid, (outputs, inputs), module = grids[path], source.out_shape, _module(path, source)
        weight = weight_of(path)
        _check(weight, grid, source, path)
        shift = 1 << grid.bits - 1 if grid.symmetric else 0
        # In bytes that wrap, -8 + 8 is 0.
        writer.put(f"{module}.qweight", _words(weight.q.view(np.uint8) + np.uint8(shift), grid.bits).T)
        zero = np.full((outputs, grid.blocks(inputs)), shift) if weight.zero is None else weight.zero
        stored = zero.T.astype(np.uint8) - np.uint8(form == "gptq")
        writer.put(f"{module}.qzeros", _words(stored, grid.bits))
        writer.put(f"{module}.g_idx", (np.arange(inputs) // grid.width(inputs)).astype("<i4"))
        writer.put(f"{module}.scales", _scales(weight.scale, source, path).T)


def _check(weight: QuantisedWeight, grid: Grid, source: Source, path: str) -> None:
    scales = source.out_shape[0], grid.blocks(source.out_shape[1])
    if weight.grid != grid or weight.q.shape != source.out_shape or weight.scale.shape != scales:
        raise RingstepError(f"tensor {source.name} ({path}) does not have the shape or the grid that was announced")


def _words(q: NDArray[np.uint8], bits: int) -> NDArray[Any]:
    """Unsigned numbers [n, m] packed along m: int32 [n, m * bits / 32]."""
    return np.ascontiguousarray(pack(q, bits, signed=False)).view("<i4")


def _half(values: NDArray[np.float32], source: Source, path: str) -> NDArray[np.float16]:
    """The values in float16; RingstepError where it cannot hold them."""
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half.sum(dtype=np.float64)):
        what = "values that are not finite" if not np.isfinite(values).all() else "values beyond float16's 65504"
        raise RingstepError(f"tensor {source.name} ({path}): {what}; this checkpoint cannot be written in float16")
    return half


def _scales(scale: NDArray[np.float32], source: Source, path: str) -> NDArray[np.float16]:
    half = _half(scale, source, path)
    if (np.abs(half.astype(np.float32) - scale) > SCALE_LOSS * scale).any():
        raise RingstepError(
            f"tensor {source.name} ({path}): the scale {scale.min():.3g} is too small for the float16 that GPTQ "
            "checkpoints keep scales in; leave this model unquantised"
        )
    return half


def _quantization(plan: Plan, grids: dict[str, Grid], common: Grid, form: str) -> dict[str, Any]:
    """quantization_config, as gptqmodel writes and transformers reads it."""

    def fields(grid: Grid) -> dict[str, Any]:
        return {"bits": grid.bits, "group_size": grid.block or -1, "sym": grid.symmetric}

    sources = parameters(plan)
    others = {
        f"+:^{re.escape(_module(path, sources[path]))}$": fields(grid)
        for path, grid in grids.items()
        if fields(grid) != fields(common)
    }
    return {
        "quant_method": "gptq", **fields(common), "desc_act": False, "lm_head": HEAD in grids, "true_sequential": True,
        "checkpoint_format": form, "pack_dtype": "int32", "meta": {"quantizer": [f"ringstep:{__version__}"]},
        "block_name_to_quantize": "" if HEAD in grids else None,
    } | ({"dynamic": others} if others else {})  # fmt: skip


def _text_files(checkpoint: Checkpoint, out: Path) -> None:
    """The tokenizer's files and generation_config.json: the checkpoint's own, or for a GGUF what it amounts to."""
    if checkpoint.path.is_dir():
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, out / name)
        return
    files = checkpoint.tokenizer_files()
    if not files:
        return
    generation = json.loads(files.pop("generation.json"))
    for name, raw in files.items():
        (out / name).write_bytes(raw)
    tokens = {name: generation[name] for name in ("bos_token", "eos_token") if generation.get(name)}
    for name, body in (
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens),
        ("generation_config.json", {"eos_token_id": generation["eos_ids"]}),
    ):
        (out / name).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
