"""A phone's outputs against those of the same graph on this machine: in dB, output by output, and what that means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exporters.tapped import Codec
from ringstep.contract import StepSpec
from ringstep.parity.metrics import snr_db
from ringstep.parity.thresholds import thresholds_for


@dataclass(frozen=True)
class Verdict:
    """`outputs` has each output's SNR over all samples, in dB; `failures` says what is wrong, () where it passed."""

    outputs: dict[str, float]
    limit_db: float
    failures: tuple[str, ...]
    samples: int

    @property
    def worst_db(self) -> float | None:
        """The least SNR; None where nothing could be compared."""
        return min(self.outputs.values(), default=None)


def compare(
    folder: Path, spec: StepSpec, n: int, unit: str, samples: Sequence[tuple[Any, Mapping[str, np.ndarray]]],
    outputs: Mapping[str, Sequence[np.ndarray]],
) -> Verdict:  # fmt: skip
    """Hold what came back from a device against the samples' own outputs; quantised tensors as what they stand for.

    The limit is that of the window gate, which holds an engine against the artifact's own weights in floats:
    thresholds.toml, `windows_db` of qnn for the NPU, of onnx for other units.
    """
    limit = thresholds_for(spec, "qnn-sim" if unit == "npu" else "ort").windows_db
    codec = Codec(folder, spec, n)
    real: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    failures = []
    for name in samples[0][1]:
        have = [np.asarray(array) for array in outputs.get(name, ())] if name in outputs else None
        want = [pair[1][name] for pair in samples]
        if have is None:
            failures.append(f"{name}: the device returned no such output")
            continue
        if len(have) != len(want) or any(h.shape != w.shape for h, w in zip(have, want, strict=False)):
            shapes = f"{len(have)} of {list(have[0].shape) if have else []}"
            failures.append(f"{name}: the device returned {shapes}, want {len(want)} of {list(want[0].shape)}")
            continue
        if any(h.dtype.kind not in "fiub" for h in have):
            failures.append(f"{name}: the device returned {have[0].dtype}, which is no number")
            continue
        # Some runtimes hand out what the integers stand for.
        codes = codec.own(name) is None or all(h.dtype.kind in "iu" for h in have)
        floats = [codec.decode(name, h) if codes else h.astype(np.float32) for h in have]
        real[name] = np.stack([codec.decode(name, w) for w in want]), np.stack(floats)
    with np.errstate(over="ignore", invalid="ignore"):
        found = {name: snr_db(*pair) for name, pair in joined(real).items()}
    failures += [f"{name}: {db:.1f} dB, at least {limit:g}" for name, db in found.items() if db < limit]
    return Verdict(found, limit, tuple(failures), len(samples))


def joined(pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """With accurate activations the residual stream is two tensors: what counts is their sum.

    The rest is the rounding error of the other one, which each engine has to itself.
    """
    found = {}
    for name, pair in pairs.items():
        rest = pairs.get(name.replace("hidden_", "hidden_rest_"))
        if name.startswith("hidden_rest_") and name.replace("_rest", "") in pairs:
            continue
        if name.startswith("hidden_") and rest is not None and rest is not pair:
            pair = pair[0] + rest[0], pair[1] + rest[1]
        found[name] = pair
    return found
