"""Which part of the model an operation of a profile belongs to, by the name that the runtime gives it.

Exports name nodes like /layers.7/attn/q_proj/Gemm; runtimes turn "/" and "." into "_" and add suffixes such as
_token_1 or :OpId_12. Conversions have their tensor's name: /layers.7/attn/q_proj/Gemm_output_0_quantised, new_key_7.
"""

from __future__ import annotations

import re
from itertools import takewhile

_LAYER = re.compile(r"(?<![A-Za-z])layers[._](\d{1,5})(?![0-9A-Za-z])")
_CACHE = re.compile(r"(?<![A-Za-z])(?:past|new)_(?:key|value)_(\d{1,5})(?!\d)")
_HIDDEN = re.compile(r"(?<![A-Za-z])hidden_(\d{1,5})(?!\d)")
_ENDS = re.compile(r"(?<![A-Za-z])(head|embed|logits)(?![a-z])")
_INPUT = re.compile(r"(?:cos|sin|mask)_[a-z]+|embedded|x(?=/|$)")
_BLOCKS = ("attn", "mlp")


def place_of(name: str) -> tuple[int | None, str]:
    """The layer (None outside of the layers) and its block: "attn/q_proj", "mlp", "input_norm", "cache", "residual".

    Outside: "head", "embed", "inputs". What no rule knows is "other".
    """
    if found := _LAYER.search(name):
        return int(found[1]), _block(name[found.end() :])
    for pattern, block in ((_CACHE, "cache"), (_HIDDEN, "residual")):
        if found := pattern.search(name):
            return int(found[1]), block
    if found := _ENDS.search(name):
        return None, "embed" if found[1] == "embed" else "head"
    return None, "inputs" if _INPUT.match(name.lstrip("/_")) else "other"


def _block(rest: str) -> str:
    rest = re.sub(r"[/._:]+", "_", rest).strip("_").removeprefix("self_")
    # Modules are in small letters; the first capital begins the operation.
    pieces = list(takewhile(lambda piece: piece.isalnum() and piece[0].islower(), rest.split("_")))
    ends = [i for i, piece in enumerate(pieces) if piece.endswith(("proj", "norm"))]
    pieces = pieces[: ends[0] + 1] if ends else pieces
    if not pieces:
        return "residual" if rest.startswith("Add") else "other"
    if pieces[0] in _BLOCKS and len(pieces) > 1:
        return f"{pieces[0]}/{'_'.join(pieces[1:])}"
    return "_".join(pieces)
