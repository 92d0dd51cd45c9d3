"""GPTQ checkpoints, read by a dequantiser written from the format's description and by transformers' own config."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_models import LLAMA, QWEN3, rounded, save_model
from safetensors.numpy import load_file

from quantize.formats.gptq import write_gptq
from quantize.grid import Grid, QuantisedWeight
from quantize.parameters import linears, parameters
from recipes import plan_for
from recipes.plan import Plan
from recipes.weights import pieces, read
from ringstep.checkpoint import Checkpoint, open_checkpoint
from ringstep.errors import RingstepError

GRIDS = [
    Grid(4, block=32), Grid(4, symmetric=False, block=16), Grid(8), Grid(2, symmetric=False, block=32),
    Grid(3, block=32), Grid(4, block=16, two_level=True), Grid(8, symmetric=False),
]  # fmt: skip


@pytest.fixture(params=[LLAMA, QWEN3], ids=["llama-tied", "qwen3"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Checkpoint, Plan]:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", request.param)))
    return checkpoint, plan_for(checkpoint.config)


def write(
    checkpoint: Checkpoint, plan: Plan, folder: Path, grid: Grid, head: Grid | None = None, **kwargs: Any
) -> dict[str, QuantisedWeight]:
    """Write a checkpoint rounded to nearest; returns its weights by path."""
    made: dict[str, QuantisedWeight] = {}

    def weight_of(path: str) -> QuantisedWeight:
        assert path not in made, f"{path} was asked for twice"
        made[path] = rounded(read(checkpoint, linears(plan)[path]), grid_of(path))
        return made[path]

    grid_of = kwargs.get("grid_of") or (lambda path: (head or grid) if path == "head" else grid)
    write_gptq(checkpoint, plan, grid_of, kwargs.get("weight_of") or weight_of, partial(pieces, checkpoint), folder)
    return made


def numbers(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [n, w] as the unsigned numbers [n, w * 32 / bits], by Python's own whole numbers."""
    rows = []
    for row in words:
        stream = int.from_bytes(row.astype("<i4").tobytes(), "little")
        rows.append([stream >> i * bits & (1 << bits) - 1 for i in range(len(row) * 32 // bits)])
    return np.array(rows)


def dense(tensors: dict[str, np.ndarray], module: str, config: dict[str, Any]) -> np.ndarray:
    """The real weight [out, in] of a module."""
    own = [entry["bits"] for pattern, entry in config.get("dynamic", {}).items() if module in pattern.replace("\\", "")]
    bits = own[0] if own else config["bits"]
    q = numbers(tensors[f"{module}.qweight"].T, bits)
    zero = numbers(tensors[f"{module}.qzeros"], bits) + (config["checkpoint_format"] == "gptq")
    groups, scales = tensors[f"{module}.g_idx"], tensors[f"{module}.scales"].astype(np.float32)
    return (scales[groups] * (q.T - zero[groups])).T


@pytest.mark.parametrize("grid", GRIDS)
def test_every_linear_is_what_was_quantised(source: tuple[Checkpoint, Plan], tmp_path: Path, grid: Grid) -> None:
    checkpoint, plan = source
    made = write(checkpoint, plan, tmp_path / "out", grid)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == ("gptq" if grid.symmetric else "gptq_v2")
    assert made.keys() == linears(plan).keys()
    for path, weight in made.items():
        module = "lm_head" if path == "head" else linears(plan)[path].name.removesuffix(".weight")
        real = weight.dequantised()
        found = dense(tensors, module, config)
        # float16 scales: exact but for two-level ones, which are products.
        assert np.allclose(found, real, rtol=2**-10, atol=0) if grid.two_level else np.array_equal(found, real)
        assert tensors[f"{module}.g_idx"].dtype == np.int32 and tensors[f"{module}.scales"].dtype == np.float16
    for path, parameter in parameters(plan).items():
        if path not in made:
            expected = read(checkpoint, parameter).astype(np.float16)
            assert np.array_equal(tensors[parameter.name], expected)


def test_the_tensors_are_those_of_the_model(source: tuple[Checkpoint, Plan], tmp_path: Path) -> None:
    """transformers reads the config, and every parameter of its model is there, quantised or plain."""
    transformers = pytest.importorskip("transformers")
    checkpoint, plan = source
    write(checkpoint, plan, tmp_path / "out", Grid(4, block=32))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.tie_word_embeddings is False and config.model_type == checkpoint.config["model_type"]
    quantization = transformers.GPTQConfig.from_dict(config.quantization_config)
    assert (quantization.bits, quantization.group_size, quantization.sym, quantization.format) == (4, 32, True, "gptq")
    assert config.quantization_config["lm_head"] is True and quantization.desc_act is False
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text()) == config.quantization_config
    import torch

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    have = set(load_file(tmp_path / "out" / "model.safetensors"))
    for name in model.state_dict():
        module = name.removesuffix(".weight")
        parts = {f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        assert (name in have) != (parts <= have), name


def test_symmetric_zeros_are_the_middle_less_one(tmp_path: Path) -> None:
    """What every reader of the first format expects: 0x77777777."""
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", LLAMA)))
    write(checkpoint, plan_for(LLAMA), tmp_path / "out", Grid(4, block=32))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {int(word) for word in np.unique(tensors["lm_head.qzeros"])} == {0x77777777}


def test_another_grid_for_the_head(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", LLAMA)))
    made = write(checkpoint, plan_for(LLAMA), tmp_path / "out", Grid(4, block=32), Grid(8))
    config = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert config["bits"] == 4 and config["dynamic"] == {"+:^lm_head$": {"bits": 8, "group_size": -1, "sym": True}}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(dense(tensors, "lm_head", config), made["head"].dequantised())


def test_a_head_in_float(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", LLAMA)))
    grid_of = lambda path: None if path == "head" else Grid(4, block=32)
    made = write(checkpoint, plan_for(LLAMA), tmp_path / "out", Grid(4, block=32), grid_of=grid_of)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "head" not in made and np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["lm_head"] is False


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        (Grid(16), "q_proj.weight .layers.0.attn.q_proj.: GPTQ checkpoints have no 16 bits"),
        (Grid(4, block=24), "no reader knows groups of 24"),
        (Grid(4, block=64), r"down_proj.weight .*: its 96 inputs are no multiple of groups of 64.*use groups of 32"),
    ],
)
def test_grids_without_readers_are_refused(tmp_path: Path, grid: Grid, reason: str) -> None:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", LLAMA)))
    with pytest.raises(RingstepError, match=reason):
        write(checkpoint, plan_for(LLAMA), tmp_path / "out", grid)
    assert not (tmp_path / "out").exists()


def test_failures_name_the_tensor_and_leave_nothing(tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": False}
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", config)))
    plan, grid, out = plan_for(config), Grid(4, block=32), tmp_path / "out"
    weights = {path: rounded(read(checkpoint, source), grid) for path, source in linears(plan).items()}
    with pytest.raises(RingstepError, match=r"has no grid"):
        write(checkpoint, plan, out, grid, grid_of=lambda _: None)
    with pytest.raises(RingstepError, match=r"up_proj.weight .*the grid that was announced"):
        wrong = weights | {"layers.1.mlp.up_proj": rounded(read(checkpoint, plan.embedding), grid)}
        write(checkpoint, plan, out, grid, weight_of=wrong.__getitem__)
    for scale, reason in ((1e-9, "too small for the float16"), (1e9, "beyond float16"), (np.nan, "not finite")):
        bad = QuantisedWeight(grid, weights["head"].q, np.full_like(weights["head"].scale, scale))
        with pytest.raises(RingstepError, match=f"lm_head.weight .head.: .*{reason}"):
            write(checkpoint, plan, out, grid, weight_of=(weights | {"head": bad}).__getitem__)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", LLAMA)))
    plan, grid, out = plan_for(LLAMA), Grid(4, block=32), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RingstepError, match="was not written by this command"):
        write(checkpoint, plan, out, grid)
    (out / "notes.txt").unlink()
    write(checkpoint, plan, out, grid)
    (out / "stale").write_text("")
    write(checkpoint, plan, out, Grid(8))
    assert not (out / "stale").exists() and json.loads((out / "quantize_config.json").read_text())["bits"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", LLAMA)))
    checkpoint.config["model_type"] = "gemma3_text"
    with pytest.raises(RingstepError, match="model_type 'gemma3_text' is not supported"):
        write(checkpoint, plan_for(LLAMA), tmp_path / "out", Grid(4, block=32))


def test_a_quantised_checkpoint_is_refused_as_a_source(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_model(tmp_path / "source", LLAMA)))
    write(checkpoint, plan_for(LLAMA), tmp_path / "out", Grid(4, block=32))
    with pytest.raises(RingstepError, match="quantization_config"):
        plan_for(open_checkpoint(str(tmp_path / "out")).config)
