"""The one exception a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RingstepError(Exception):
    """Bad input or a refused model: one line saying what is wrong, where, and what to do.

    The command line prints the message alone and leaves with exit code 2.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
