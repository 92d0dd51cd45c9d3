"""The latency model: costs against counts by hand, the fit and its held-out errors against a plain loop, physics."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from ringstep.errors import RingstepError
from ringstep.profiling.cost import (
    PRECISIONS,
    ModelShape,
    head_cost,
    kv_cache_bytes,
    layer_cost,
    precision_named,
    step_cost,
)
from ringstep.profiling.latency_model import (
    features,
    fit,
    fitted,
    points_of,
    predict,
    predict_step,
    slowdown,
)
from ringstep.profiling.published import load_published

SYSTEMS = ("qnn", "genie")


def spark() -> ModelShape:
    return next(shape for shape in load_published().shapes.values() if shape.label == "Spark-X2.5-1.7B")


def memory() -> dict[str, float]:
    return load_published().memory_gb_s


def test_a_spark_layer_by_hand() -> None:
    sliding, full = spark().layers
    # q and o 2048 x 2048, k and v 512 x 2048, three of 6656 x 2048, a gate of 8 rows
    weights = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 6656 * 2048 + 8 * 2048
    cost = layer_cost(sliding, PRECISIONS["w4a16"], 4096, "roll")
    assert (cost.weights, cost.weight_bytes) == (weights, weights // 2 + 4 * sliding.rows)
    assert sliding.rows == 2048 + 512 + 512 + 2048 + 6656 + 6656 + 2048 + 8
    assert (cost.kv_read, cost.kv_returned) == (2 * 2 * 256 * 512, 2 * 2 * 256 * 511)
    assert cost.kv_bytes == 2 * 2 * 2 * 256 * (512 + 511)
    assert cost.rotated == 10 * 256 and layer_cost(full, PRECISIONS["fp16"], 1024, "append").rotated == 10 * 64
    assert cost.macs == weights + 2 * 8 * 256 * 512
    ring = layer_cost(sliding, PRECISIONS["w4a16"], 4096, "ring")
    assert (ring.kv_read, ring.kv_returned) == (cost.kv_read, 2 * 2 * 256)
    assert layer_cost(sliding, PRECISIONS["fp16"], 100, "ring").kv_read == 2 * 2 * 256 * 100


def test_a_step_is_its_layers_and_head() -> None:
    model, precision = spark(), PRECISIONS["w8a16"]
    sliding, full = model.layers
    have = step_cost(model, precision, 1024, {"sliding": "ring", "full": "append"})
    one, two = layer_cost(sliding, precision, 1024, "ring"), layer_cost(full, precision, 1024, "append")
    assert have.weights == 21 * one.weights + 7 * two.weights + 2048 * 131072
    assert have.macs == 21 * one.macs + 7 * two.macs + head_cost(model, precision).macs and have.layers == 28


def test_cache_bytes_are_those_of_the_facts() -> None:
    """Spark-1.7B: 56 KiB a token flat; at 4k 81 MiB as it is against 235 MiB with every layer full (MB there)."""
    model = spark()
    flat = dataclasses.replace(model, layers=tuple(dataclasses.replace(k, window=None) for k in model.layers))
    assert kv_cache_bytes(flat, PRECISIONS["fp16"], 2) == 56 * 1024
    assert kv_cache_bytes(flat, PRECISIONS["fp16"], 4096) == 4095 * 56 * 1024
    assert kv_cache_bytes(model, PRECISIONS["fp16"], 4096) == 2048 * (21 * 511 + 7 * 4095)
    ratio = kv_cache_bytes(flat, PRECISIONS["fp16"], 32768) / kv_cache_bytes(model, PRECISIONS["fp16"], 32768)
    assert ratio == pytest.approx(3.8, abs=0.05)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_fit_is_the_best_of_non_negative_ones(system: str) -> None:
    """Against another solver, and against every small step away from it."""
    model = fitted(system)
    rows = np.array([[v / p.ms for v in features(p.cost, system).values()] for p in model.points])
    other = lsq_linear(rows, np.ones(len(rows)), bounds=(0, np.inf), tol=1e-12).x
    assert list(model.costs.values()) == pytest.approx(list(other), rel=1e-4, abs=1e-6)
    best = float(np.sum((rows @ other - 1) ** 2))
    for direction in np.random.default_rng(0).standard_normal((200, len(other))):
        moved = np.clip(other * (1 + 1e-3 * direction), 0, None)
        assert float(np.sum((rows @ moved - 1) ** 2)) >= best - 1e-12


@pytest.mark.parametrize("system", SYSTEMS)
def test_held_out_errors_by_a_plain_loop(system: str) -> None:
    model = fitted(system)
    for i, point in enumerate(model.points):
        seen = [p for p in model.points if features(p.cost, system) != features(point.cost, system)]
        assert point not in seen and len(seen) >= len(model.points) - 2
        rows = np.array([[v / p.ms for v in features(p.cost, system).values()] for p in seen])
        costs = lsq_linear(rows, np.ones(len(rows)), bounds=(0, np.inf), tol=1e-12).x
        want = float(np.dot(costs, list(features(point.cost, system).values()))) / point.ms - 1
        assert model.held_out[i] == pytest.approx(want, abs=2e-4), point.name


def test_a_held_out_error_does_not_know_its_own_measurement() -> None:
    """Whatever the figure was, its own prediction stays the same."""
    points = points_of(load_published(), "qnn")
    before = fit(points, memory()).held_out
    lone = next(i for i, p in enumerate(points) if "sliding, ring, w4a16" in p.name)
    points[lone] = dataclasses.replace(points[lone], ms=points[lone].ms * 1.7)
    after = fit(points, memory()).held_out
    assert (after[lone] + 1) * 1.7 == pytest.approx(before[lone] + 1)


def test_a_planted_wrong_measurement_shows() -> None:
    for name in ("sliding, ring, w4a16", "talker", "full at 1k, roll, fp16"):
        points = points_of(load_published(), "qnn")
        index = next(i for i, p in enumerate(points) if name in p.name)
        points[index] = dataclasses.replace(points[index], ms=points[index].ms * 2)
        model = fit(points, memory())
        # Half of twice as much: the prediction is about 50 % too low.
        assert -0.65 < model.held_out[index] < -0.35, name


def test_costs_that_made_the_figures_are_found_again() -> None:
    true = {"weights": 0.02, "layers": 0.1, "kv": 0.3}
    points = [dataclasses.replace(p, ms=sum(true[k] * v for k, v in features(p.cost, "qnn").items()))
              for p in points_of(load_published(), "qnn")]  # fmt: skip
    model = fit(points, memory())
    assert model.costs == pytest.approx(true)
    assert np.abs(model.held_out).max() < 1e-9


def test_what_is_fitted_and_what_is_not() -> None:
    names = [point.name for point in fitted("qnn").points]
    assert len(names) == 15 and not any("GELU" in n or "GPU" in n or "CPU" in n or "vocoder" in n for n in names)
    assert all(point.chip == "sm8750" for system in SYSTEMS for point in fitted(system).points)
    assert len(fitted("genie").points) == 6


def test_the_errors_that_the_docs_state() -> None:
    qnn, genie = fitted("qnn"), fitted("genie")
    assert (qnn.median_error, qnn.worst_error) == (pytest.approx(0.061, abs=0.001), pytest.approx(0.385, abs=0.001))
    assert (genie.median_error, genie.worst_error) == (pytest.approx(0.110, abs=0.001), pytest.approx(0.132, abs=0.001))
    # MB a ms are GB a second: above the memory's peak, something would be wrong.
    assert 1 / qnn.costs["weights"] == pytest.approx(71.7, abs=0.1) and 1 / qnn.costs["weights"] < memory()["sm8750"]


def test_the_other_chip_was_never_seen() -> None:
    """The one measurement of another chip, by another system: 54.9 tokens a second of Llama-3.2-1B on an 8 Gen 3."""
    published = load_published()
    profile = next(p for p in published.profiles if p.versions["system"] == "executorch")
    have = predict_step(published.shapes[profile.job], "w4a16", 512, {"full": "append"}, "sm8650", "genie")
    assert have.predicted_ms / (profile.median_us / 1000) - 1 == pytest.approx(-0.13, abs=0.01)
    assert any("nothing was measured on sm8650" in why for why in have.extrapolated)


def test_four_bits_are_timed_as_eight_and_stored_as_four() -> None:
    layer = spark().layers[0]
    four, eight, sixteen = (layer_cost(layer, PRECISIONS[p], 1024, "roll") for p in ("w4a16", "w8a16", "fp16"))
    assert four.timed_bytes == eight.timed_bytes == sixteen.timed_bytes / 2
    assert four.weight_bytes < eight.weight_bytes < sixteen.weight_bytes


def test_physics() -> None:
    model, layouts = spark(), {"sliding": "ring", "full": "append"}

    def ms(precision: str = "w8a16", context: int = 1024, chip: str = "sm8750", shape: ModelShape = model,
           form: dict[str, str] = layouts) -> float:  # fmt: skip
        return predict_step(shape, precision, context, form, chip).predicted_ms

    by_context = [ms(context=c) for c in (64, 512, 1024, 4096, 32768)]
    assert by_context == sorted(by_context) and by_context[0] < by_context[-1]
    assert ms("w4a16") <= ms("w8a16") < ms("fp16")
    assert ms(form={"sliding": "roll", "full": "roll"}) > ms()
    change = dataclasses.replace
    wider = change(model, layers=tuple(change(k, weights=2 * k.weights) for k in model.layers))
    deeper = change(model, layers=tuple(change(k, count=k.count + 1) for k in model.layers))
    assert ms(shape=wider) > ms() and ms(shape=deeper) > ms() and ms(shape=dataclasses.replace(model, vocab=1)) < ms()
    # More memory bandwidth than the measured chip has gives nothing, less costs.
    assert ms(chip="sc8380xp") == ms() == ms(chip="sm8850") < ms(chip="sm8650") < ms(chip="sm8450")
    assert all(cost >= 0 for system in SYSTEMS for cost in fitted(system).costs.values())


def test_a_chip_without_memory_figure_has_no_prediction() -> None:
    with pytest.raises(RingstepError, match="no prediction for qcs6490"):
        slowdown("qcs6490", memory())


def test_a_prediction_says_what_it_is_and_where_it_leaves_the_measurements() -> None:
    layer = spark().layers[0]
    cost = layer_cost(layer, PRECISIONS["w4a16"], 512, "ring")
    own = predict(fitted(), cost, chip="sm8750", precision="w4a16", context=512, whole=False)
    assert own.extrapolated == () and own.nearest.endswith("sliding, ring, w4a16")
    assert re.fullmatch(r"predicted 0\.8 ms \(leave-one-out error: median 6 %, worst 38 %; nearest measurement: "
                        r".*sliding, ring, w4a16, -2 %\)", own.line())  # fmt: skip
    whole = predict_step(spark(), "w4a16", 4096, {"sliding": "ring", "full": "append"}, "sm8650")
    reasons = " / ".join(whole.extrapolated)
    assert "nothing was measured on sm8650" in reasons and "only single layers were measured" in reasons
    assert "only the new entry is returned were not measured so long" in reasons
    assert "extrapolated: " in whole.line()
    tiny = ModelShape("t", "r", 64, 100, (dataclasses.replace(layer, weights=1000),))
    assert any("layers of" in why for why in predict_step(tiny, "fp16", 64, {"sliding": "roll"}, "sm8750").extrapolated)
    long = predict(fitted(), layer_cost(spark().layers[1], PRECISIONS["fp16"], 65536, "roll"), chip="sm8750",
                   precision="fp16", context=65536, whole=False)  # fmt: skip
    assert any("65536" in why for why in long.extrapolated)


def test_refusals() -> None:
    with pytest.raises(RingstepError, match="did you mean w8a16"):
        precision_named("w8a8")
    with pytest.raises(RingstepError, match="did you mean ring"):
        layer_cost(spark().layers[0], PRECISIONS["fp16"], 64, "rings")
    points = points_of(load_published(), "qnn")
    with pytest.raises(RingstepError, match="cannot fit 3 costs"):
        fit(points[:3], memory())
    with pytest.raises(RingstepError, match="one system"):
        fit([*points, *points_of(load_published(), "genie")], memory())
    with pytest.raises(RingstepError, match="of none"):
        fit([], memory())


def test_a_point_of_another_chip_is_scaled() -> None:
    points = points_of(load_published(), "genie")
    slow = [dataclasses.replace(p, chip="sm8450", ms=p.ms * 84.8 / 51.2) for p in points]
    assert fit(slow, memory()).costs == pytest.approx(fit(points, memory()).costs)


def test_shapes_are_the_recipes() -> None:
    """The data file's shapes against what the recipes lay out from configs with the same figures."""
    from exporters.plan_command import shape_of
    from recipes import plan_for

    llama = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
             "tie_word_embeddings": True}  # fmt: skip
    qwen = {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "tie_word_embeddings": True}  # fmt: skip
    types = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(28)]
    rope = {"full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}  # fmt: skip
    own = {"model_type": "spark2_5", "hidden_size": 2048, "intermediate_size": 6656, "num_hidden_layers": 28,
           "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 131072,
           "hidden_act": "gelu", "rms_norm_eps": 1e-6, "sliding_window": 512, "layer_types": types,
           "rope_parameters": rope, "headwise_attn_output_gate": True, "max_position_embeddings": 1 << 20}  # fmt: skip
    shapes = {shape.label: shape for shape in load_published().shapes.values()}
    for label, config in (("Llama-3.2-1B", llama), ("Qwen3-4B", qwen), ("Spark-X2.5-1.7B", own)):
        assert shape_of(plan_for(config), label) == shapes[label]


