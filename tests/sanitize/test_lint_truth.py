"""The rules of the lint against the real HTP compiler and its simulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lint_models import GELU, PAIRS, save

from ringstep.devices import find_device
from sanitize.lint import lint_file
from sanitize.support import cases, load_support, probes
from sanitize.support.compiler import Compiler
from sanitize.target import find_target

pytest.importorskip("onnxruntime_qnn")

# What the compiler makes of the model that breaks the rule. "taken": it compiles and computes right, so the finding is
# about other converters, the host, or size; docs/lint.md says which. Cache rules are about the host alone.
OUTCOMES = {
    "unsupported-operator": "refused", "wrong-operator": "fails", "if-branches": "refused", "norm-rows": "wrong",
    "output-encoding": "wrong", "nan-guard": "taken", "rank": "refused", "dynamic-shape": "refused",
    "empty-tensor": "crash", "rank-0": "taken", "rank-0-axes": "taken", "allowzero": "taken", "wide-io": "taken",
    "float64": "refused", "bfloat16": "refused", "floats": "refused", "16x16": "refused", "infinity": "wrong",
    "blocked-weights": "refused",
    "int4-zero-point": "wrong", "duplicate-weights": "taken", "float-weights": "taken",
    "inaccurate-operator": "taken",
}  # fmt: skip
LPBQ = "blocked-weights"  # its look-alike, the two-level form, needs scales of its own to compile: tested with qdq


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, Compiler]]:
    opened = {name: Compiler(find_device(name).chip) for name in ("sm8650", "sm8450", "qcs6490")}
    yield opened
    for compiler in opened.values():
        compiler.close()


@pytest.mark.parametrize("rule", OUTCOMES)
def test_rule_and_compiler_agree(rule: str, compilers: dict[str, Compiler]) -> None:
    pair = PAIRS[rule]
    compiler = compilers[str(pair.chip)]
    bad = probes.verdict(compiler.attempt(probes.build(*pair.bad), fp16=compiler.chip.fp16))
    assert bad.split()[0] == OUTCOMES[rule]
    if rule != LPBQ:
        assert probes.verdict(compiler.attempt(probes.build(*pair.good), fp16=compiler.chip.fp16)) == "taken"


# A sample: the whole is `python -m sanitize.support.survey`.
@pytest.mark.parametrize("chip", ["sm8650", "sm8450", "qcs6490"])
def test_survey_and_compiler_agree(chip: str, compilers: dict[str, Compiler], tmp_path: Path) -> None:
    compiler = compilers[chip]
    support = load_support("qnn-htp")
    models = [(case, dtype) for case in cases.CASES for dtype in cases.types_of(case)][5::31]
    for case, dtype in models:
        name = f"{case.domain}.{case.op}" if case.domain else case.op
        built = cases.build(case, dtype)
        taken = "refused" not in compiler.attempt(built, fp16=True)
        assert taken == (compiler.chip.htp_arch in support.operators[name][dtype]), (name, dtype)
        path = tmp_path / "case.onnx"
        path.write_bytes(built.model.SerializeToString())
        errors = [f for f in lint_file(path, find_target("qnn-htp", chip)) if f.severity == "error"]
        wrong = compiler.chip.htp_arch in support.wrong.get(f"{name} {dtype}", [])
        assert bool(errors) == (not taken or wrong), (name, dtype, errors)


@pytest.mark.parametrize(("one", "verdict"), [(1, "taken"), (2, "wrong")])
def test_erf_is_taken_in_a_gelu_alone(one: int, verdict: str, compilers: dict[str, Compiler]) -> None:
    built = probes.build(GELU, {"r": np.float32(2**0.5), "o": np.float32(one), "h": np.float32(0.5)})
    assert probes.verdict(compilers["sm8650"].attempt(built, fp16=True)).split()[0] == verdict


def test_the_crash_is_a_finding(tmp_path: Path) -> None:
    """MatMulNBits between quantised activations ends the compiler's process: the survey says so, the lint too."""
    case = next(case for case in cases.CASES if case.op == "MatMulNBits")
    path = tmp_path / "case.onnx"
    path.write_bytes(cases.build(case, "a16").model.SerializeToString())
    found = lint_file(path, find_target("qnn-htp", "sm8650"))
    assert any(f.rule == "unsupported-operator" and "crashes" in f.what for f in found)


def test_models_are_named_as_the_rules_are(tmp_path: Path) -> None:
    htp = {rule for rule, pair in PAIRS.items() if pair.target == "qnn-htp"}
    assert {rule for rule in htp if not rule.startswith("cache")} == {*OUTCOMES, "inline-weights"}
    for rule in OUTCOMES:
        pair = PAIRS[rule]
        found = lint_file(save(pair.good, tmp_path), find_target("qnn-htp", pair.chip))
        assert not [f for f in found if f.severity == "error"], rule
