"""What a model is made fit for: a runtime, a chip, the numbers it computes with, and what calibration saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringstep.devices import Chip, find_device
from ringstep.errors import RingstepError, did_you_mean

TARGETS = ("qnn-htp", "ort-mobile", "xnnpack")
PRECISIONS = ("fp16", "a16", "fp32")
DEFAULT_CHIP = "sm8750"


@dataclass(frozen=True)
class Target:
    """Where the model is to run."""

    name: str
    """qnn-htp, ort-mobile or xnnpack."""
    chip: Chip | None
    """The chip for qnn-htp, None for targets on a CPU."""
    precision: str
    """fp16: float tensors are computed in half precision; a16: 16 bit quantised activations; fp32."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Value name to the smallest and largest element that calibration saw; empty: nothing is known."""

    @property
    def arch(self) -> int | None:
        """The tensor processor's architecture, 79 for v79; None without a chip."""
        return self.chip.arch if self.chip else None

    @property
    def htp(self) -> bool:
        """Whether the model runs on Qualcomm's tensor processor."""
        return self.name == "qnn-htp"


def find_target(name: str, chip: str | None = None, precision: str | None = None) -> Target:
    """Return the target of these names. Raises RingstepError for an unknown one, or a chip where none belongs."""
    if name not in TARGETS:
        raise RingstepError(f"unknown target {name!r}{did_you_mean(name, TARGETS)}; there are {', '.join(TARGETS)}")
    if name != "qnn-htp":
        if chip:
            raise RingstepError(f"--chip {chip}: the target {name} runs on a CPU and takes no chip")
        return Target(name, None, precision or "fp32")
    found = find_device(chip or DEFAULT_CHIP).chip
    if not found.fp16 and precision == "fp16":
        raise RingstepError(f"--precision fp16: {found.name} ({found.htp_arch}) computes no floats; use a16")
    return Target(name, found, precision or ("fp16" if found.fp16 else "a16"))
