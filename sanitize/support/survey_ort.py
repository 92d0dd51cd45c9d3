"""Ask ONNX Runtime's CPU provider which operators it has: python -m sanitize.support.survey_ort.

Phones run the full package (onnxruntime-android, onnxruntime-c); the reduced "mobile" package ended with 1.18. So what
the wheel's CPU provider opens, a phone opens. Writes ort-mobile.toml: types, and the newest opset whose definition of
the operator has a kernel. Half precision counts as taken where ONNX Runtime computes it through casts to float32.
"""

from __future__ import annotations

import dataclasses

import onnx
import onnxruntime

from sanitize.support import FOLDER, cases

HEAD = """# What ONNX Runtime's CPU provider takes, and so the full packages for phones (onnxruntime-android,
# onnxruntime-c); the reduced mobile package is no longer published. Made by `python -m sanitize.support.survey_ort`.
# `opset`: the newest opset at which the operator's definition has a kernel.

"""

PLAIN = ("any", "fp32", "fp16", "int32", "int64", "bool")


def main() -> None:
    """Write ort-mobile.toml."""
    lines = []
    newest = onnx.defs.onnx_opset_version()
    found: dict[str, tuple[int, set[str]]] = {}
    for case in cases.CASES:
        name = f"{case.domain}.{case.op}" if case.domain else case.op
        if case.opset and case.opset < cases.OPSET:
            continue  # gone from later opsets
        opsets = [newest] if case.domain else range(newest, cases.OPSET - 1, -1)
        for opset in opsets:
            at = dataclasses.replace(case, opset=0 if case.domain else opset)
            types = {t for t in _types(at) if t in PLAIN and opens(at, t)}
            if types:
                found[name] = (opset, found.get(name, (0, set()))[1] | types)
                break
    for op in cases.TEXTS:
        try:
            session(cases.build_text(op).model)
            found[op] = (newest, {"any"})
        except Exception:
            continue
    for name, (opset, types) in sorted(found.items()):
        key = f'"{name}"' if "." in name else name
        lines.append(f"{key} = {{ opset = {opset}, types = {sorted(types)} }}".replace("'", '"'))
    version = f"onnxruntime {onnxruntime.__version__}, CPU provider; opsets up to {newest}"
    (FOLDER / "ort-mobile.toml").write_text(HEAD + f'version = "{version}"\n\n[operators]\n' + "\n".join(lines) + "\n")


def _types(case: cases.Case) -> list[str]:
    try:
        return cases.types_of(case)
    except onnx.defs.SchemaError:
        return []


def opens(case: cases.Case, dtype: str) -> bool:
    """Whether the CPU provider opens the case's model."""
    try:
        session(cases.build(case, dtype).model)
    except Exception:
        return False
    return True


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Open a model on the CPU. Raises what ONNX Runtime raises."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
