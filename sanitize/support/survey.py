"""Ask the real HTP compiler which operators it takes: python -m sanitize.support.survey --chip sm8750.

Writes qnn-htp.json beside this file: for every operator and type the architectures that took the minimal model of
cases.py, whole and without the CPU, under ONNX Runtime's ordinary optimisations, which is how models are compiled;
an operator that they remove or rewrite is listed with what became of it. The accepted model then runs on the
simulator against ONNX Runtime's CPU kernels: operators that compile and compute something else are listed as wrong.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from ringstep import qnn
from ringstep.devices import Chip, find_device
from sanitize.support import cases, probes
from sanitize.support.compiler import Compiler

OUT = Path(__file__).with_name("qnn-htp.json")
CHIPS = ("qcs6490", "sm8450", "sm8550", "sm8650", "sm8750", "sm8850")
WRONG_DB = 20.0
SECTIONS = ("versions", "operators", "rewritten", "wrong", "crashes", "ranks", "probes")
RANDOM = ("Bernoulli", "RandomNormalLike", "RandomUniformLike", "Multinomial")


def all_models() -> Iterator[tuple[str, str, cases.Built]]:
    """Operator, type and model of everything surveyed."""
    for case in cases.CASES:
        name = f"{case.domain}.{case.op}" if case.domain else case.op
        for dtype in cases.types_of(case):
            yield name, dtype, cases.build(case, dtype)
    for op in cases.TEXTS:
        yield op, "fp32", cases.build_text(op)


def survey(chip: Chip, data: dict[str, Any]) -> None:
    """Put one chip's answers into the data of qnn-htp.json."""
    compiler, arch = Compiler(chip), chip.htp_arch
    operators, rewritten, wrong = data["operators"], data["rewritten"], data["wrong"]
    for name, dtype, built in all_models():
        # Asked of a chip without fp16 too: its refusal is the truth.
        result = compiler.attempt(built, fp16=True)
        key = f"{name} {dtype}"
        takes = set(operators.setdefault(name, {}).setdefault(dtype, [])) - {arch}
        bad = set(wrong.pop(key, [])) - {arch}
        down = set(data["crashes"].pop(key, [])) - {arch}
        if "refused" in result:
            down |= {arch} if probes.verdict(result) == "crash" else set()
        else:
            takes.add(arch)
            ops = sorted(op for op in result["ops"] if op not in ("QuantizeLinear", "DequantizeLinear"))
            if ops != [name.rpartition(".")[2]] and "uantizeLinear" not in name:
                rewritten[key] = ops
            off = result["db"] is not None and result["db"] < WRONG_DB and name not in RANDOM
            if off or "run" in result:
                bad.add(arch)
                print(f"{chip.name}: {key}: accepted, then {result.get('run') or result['db']}", flush=True)
        operators[name][dtype] = sorted(takes)
        if bad:
            wrong[key] = sorted(bad)
        if down:
            data["crashes"][key] = sorted(down)
    for probe, built in probes.all_probes():
        result = compiler.attempt(built, fp16=True)
        data["probes"].setdefault(probe, {})[arch] = probes.verdict(result)
    survey_ranks(compiler, data)
    compiler.close()


def survey_ranks(compiler: Compiler, data: dict[str, Any]) -> None:
    """Put one chip's answers about ranks 5 and 6 into the data of qnn-htp.json."""
    arch = compiler.chip.htp_arch
    for op, rank, built in probes.rank_models():
        takes = set(data["ranks"].setdefault(op, {}).setdefault(f"{rank}", [])) - {arch}
        if probes.verdict(compiler.attempt(built, fp16=True)) == "taken":
            takes.add(arch)
        data["ranks"][op][f"{rank}"] = sorted(takes)


def main() -> None:
    """Survey the chips named on the command line, all of them without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", action="append", help="Chip, such as sm8750; may be given several times.")
    qnn.require()
    data = json.loads(OUT.read_text()) if OUT.exists() else {}
    data = {section: data.get(section, {}) for section in SECTIONS}
    for name in parser.parse_args().chip or CHIPS:
        chip = find_device(name).chip
        start = time.monotonic()
        survey(chip, data)
        versions = f"{qnn.version()}, onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"
        data["versions"][chip.htp_arch] = f"{chip.name}: {versions}"
        body = {key: dict(sorted(value.items())) for key, value in data.items()}
        OUT.write_text(render(body))
        print(f"{chip.name}: {time.monotonic() - start:.0f} s", flush=True)


def render(data: dict[str, Any]) -> str:
    """JSON with one line an operator."""
    parts = []
    for section, entries in data.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        parts.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
