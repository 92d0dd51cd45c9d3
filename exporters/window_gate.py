"""The window gate on an artifact: what is tried, and against what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exporters.prove import Reference, proof_ids
from ringstep import console
from ringstep.checkpoint import Checkpoint
from ringstep.parity.thresholds import thresholds_for
from ringstep.parity.windows import Mode, feedings, judge, plain
from ringstep.session import DecodeSession, is_simulated


def window_gate(session: DecodeSession, folder: Path, checkpoint: Checkpoint, mode: Mode, original: Reference,
                limit_db: float | None = None) -> dict[str, Any] | None:  # fmt: skip
    """Try the windows of an artifact that is open on an engine; None where there is nothing to try.

    Floats are held against the original, quantised artifacts against their own rounded weights in floats.
    """
    spec, engine = session.spec, session.engine.name
    tried = feedings(spec, mode, windows_of(checkpoint))
    if not tried:
        return None
    limit = thresholds_for(spec, engine).windows_db if limit_db is None else limit_db
    longest = max(f.end for f in tried)
    with console.progress(f"windows: reference of {longest} tokens"):
        if spec.scheme:
            from exporters.own_weights import OwnWeights

            truth = OwnWeights(folder, checkpoint).truth(proof_ids(spec, folder, longest))
        else:
            truth = original.truth(proof_ids(spec, folder, longest))
    label = "simulated: " if is_simulated(spec, engine) else ""
    with console.progress(f"{label}windows on {engine}", len(tried)) as tick:
        return plain(mode, truth.source, limit, judge(session, truth, tried, limit, tick))


def windows_of(checkpoint: Checkpoint) -> list[int]:
    """The windows that a config.json speaks of, used or not: what is tried at more places costs little."""
    said = checkpoint.config.get("sliding_window")
    return [said] if type(said) is int and said > 1 else []
