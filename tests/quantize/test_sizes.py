"""Sizes against figures worked out by hand and against files that were written."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from random_models import LLAMA, rounded, save_model

from quantize.formats.gptq import write_gptq
from quantize.grid import Grid
from quantize.parameters import linears
from quantize.sizes import COLUMNS, GPTQ, HTP, MATMUL_NBITS, PLAIN, Storage, as_json, grid_name, nbytes, rows, sizes
from recipes import plan_for
from recipes.weights import pieces, read
from ringstep.checkpoint import open_checkpoint
from ringstep.tensor_file import safetensors_header


@pytest.mark.parametrize(
    ("grid", "storage", "bits"),
    [
        (Grid(4, symmetric=False, block=128), PLAIN, 4.25),
        (Grid(4, block=128), PLAIN, 4.125),
        (Grid(4, block=128), GPTQ, 4 + 16 / 128 + 4 / 128),
        (Grid(4, symmetric=False, block=128), GPTQ, 4 + 16 / 128 + 4 / 128),
        (Grid(4, block=32), MATMUL_NBITS, 5.0),
        (Grid(4, symmetric=False, block=64), MATMUL_NBITS, 4 + 32 / 64 + 4 / 64),
        (Grid(4, block=32, two_level=True), HTP, 4 + 8 / 32 + 32 / 1024),
        (Grid(8), HTP, 8 + 32 / 1024),
        (Grid(2, block=16), PLAIN, 3.0),
        (Grid(4, block=1000), PLAIN, 4 + 2 * 16 / 1024),  # the second block is shorter and pays the same
        (None, PLAIN, 16.0),
        (None, MATMUL_NBITS, 32.0),
    ],
)
def test_bits_a_weight(grid: Grid | None, storage: Storage, bits: float) -> None:
    assert nbytes((512, 1024), grid, storage) * 8 / (512 * 1024) == pytest.approx(bits, abs=1e-12)


def test_names() -> None:
    assert grid_name(Grid(4, block=32, two_level=True)) == "int4 x 32 two-level"
    assert grid_name(Grid(4, symmetric=False, block=128)) == "uint4 x 128"
    assert grid_name(Grid(8)) == "int8 a row" and grid_name(None) == "float16" and grid_name(None, 32) == "float32"


def test_the_table_adds_up() -> None:
    plan = plan_for(LLAMA)
    grid_of = lambda path: {"embedding": None, "head": Grid(8), "layers.1.mlp.down_proj": Grid(8)}.get(path, Grid(4))
    found = sizes(plan, grid_of)
    assert [size.path for size in found][:2] == ["embedding", "layers.0.input_norm"]
    assert [size.path for size in found][-2:] == ["norm", "head"]
    by_path = {size.path: size for size in found}
    assert by_path["embedding"].bytes == 160 * 64 * 2 and by_path["norm"].bytes == 64 * 2
    assert by_path["head"].bytes == 160 * 64 + 160 * 2 and by_path["layers.0.mlp.down_proj"].bytes == 64 * 48 + 64 * 2
    table = rows(found)
    assert len(COLUMNS) == len(table[0])
    labels = [(row[0], row[2]) for row in table]
    assert ("mlp.down_proj (1)", "int4 a row") in labels and ("mlp.down_proj (1)", "int8 a row") in labels
    assert ("attn.q_proj (2)", "int4 a row") in labels and ("input_norm (2)", "float16") in labels
    total = sum(size.bytes for size in found)
    body = json.loads(json.dumps(as_json(found)))
    assert body["bytes"] == total and body["weights"] == sum(size.elements for size in found)
    assert body["bits"] == pytest.approx(8 * total / body["weights"]) and table[-1][3] == f"{body['bits']:.3f}"
    assert sum(entry["bytes"] for entry in body["parameters"]) == total
    assert len(sizes(plan, grid_of, shared_head=True)) == len(found) - 1


@pytest.mark.parametrize("grid", [Grid(4, block=32), Grid(4, symmetric=False, block=16), Grid(8)])
def test_the_table_is_what_a_gptq_checkpoint_weighs(tmp_path: Path, grid: Grid) -> None:
    checkpoint, plan = open_checkpoint(str(save_model(tmp_path / "source", LLAMA))), plan_for(LLAMA)
    grid_of = lambda path: None if path == "embedding" else grid
    weight_of = lambda path: rounded(read(checkpoint, linears(plan)[path]), grid)
    write_gptq(checkpoint, plan, grid_of, weight_of, partial(pieces, checkpoint), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    header = safetensors_header(file)
    # g_idx says nothing that group_size does not, so the table leaves it out.
    indices = sum(4 * tensor.shape[0] for name, tensor in header.items() if name.endswith(".g_idx"))
    start = min(tensor.offset for tensor in header.values())
    assert file.stat().st_size - start - indices == sum(size.bytes for size in sizes(plan, grid_of, GPTQ))
