"""A finding that names a pass is gone once that pass has run with the others; one that no pass mends names none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from lint_models import EYE, F32, GELU, PAIRS, Text, save

from sanitize.casts import BOOL_DATA
from sanitize.graph import infer_types
from sanitize.lint import lint
from sanitize.model_file import read_model
from sanitize.ops import table
from sanitize.order import PASSES
from sanitize.passes import accurate_softplus
from sanitize.pipeline import sanitize
from sanitize.rules import RULES, accuracy, operators
from sanitize.support import cases
from sanitize.target import Target, find_target

HTP = find_target("qnn-htp", "sm8650")


def mended(path: Path, rule: str, target: Target = HTP) -> set[str]:
    """The passes that the rule's findings name, after asserting that they do what is said of them."""
    model = read_model(path)
    named = {f.fixed_by for f in lint(model, target, path) if f.rule == rule and f.fixed_by}
    done = {each.name for each in sanitize(model, target, PASSES) if each.changes}
    infer_types(model)
    assert named <= done
    assert not {f.fixed_by for f in lint(model, target, path) if f.rule == rule} & named
    return named


@pytest.mark.parametrize("rule", [rule.id for rule in RULES if rule.fixed_by])
def test_the_pass_of_a_rule_mends_it(rule: str, tmp_path: Path) -> None:
    pair = PAIRS[rule]
    named = mended(save(pair.bad, tmp_path), rule, find_target(pair.target, pair.chip, pair.precision))
    assert named == {next(r.fixed_by for r in RULES if r.id == rule)}


# Where the survey's smallest model holds nothing that the pass could start from.
INSTEAD: dict[str, Text] = {
    "Erf": (GELU.replace("Div(x, r)", "Mul(x2, r)").replace("{ a", "{ x2 = Mul(x, t) a"),
            {"r": F32(2**-1.5), "t": F32(2), "o": F32(1), "h": F32(0.5)}),
    "GatherND": ("(bool[4,3] x) => (bool[2] y) { y = GatherND(x, i) }", {"i": np.array([[0, 1], [3, 2]])}),
}  # fmt: skip
# Where floats are taken, the type or the chip that refuses.
QUANTISED = find_target("qnn-htp", "qcs6490")
TARGETS = dict.fromkeys(
    ("Attention", "RotaryEmbedding", "com.microsoft.FusedMatMul", "com.microsoft.QuickGelu"), QUANTISED
)


@pytest.mark.parametrize("op", operators.FIXED_BY)
def test_an_operator_that_is_refused_is_lowered(op: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    case = next((c for c in cases.CASES if (f"{c.domain}.{c.op}" if c.domain else c.op) == op), None)
    if op in INSTEAD:
        path = save(INSTEAD[op], tmp_path)
    else:
        built = cases.build(case, "fp32") if case else cases.build_text(op)
        path.write_bytes(built.model.SerializeToString())
    target = find_target("qnn-htp", "sm8650", "a16") if "NBits" in op else TARGETS.get(op, HTP)
    assert mended(path, "unsupported-operator", target) == {operators.FIXED_BY[op]}


def test_what_no_pass_mends_names_none(tmp_path: Path) -> None:
    models: dict[str, Text] = {
        "unsupported-operator": ("(float[4,8] x) => (float[4,8] y) { y = Erf(x) }", {}),
        "nan-guard": ("(float[4,8] x) => (float[4,8] y) { n = IsNaN(x) y = Where(n, o, x) }", {"o": F32([0])}),
        "infinity": ("(float[2,4] x) => (float[2,4] y) { y = Add(x, m) }", {"m": F32([0, 0, -np.inf, 0])}),
        "wide-io": ("(bool[8,8] x) => (float[8,8] y) { y = Where(x, e, z) }", {"e": EYE, "z": F32([0])}),
    }
    for rule, text in models.items():
        path = save(text, tmp_path)
        found = [f for f in lint(read_model(path), HTP, path) if f.rule == rule]
        assert found and not any(f.fixed_by for f in found), rule


@pytest.mark.parametrize("op", [op for op, (_, _, fixed_by) in accuracy.FORMS.items() if fixed_by])
def test_a_poor_kernel_is_written_otherwise(op: str, tmp_path: Path) -> None:
    """Over every interval that was measured."""
    named = set()
    for low, high in {(row.low, row.high) for row in table.load("sm8650", "fp16").forms[accuracy.FORMS[op][0]].rows}:
        path = save((f"(float[4,64] x) => (float[4,64] y) {{ a = Abs(x) y = {op}(a) }}", {}), tmp_path)
        named |= mended(path, "inaccurate-operator", dataclasses.replace(HTP, ranges={"a": (low, high)}))
    rarely_poor = op in ("LogSoftmax", "Elu")
    assert named == (set() if rarely_poor else {accuracy.FORMS[op][2]})


def test_names_of_passes_exist() -> None:
    named = {rule.fixed_by for rule in RULES if rule.fixed_by} | set(operators.FIXED_BY.values())
    named |= {fixed_by for *_, fixed_by in accuracy.FORMS.values() if fixed_by}
    assert named <= {p.name for p in PASSES}


def test_forms_that_rules_and_passes_name_were_measured() -> None:
    measured = table.load("sm8650", "fp16").forms
    for form, better, _ in accuracy.FORMS.values():
        assert form in measured and (not better or better in measured)
    assert set(accurate_softplus.FORMS.values()) <= set(measured)


@pytest.mark.parametrize("op", BOOL_DATA)
def test_bools_that_are_refused_go_through_numbers(op: str, tmp_path: Path) -> None:
    case = next(c for c in cases.CASES if c.op == op and not c.domain)
    path = tmp_path / "model.onnx"
    path.write_bytes(cases.build(case, "bool").model.SerializeToString())
    assert mended(path, "unsupported-operator") == {"narrow-types"}
