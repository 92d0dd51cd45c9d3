"""Profiles as read from AI Hub: what counts as a measurement, its figures, and whose operations they are."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from made_profiles import aihub_body, made

from ringstep.errors import RingstepError
from ringstep.profiling.op_names import place_of
from ringstep.profiling.profile import Op, read_profile, read_times, shares


def test_figures_are_those_of_the_standard_library() -> None:
    profile = made(n=101)
    times = sorted(profile.times_us)
    assert profile.median_us == statistics.median(times)
    assert profile.min_us == times[0]
    assert profile.p95_us == times[95]  # of 101, the one that 95 lie below


def test_aihubs_profile_is_read_whole() -> None:
    fields = read_profile(aihub_body(), "job j1")
    assert fields["times_us"] == (850, 840, 860, 900, 845)
    assert (fields["first_load_us"], fields["warm_load_us"], fields["peak_bytes"]) == (91_000, 61_000, (3e6, 5e6))
    assert [(op.unit, op.us, op.cycles) for op in fields["ops"]] == [("NPU", 500, 900), ("CPU", 0, 100)]


def test_what_was_not_measured_is_none() -> None:
    body = aihub_body(first_load_time=0, warm_load_time=None, inference_memory_peak_range=None,
                      estimated_inference_peak_memory=0)  # fmt: skip
    fields = read_profile(body, "job j1")
    assert fields["first_load_us"] is fields["warm_load_us"] is fields["peak_bytes"] is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "empty"),
        ([], "empty"),
        (None, "empty"),
        ({"execution_summary": None}, "expected an object"),
        (aihub_body([]), "nothing was measured"),
        (aihub_body(all_inference_times=None), "nothing was measured"),
        (aihub_body(all_inference_times="850"), "nothing was measured"),
        (aihub_body([0, 850]), "no measurement"),
        (aihub_body([-3, 850]), "out of range"),
        (aihub_body([float("nan")]), "no number"),
        (aihub_body([float("inf")]), "out of range"),
        (aihub_body([10**400]), "out of range"),
        (aihub_body([True]), "no number"),
        (aihub_body(["850"]), "no number"),
        (aihub_body([4 * 10**9]), "out of range"),
        (aihub_body([850] * 100_001), "at most"),
        (aihub_body(estimated_inference_time=0), "no measurement"),
        (aihub_body(estimated_inference_time=None), "no number"),
        (aihub_body(estimated_inference_time=12), "not one run's figures"),
        (aihub_body(inference_memory_peak_range=[1]), "no pair"),
        (aihub_body() | {"execution_detail": {}}, "no list"),
        (aihub_body() | {"execution_detail": [{"name": "a", "type": "b", "compute_unit": "TPU"}]}, "no operation"),
        (aihub_body() | {"execution_detail": [["a"]]}, "expected an object"),
    ],
)
def test_what_is_no_measurement_is_refused(body: Any, says: str) -> None:
    with pytest.raises(RingstepError, match=r"^job j1: ") as refused:
        read_profile(body, "job j1")
    assert says in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_times_of_another_kind_are_refused() -> None:
    for value in ("850", 850, None, {}, ()):
        with pytest.raises(RingstepError):
            read_times(value, "times")


def test_shares_are_of_time_or_else_of_cycles() -> None:
    ops = [Op("a", "MatMul", "NPU", 3.0, 1), Op("b", "Add", "NPU", 1.0, 9)]
    assert shares(ops, lambda op: op.type) == {"MatMul": 0.75, "Add": 0.25}
    counted = [Op(op.name, op.type, op.unit, 0.0, op.cycles) for op in ops]
    assert shares(counted, lambda op: op.type) == {"Add": 0.9, "MatMul": 0.1}
    assert shares([Op("a", "MatMul", "NPU", 0.0, 0)], lambda op: op.type) == {}


def test_the_cpu_counts_where_another_unit_was_asked_for() -> None:
    def on_cpu(unit: str) -> int:
        return len(made(unit=unit, ops=(Op("a", "b", "CPU", 1.0, 0), Op("c", "d", "UNSPECIFIED", 1.0, 0))).on_cpu)

    assert (on_cpu("npu"), on_cpu("gpu"), on_cpu("cpu")) == (1, 1, 0)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("/layers.7/attn/q_proj/Gemm", (7, "attn/q_proj")),
        ("_layers_7_attn_q_proj_Gemm", (7, "attn/q_proj")),
        ("/layers.27/attn/q_proj/MatMul:OpId_12", (27, "attn/q_proj")),
        ("_layers.27_attn_k_norm_RMSNormalization_token_1", (27, "attn/k_norm")),
        ("graph_layers_0_mlp_down_proj_Gemm_weight_Transpose", (0, "mlp/down_proj")),
        ("/layers.0/attn/q_proj/Gemm_output_0_quantised/QuantizeLinear", (0, "attn/q_proj")),
        ("/layers.12/attn/Softmax", (12, "attn")),
        ("_layers_12_attn_Softmax_token_1", (12, "attn")),
        ("/layers.3/mlp/Mul_1", (3, "mlp")),
        ("/layers.3/pre_mlp_norm/RMSNormalization", (3, "pre_mlp_norm")),
        ("_layers_3_input_norm_RMSNormalization_output_0_quantised_QuantizeLinear", (3, "input_norm")),
        ("model.layers.3.self_attn.q_proj.weight/DequantizeLinear", (3, "attn/q_proj")),
        ("layers_3_attn_o_proj_matmul", (3, "attn/o_proj")),
        ("/layers.3/Add_1", (3, "residual")),
        ("hidden_3/QuantizeLinear", (3, "residual")),
        ("past_key_14", (14, "cache")),
        ("new_value_2_moved/QuantizeLinear", (2, "cache")),
        ("/head/lm_head/Gemm", (None, "head")),
        ("_head_norm_RMSNormalization", (None, "head")),
        ("logits/QuantizeLinear", (None, "head")),
        ("/embed/Mul", (None, "embed")),
        ("mask_full/DequantizeLinear", (None, "inputs")),
        ("x/DequantizeLinear", (None, "inputs")),
        ("players.7.attn", (None, "other")),
        ("layers.", (None, "other")),
        ("", (None, "other")),
    ],
)
def test_an_operation_belongs_to_a_layer_and_block(name: str, where: tuple[int | None, str]) -> None:
    assert place_of(name) == where


