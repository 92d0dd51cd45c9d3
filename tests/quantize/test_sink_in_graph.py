"""A sink that runs through the quantised graph: what it overflows stays in float, what it does not is widened."""

from __future__ import annotations

import dataclasses

import numpy as np
from qdq_models import SM8750, calibrated, graphs_of

from quantize.activations import SINK_REACH, encode
from quantize.observe import Seen
from quantize.scheme import Scheme

LOUD, WIDER = "/layers.0/Add_output_0", "/layers.1/mlp/up_proj/Gemm_output_0"


def reach(seen: Seen) -> float:
    return max(abs(seen.low), abs(seen.high))


def test_what_a_sink_overflows_stays_in_float() -> None:
    found, (_, graphs) = calibrated("llama", 1), graphs_of("llama")
    graph = next(iter(graphs.values())).graph
    plain = encode(graph, found.seen, Scheme("plain"), SM8750)
    far, near = 10 * SINK_REACH * reach(found.seen[LOUD]), 0.9 * SINK_REACH * reach(found.seen[WIDER])
    sink = {LOUD: Seen(-far, far, far), WIDER: Seen(-near, near, near), "new_key_0": Seen(-far, far, far)}
    made = encode(graph, found.seen, Scheme("off", sink_prefix="off"), SM8750, sink)
    assert made[LOUD] is None
    wide, before = made[WIDER], plain[WIDER]
    assert wide is not None and before is not None
    assert np.isclose(wide.encoding.scale * 65535 / 2, 1.5 * near, rtol=0.01)
    assert wide.encoding.scale > before.encoding.scale
    # Caches hold the sink's entries already, and what is an input or output stays in integers.
    assert made["new_key_0"] == plain["new_key_0"] and made["logits"] == plain["logits"]
    changed = {name for name in made if made[name] != plain[name]}
    assert changed == {LOUD, WIDER}


def test_a_chip_without_floats_widens_the_range() -> None:
    found, (_, graphs) = calibrated("llama", 1), graphs_of("llama")
    graph = next(iter(graphs.values())).graph
    far = 10 * SINK_REACH * reach(found.seen[LOUD])
    integers = dataclasses.replace(SM8750, fp16=False)
    made = encode(graph, found.seen, Scheme("off", sink_prefix="off"), integers, {LOUD: Seen(-far, far, far)})[LOUD]
    assert made is not None and made.encoding.scale * 65535 >= 2 * far
