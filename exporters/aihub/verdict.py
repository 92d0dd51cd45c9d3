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
    found: dict[str, float] = {}
    failures = []
    for name in samples[0][1]:
        have = outputs.get(name)
        want = [pair[1][name] for pair in samples]
        if have is None:
            failures.append(f"{name}: the device returned no such output")
            continue
        if len(have) != len(want) or any(h.shape != w.shape for h, w in zip(have, want, strict=False)):
            shapes = f"{len(have)} of {list(have[0].shape) if have else []}"
            failures.append(f"{name}: the device returned {shapes}, want {len(want)} of {list(want[0].shape)}")
            continue
        if codec.own(name) and any(h.dtype.kind not in "iu" for h in have):
            real = [np.asarray(h, np.float32) for h in have]  # a runtime that hands out what the integers stand for
        else:
            real = [codec.decode(name, np.asarray(h)) for h in have]
        pair = [np.stack([codec.decode(name, w) for w in want]), np.stack(real)]
        found[name] = snr_db(pair[0], pair[1])
        if found[name] < limit:
            failures.append(f"{name}: {found[name]:.1f} dB, at least {limit:g}")
    return Verdict(found, limit, tuple(failures), len(samples))
