"""KV budgets of the published Spark-X2.5 shapes, and what fits on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exporters.memory import CONTEXTS, fixed_bytes, kv_table, on_devices
from recipes import plan_for
from recipes.plan import Options
from recipes.step import step_spec
from ringstep.contract import EmbeddingSpec, StepSpec
from ringstep.manifest import Manifest, Output, StageRecord

SPARK = {
    "model_type": "spark2_5", "hidden_act": "gelu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
    "headwise_attn_output_gate": True, "gate_attn_act_mode": "sigmoid", "max_position_embeddings": 1048576,
    "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(28)],
    "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5e6},
                        "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}},
    "vocab_size": 131072, "hidden_size": 2048, "intermediate_size": 6656, "num_hidden_layers": 28,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def spec() -> StepSpec:
    return step_spec(plan_for(SPARK), Options(dtype="float16"), model="spark", context=4096, chunks=(1,), eos=())


def test_the_budget_of_spark_is_the_published_one(spec: StepSpec) -> None:
    rows = {row["context"]: row for row in kv_table(spec)}
    assert list(rows) == list(CONTEXTS)
    # 56 KiB a token flat; 81 and 235 MB at 4k, 3.8 times less at 32k.
    assert rows[4096]["hybrid_16bit"] == pytest.approx(81e6, rel=0.01)
    assert rows[4096]["flat_16bit"] == pytest.approx(235e6, rel=0.001) == 57344 * 4095
    assert rows[32768]["flat"] / rows[32768]["hybrid"] == pytest.approx(3.8, abs=0.05)
    for row in rows.values():
        assert row["hybrid_16bit"] == 2 * row["hybrid_8bit"] and row["flat"] == row["flat_16bit"]


@pytest.mark.parametrize("layouts", [{}, {"sliding": "append"}])
@pytest.mark.parametrize("context", [1, 256, 512, 513, 4096])
def test_the_row_of_an_artifacts_own_context_is_what_its_caches_hold(context: int, layouts: dict[str, Any]) -> None:
    options = Options(dtype="float16", layout=layouts)
    made = step_spec(plan_for(SPARK), options, model="spark", context=context, chunks=(1,), eos=())
    own = next(row for row in kv_table(made) if row["context"] == context)
    assert own["hybrid"] == sum(cache.nbytes for cache in made.caches)


def record(name: str, sizes: dict[str, int]) -> StageRecord:
    outputs = {path: Output("0" * 64, size) for path, size in sizes.items()}
    return StageRecord(name, "", {}, {}, {}, outputs, 0.0, 0, {})


def test_what_fits_on_a_phone(spec: StepSpec, tmp_path: Path) -> None:
    import dataclasses

    spec = dataclasses.replace(spec, embedding=EmbeddingSpec("onnx/embedding.bin", 0, (131072, 2048), "float16"))
    manifest = Manifest(tmp_path)
    files = {"onnx/weights.bin": 2_876_000_000, "onnx/embedding.bin": 536_870_912}
    manifest.stages["weights"] = record("weights", files)
    fixed = fixed_bytes(spec, manifest)
    assert fixed == {"graphs": 2_876_000_000, "from": "weight files", "table": 536_870_912}
    binaries = {"qnn/decode_ctx_qnn.bin": 2 * 10**9, "qnn/prefill_32_ctx_qnn.bin": 10**9}
    manifest.stages["qnn"] = record("qnn", binaries)
    fixed = fixed_bytes(spec, manifest)
    assert fixed["graphs"] == round(1.025 * 3e9) and fixed["from"] == "context binaries"
    manifest.stages["executorch"] = record("executorch", {"executorch/model.pte": 10**9})
    assert fixed_bytes(spec, manifest) == fixed
    del manifest.stages["qnn"]
    assert fixed_bytes(spec, manifest) == {"graphs": 10**9, "from": ".pte files", "table": 536_870_912}
    manifest.stages["qnn"] = record("qnn", binaries)
    rows = {row["device"]: row for row in on_devices(spec, manifest)}
    at = {c["context"]: c for c in rows["galaxy-s24"]["contexts"]}
    assert at[4096]["needs"] == fixed["graphs"] + fixed["table"] + kv_table(spec)[1]["hybrid"]
    assert at[4096]["fits"] and at[4096]["share"] == at[4096]["needs"] / 8e9
    assert not at[1048576]["fits"]  # 15 GB of full caches
