"""The lint: what a target would refuse or get wrong in a model, before anyone waits for its compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ringstep.errors import RingstepError
from sanitize.model_file import read_model
from sanitize.rules import RULES
from sanitize.rules.subject import Severity, look_at
from sanitize.target import Target


@dataclass(frozen=True)
class Finding:
    """One place where a rule is broken."""

    rule: str
    severity: Severity
    node: str
    """Node or tensor; "" where the whole model is meant."""
    where: str
    """The subgraph it is in, "" for the main graph."""
    what: str
    """What is wrong there."""
    why: str
    """Why that matters on this target."""
    fix: str
    fixed_by: str | None
    """The pass that fixes it, if there is one."""


def lint(model: ir.Model, target: Target, path: Path | None = None) -> list[Finding]:
    """Run every rule of a target over a model; `path` is the file it was read from.

    The model is not changed. Time is linear in its nodes; weights are read only where two tensors of one shape could be
    the same, a chunk at a time.
    """
    subject = look_at(model, target, path)
    return [
        Finding(
            rule.id,
            hit.severity or rule.severity,
            hit.node,
            hit.where,
            hit.what,
            rule.why,
            hit.fix or rule.fix,
            rule.fixed_by if hit.fixed_by is None else hit.fixed_by or None,
        )
        for rule in RULES
        if target.name in rule.targets
        for hit in rule.check(subject)
    ]


def lint_file(path: Path, target: Target) -> list[Finding]:
    """Lint an ONNX file. Raises RingstepError where it cannot be read."""
    return lint(read_model(path), target, path)


def refuse_errors(findings: list[Finding]) -> None:
    """Raise RingstepError with the first error of a lint, and how many more there are."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first, more = errors[0], f" (and {len(errors) - 1} more; see ringstep lint)" if len(errors) > 1 else ""
        raise RingstepError(f"{first.node}: {first.what}: {first.why} {first.fix}{more}")
