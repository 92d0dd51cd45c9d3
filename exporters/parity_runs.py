"""What `ringstep parity` does beside proving one engine: all stages, folders of artifacts, goldens, drift."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringstep import console
from ringstep.errors import RingstepError

if TYPE_CHECKING:
    from exporters.artifact import Artifact
    from exporters.prove import Reference
    from ringstep.parity.golden import Golden


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    artifact: Path
    engine: str | None
    model: str | None
    tokens: int | None
    prompt: str | None
    min_db: float | None
    positions: bool
    json_: bool
    stages: bool = False
    against: str | None = None
    layers: bool = False
    golden: Path | None = None
    drift: bool = False


def run_more(asked: Asked) -> bool | None:
    """What the options ask for beside the proof of one engine: whether it passed; None where they ask for no more."""
    if asked.drift:
        if asked.stages or asked.against or asked.layers or asked.prompt or asked.min_db is not None:
            raise RingstepError("--drift: takes --engine, --tokens, --golden and --positions, and no other of these")
        return run_drift(asked)
    if asked.stages or asked.against:
        if asked.prompt or asked.min_db is not None:
            raise RingstepError("--stages: takes a text and each stage's own threshold; leave out --prompt, --min-db")
        return run_stages(asked)
    if asked.layers:
        raise RingstepError("--layers: goes with --stages; --positions shows one engine's caches")
    return None


def check_tokens(artifact: Artifact, tokens: int | None) -> None:
    """Raises RingstepError for a text that the context does not hold."""
    context = artifact.spec.context
    if tokens and tokens > context:
        raise RingstepError(f"--tokens {tokens}: must lie in 1..{context}, the context of {artifact.folder}")


def open_golden(artifact: Artifact, path: Path, tokens: int | None) -> Golden:
    """A golden that fits the artifact, no longer than its context or `tokens`. Raises RingstepError."""
    from ringstep.parity.golden import fit, load_golden, shortened

    golden = load_golden(path)
    try:
        fit(golden, artifact.spec, artifact.manifest.checkpoint.get("sha256"))
    except RingstepError as error:
        raise RingstepError(f"{path}: {error}") from None
    context = artifact.spec.context
    if tokens is None and len(golden.fed) > context:
        console.warn(f"{path} has {len(golden.fed)} tokens, the context holds {context}: only those are compared")
    return shortened(golden, min(tokens or context, context))


def golden_reports(asked: Asked) -> list[dict[str, Any]]:
    """`--golden`: one engine held against a golden."""
    from exporters.artifact import Artifact
    from exporters.prove_golden import prove_golden

    assert asked.golden is not None
    if asked.prompt:
        raise RingstepError("--prompt: a golden has its own text; leave it out")
    with Artifact(asked.artifact, None) as artifact:
        check_tokens(artifact, asked.tokens)
        golden = open_golden(artifact, asked.golden, asked.tokens)
        return [prove_golden(artifact, golden, asked.engine or "ort", asked.tokens, asked.min_db)]


def run_drift(asked: Asked) -> bool:
    """`--drift`: returns whether no curve falls."""
    from exporters.artifact import Artifact, checkpoint_of
    from exporters.prove import open_reference
    from exporters.prove_drift import prove_drift, save
    from exporters.show_stages import print_drift

    engine = asked.engine or "ort"
    reference: Reference | Golden
    if asked.golden:
        reference = open_golden(Artifact(asked.artifact, None), asked.golden, asked.tokens)
    else:
        reference = open_reference(checkpoint_of(asked.artifact, asked.model))
    body = prove_drift(asked.artifact, reference, engine, asked.tokens)
    save(body, asked.artifact)
    if asked.json_:
        console.print_json(body)
    else:
        print_drift(body, asked.positions)
    return bool(body["passed"])


def open_all(asked: Asked) -> tuple[Artifact, Reference | Golden]:
    """One artifact, and its reference or golden."""
    from exporters.artifact import Artifact, checkpoint_of
    from exporters.prove import open_reference

    if asked.golden:
        artifact = Artifact(asked.artifact, None)
        check_tokens(artifact, asked.tokens)
        return artifact, open_golden(artifact, asked.golden, asked.tokens)
    checkpoint = checkpoint_of(asked.artifact, asked.model)
    artifact = Artifact(asked.artifact, checkpoint)
    check_tokens(artifact, asked.tokens)
    return artifact, open_reference(checkpoint)


def run_stages(asked: Asked) -> bool:
    """`--stages`: returns whether every stage of every artifact passed."""
    import dataclasses

    from exporters.artifact import artifacts_in
    from exporters.opening import ORIGINAL
    from exporters.prove_stages import prove_stages, save
    from exporters.show_stages import print_stage_layers, print_stage_positions, print_stages

    reports: dict[str, dict[str, Any]] = {}
    for folder in artifacts_in(asked.artifact):
        artifact, reference = open_all(dataclasses.replace(asked, artifact=folder))
        with artifact:
            body = prove_stages(artifact, reference, against=asked.against or ORIGINAL, engine=asked.engine,
                                tokens=asked.tokens)  # fmt: skip
        save(body, folder)
        reports[str(folder)] = body
    if asked.json_:
        bodies = [{"artifact": folder, **body} for folder, body in reports.items()]
        console.print_json(bodies[0] if str(asked.artifact) in reports else bodies)
    else:
        print_stages(reports)
        for body in reports.values():
            if asked.positions:
                print_stage_positions(body)
            if asked.layers:
                print_stage_layers(body)
    return all(body["passed"] for body in reports.values())
