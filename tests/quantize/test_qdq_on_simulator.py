"""QDQ graphs compiled for a phone and run on the HTP simulator: nothing falls back, and the figures are ONNX Runtime's.

Simulated; no phone was asked.
"""

from __future__ import annotations

import numpy as np
import pytest
from float_models import N, texts
from qdq_models import SM8750, quantised

from quantize.scheme import Cache, Scheme
from ringstep.parity.metrics import snr_db
from ringstep.session import DecodeSession

pytest.importorskip("onnxruntime_qnn")


@pytest.mark.parametrize(("grids", "each", "scheme", "floor"), [
    ("w8", 1, None, 45), ("lpbq", N, None, 45), ("w4", N, Scheme("kv8", cache=Cache(bits=8)), 38),
])  # fmt: skip
def test_the_simulator_computes_the_same(grids: str, each: int, scheme: Scheme | None, floor: float) -> None:
    """An operator that the NPU lacks would be an error (session.disable_cpu_ep_fallback), not a detour."""
    from ringstep.engines.qnn_sim import QnnSimEngine

    own = quantised("llama", grids, scheme, chip=True)
    rows = own.model.table(np.array(texts(160)[1][1 : 1 + max(2, each)]))
    found = {}
    with own.open() as session:
        session.seed(own.entries())
        found["ort"] = np.concatenate([session.step(rows[at : at + each]) for at in range(0, len(rows), each)])
        caches = [session.entries(layer) for layer in range(2)]
    with DecodeSession(own.spec, QnnSimEngine(own.folder, own.spec, chip=SM8750.name)) as session:
        session.seed(own.entries())
        found["sim"] = np.concatenate([session.step(rows[at : at + each]) for at in range(0, len(rows), each)])
        simulated = [session.entries(layer) for layer in range(2)]
    snr = snr_db(found["ort"], found["sim"])
    print(f"{grids}: logits {snr:.1f} dB on the simulator against ONNX Runtime")
    assert snr >= floor
    for (positions, *ours), (others, *theirs) in zip(caches, simulated, strict=True):
        np.testing.assert_array_equal(positions, others)
        for a, b in zip(ours, theirs, strict=True):
            assert snr_db(a, b) >= floor - 3
