"""MatMulNBits graphs on ONNX Runtime against the float graphs with dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from random_models import LLAMA, QWEN3, rounded, save_model

from exporters.onnx import export_graphs
from exporters.weights import load_index, write_weights
from quantize.formats.matmul_nbits import DATA, write_matmul_nbits
from quantize.grid import Grid, QuantisedWeight
from quantize.parameters import linears
from recipes import plan_for
from recipes.plan import Options, Plan
from recipes.step import step_spec
from recipes.weights import key, read
from ringstep.checkpoint import Checkpoint, open_checkpoint
from ringstep.errors import RingstepError
from ringstep.parity.metrics import snr_db

GRIDS = [
    Grid(4, block=32), Grid(4, symmetric=False, block=16), Grid(8), Grid(4), Grid(4, block=64), Grid(4, block=48),
    Grid(8, symmetric=False, block=32), Grid(2, symmetric=False, block=16), Grid(4, block=16, two_level=True),
    Grid(4, symmetric=False),
]  # fmt: skip


class Exported:
    """A tiny model's float graphs."""

    def __init__(self, folder: Path, config: dict) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(str(save_model(folder / "source", config)))
        self.plan: Plan = plan_for(config)
        self.weights = {path: read(self.checkpoint, source) for path, source in linears(self.plan).items()}
        write_weights(self.checkpoint, self.plan, "float32", folder)
        spec = step_spec(self.plan, Options(), model="tiny", context=16, chunks=(1, 4), eos=())
        self.files = list(export_graphs(self.plan, Options(), spec, load_index(folder), folder).values())

    def round(self, grid: Grid, head: Grid | None = None) -> dict[str, QuantisedWeight]:
        return {path: rounded(w, (head or grid) if path == "head" else grid) for path, w in self.weights.items()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(tmp_path_factory.mktemp("float"), LLAMA)


def session(path: Path, weights: dict[str, np.ndarray] | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    if weights:
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def compare(exported: Exported, weights: dict[str, QuantisedWeight], files: list[Path]) -> float:
    """The lowest SNR in dB of any output of any graph against the float graph with dequantised weights."""
    sources = linears(exported.plan)
    real = {key(sources[path]): weight.dequantised() for path, weight in weights.items()}
    worst = 300.0
    rng = np.random.default_rng(5)
    for before, after in zip(exported.files, files, strict=True):
        float_session, ours = session(before, real), session(after)
        feeds = {value.name: rng.normal(size=value.shape).astype(np.float32) for value in ours.get_inputs()}
        feeds |= {name: np.zeros_like(array) for name, array in feeds.items() if name.startswith("mask")}
        for expected, found in zip(float_session.run(None, feeds), ours.run(None, feeds), strict=True):
            worst = min(worst, snr_db(expected, found))
    return worst


def convert(exported: Exported, weights: dict[str, QuantisedWeight], out: Path, **options: int) -> list[Path]:
    asked: list[str] = []

    def weight_of(path: str) -> QuantisedWeight:
        asked.append(path)
        return weights[path]

    grid_of: Callable[[str], Grid | None] = lambda path: weights[path].grid if path in weights else None
    files = write_matmul_nbits(exported.plan, exported.files, out, grid_of, weight_of, **options)
    assert asked == list(weights), "each weight is asked for once"
    return files


@pytest.mark.parametrize("grid", GRIDS)
def test_the_runtime_computes_with_the_dequantised_weights(exported: Exported, tmp_path: Path, grid: Grid) -> None:
    weights = exported.round(grid)
    files = convert(exported, weights, tmp_path)
    assert [file.name for file in files] == ["decode.onnx", "prefill_4.onnx"]
    # Blocks of 4 bits go through kernels that rearrange sums: 70 to 130 dB.
    assert compare(exported, weights, files) > 60


@pytest.mark.parametrize("level", [1, 4])
def test_accuracy_levels(exported: Exported, tmp_path: Path, level: int) -> None:
    weights = exported.round(Grid(4, block=32), Grid(8))
    files = convert(exported, weights, tmp_path, accuracy_level=level)
    nodes = [node for node in onnx.load(files[0], load_external_data=False).graph.node if node.op_type == "MatMulNBits"]
    levels = [a.i for node in nodes for a in node.attribute if a.name == "accuracy_level"]
    assert len(nodes) == 15 and levels == [level] * 15
    assert compare(exported, weights, files) > (60 if level == 1 else 20)


def test_all_graphs_share_one_file_of_numbers(exported: Exported, tmp_path: Path) -> None:
    """No float weight is left, and the bytes are those of the numbers."""
    weights = exported.round(Grid(4, block=32), Grid(8, block=32))
    files = convert(exported, weights, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.onnx", "prefill_4.onnx", DATA]
    places = []
    for file in files:
        model = onnx.load(file, load_external_data=False)
        assert not any(node.op_type == "Gemm" for node in model.graph.node)
        outside = [tensor for tensor in model.graph.initializer if tensor.external_data]
        external = {t.name: {entry.key: entry.value for entry in t.external_data} for t in outside}
        assert {place["location"] for place in external.values()} == {DATA}
        places.append({name: (place["offset"], place["length"]) for name, place in external.items()})
        assert all(len(t.raw_data) < 1024 for t in model.graph.initializer)
        onnx.checker.check_model(str(file))
    assert places[0] == places[1]
    count = sum(weight.q.size for path, weight in weights.items() if path != "head")
    expected = count * (4 + 32 / 32) / 8 + weights["head"].q.size * (8 + 32 / 32) / 8
    assert expected <= (tmp_path / DATA).stat().st_size < expected + 4096


def test_a_linear_may_stay_in_float(exported: Exported, tmp_path: Path) -> None:
    weights = {path: w for path, w in exported.round(Grid(4, block=32)).items() if path != "head"}
    files = convert(exported, weights, tmp_path)
    assert [n.name for n in onnx.load(files[0]).graph.node if n.op_type == "Gemm"] == ["/head/lm_head/Gemm"]
    assert compare(exported, weights, files) > 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.onnx", "prefill_4.onnx", DATA]


def test_an_untied_head_and_norms_of_heads(tmp_path: Path) -> None:
    qwen = Exported(tmp_path / "float", QWEN3)
    weights = qwen.round(Grid(4, symmetric=False, block=32))
    assert compare(qwen, weights, convert(qwen, weights, tmp_path / "out")) > 60


def test_what_cannot_be_is_refused(exported: Exported, tmp_path: Path) -> None:
    for grid, reason in (
        (Grid(3, block=32), r"q_proj.weight .layers.0.attn.q_proj.: MatMulNBits has no 3 bits"),
        (Grid(4, block=24), "blocks of 24 are no multiple of one of 16"),
    ):
        with pytest.raises(RingstepError, match=reason):
            convert(exported, exported.round(grid), tmp_path)
    weights = exported.round(Grid(4, block=32))
    with pytest.raises(RingstepError, match="accuracy_level 5 does not exist"):
        convert(exported, weights, tmp_path, accuracy_level=5)
    with pytest.raises(RingstepError, match="give another folder"):
        convert(exported, weights, exported.files[0].parent)
    head = weights["head"]
    bad = weights | {"head": QuantisedWeight(head.grid, head.q, np.full_like(head.scale, np.nan))}
    with pytest.raises(RingstepError, match=r"embed_tokens.weight .head.: a scale is not finite"):
        convert(exported, bad, tmp_path)
    with pytest.raises(RingstepError, match=r"down_proj.weight .*: quantised as \[160, 64\], the model has \[64, 96\]"):
        convert(exported, weights | {"layers.1.mlp.down_proj": head}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_models_graph_is_refused(exported: Exported, tmp_path: Path) -> None:
    config = LLAMA | {"num_hidden_layers": 3}
    plan = plan_for(config)
    with pytest.raises(RingstepError, match=r"no Gemm reads the weight model.layers.2.self_attn.q_proj.weight"):
        write_matmul_nbits(plan, exported.files, tmp_path, lambda _: Grid(4), lambda _: exported.round(Grid(4))["head"])


def test_a_failed_run_leaves_an_earlier_one_whole(exported: Exported, tmp_path: Path) -> None:
    weights = exported.round(Grid(4, block=32))
    files = convert(exported, weights, tmp_path)
    head = weights["head"]
    with pytest.raises(RingstepError):
        bad = weights | {"head": QuantisedWeight(head.grid, head.q, np.full_like(head.scale, np.inf))}
        convert(exported, bad, tmp_path)
    assert compare(exported, weights, files) > 60
    again = exported.round(Grid(8))
    assert compare(exported, again, convert(exported, again, tmp_path)) > 60
