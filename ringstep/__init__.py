"""ringstep: from a language model checkpoint to a phone's NPU, proven equal at every stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringstep.contract import CacheSpec, StepSpec
    from ringstep.session import DecodeSession

__version__ = "0.1.0"
__all__ = ["CacheSpec", "DecodeSession", "StepSpec", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `ringstep --help` does not pay for numpy.
    if name == "DecodeSession":
        from ringstep.session import DecodeSession

        return DecodeSession
    if name in ("CacheSpec", "StepSpec"):
        from ringstep import contract

        return getattr(contract, name)
    raise AttributeError(f"module 'ringstep' has no attribute {name!r}")
