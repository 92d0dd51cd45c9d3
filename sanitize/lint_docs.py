"""docs/lint.md, made from the rules table: python -m sanitize.lint_docs > docs/lint.md."""

from __future__ import annotations

import textwrap

from sanitize.rules import RULES, observations
from sanitize.support import Support, load_support

HEAD = """# The lint: what a target refuses or gets wrong, before its compiler runs

    ringstep lint MODEL.onnx --target qnn-htp --chip sm8650

It reads any ONNX file, weights left in place, and runs the rules below over it, If and Loop bodies included. It leaves
with 1 when there are errors; `--json` prints every finding with its node, the reason, the remedy and the pass of
`ringstep sanitize` that applies it. This page is made from the rules table by
`python -m sanitize.lint_docs > docs/lint.md`.

"""


def text() -> str:
    """The whole page."""
    parts = [HEAD, "## Rules\n\n", "| rule | severity | targets | finds | pass |\n| --- | --- | --- | --- | --- |\n"]
    for rule in RULES:
        by = f"`{rule.fixed_by}`" if rule.fixed_by else ""
        targets = ", ".join(rule.targets)
        parts.append(f"| [{rule.id}](#{rule.id}) | {rule.severity} | {targets} | {rule.title} | {by} |\n")
    for rule in RULES:
        by = f" (`ringstep sanitize` does it: pass `{rule.fixed_by}`)" if rule.fixed_by else ""
        parts.append(f"\n### {rule.id}\n\n{fill(rule.why)}\n\n{fill(f'Fix: {rule.fix}{by}.')}\n")
        parts += [f"\n{fill(f'Observed: {seen}')}\n" for seen in observations.OBSERVED.get(rule.id, ())]
    parts.append("\n" + tables(load_support("qnn-htp")))
    return "".join(parts)


def fill(text: str) -> str:
    """A paragraph in lines of at most 120 columns."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def tables(support: Support) -> str:
    """What the compiler took, by type and architecture."""
    arches = sorted(support.versions)
    every = ", ".join(f"{arch} ({support.versions[arch].split(':')[0]})" for arch in arches)
    versions = support.versions[arches[0]].split(": ", 1)[1]
    lines = [
        "## What the HTP compiler takes\n\n",
        fill(
            f"Asked by `python -m sanitize.support.survey` of {versions}, for {every}: one minimal model an operator "
            "and type, static shapes, every input data (so that nothing folds), compiled under ONNX Runtime's ordinary "
            "optimisations without the CPU, then run on the simulator against the CPU kernels. `fp32` is float32 "
            "computed in half precision, `a16` uint16 QuantizeLinear/DequantizeLinear around the node with int8 "
            "weights (`u8`: uint8), `16x16` with uint16 weights. Taken in the smallest case does not mean taken with "
            "every attribute."
        )
        + "\n\n",
        "| operator | taken in | not taken in |\n| --- | --- | --- |\n",
    ]
    refused = []
    for name, kinds in support.operators.items():
        taken = [kind + _only(found, arches, kind) for kind, found in kinds.items() if found]
        missing = [kind for kind, found in kinds.items() if not found]
        if not taken:
            refused.append(name)
            continue
        wrong = [kind for kind in kinds if support.wrong.get(f"{name} {kind}")]
        note = f"; **wrong in {', '.join(wrong)}**" if wrong else ""
        lines.append(f"| {name} | {', '.join(taken)}{note} | {', '.join(missing)} |\n")
    lines.append("\n" + fill(f"Refused in every type: {', '.join(refused)}.") + "\n")
    five = ", ".join(name for name, found in support.ranks.items() if found["5"])
    four = ", ".join(name for name, found in support.ranks.items() if not found["5"])
    ranks = f"Taken at rank 5 (of those tried): {five}. At rank 4 at most: {four}. None at rank 6."
    lines.append(f"\n{fill(ranks)}\n\n### Single questions\n\n| model | ")
    lines.append(" | ".join(arches) + " |\n| --- |" + " --- |" * len(arches) + "\n")
    for name, answers in support.probes.items():
        lines.append(f"| {name} | " + " | ".join(answers.get(arch, "") for arch in arches) + " |\n")
    return "".join(lines)


def _only(found: list[str], arches: list[str], kind: str) -> str:
    whole = [arch for arch in arches if not (arch == "v68" and kind in ("fp32", "fp16"))]
    if set(found) >= set(whole):
        return ""
    return f" (from {found[0]})" if found == arches[-len(found) :] else f" ({', '.join(found)})"


if __name__ == "__main__":
    print(text(), end="")
