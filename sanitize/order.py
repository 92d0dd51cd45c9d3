"""The passes in the order they run. Each line says why it stands where it does."""

from __future__ import annotations

from sanitize.passes import Pass

PASSES: tuple[Pass, ...] = ()

LAYOUTS: tuple[Pass, ...] = ()
"""Off unless asked for with --with."""
