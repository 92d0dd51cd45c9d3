"""Rounding that lets outputs make up for each other: GPTQ over the rows of a weight, with GPTQ over its inputs inside.

    error   tr(A E H E^T),  E = q - w,  H = sum x x^T of inputs,  A = sum g g^T of the loss's gradients at outputs
    rows    in parts; those still to come take over what the errors E of the done ones do to the loss:
            w_rest -= A_rest,rest^-1 A_rest,done E_done

H alone takes all outputs for equally important and independent. They are neither: in the early layers of SmolLM2 one
direction of the outputs has half of A. That a Kronecker product of A and H stands for the Hessian of the whole model's
loss, and that both sides can be fed back, is the idea of YAQA (Tseng et al. 2025); parts of rows are our own shortcut.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from quantize.grid import Grid, QuantisedWeight, joined
from quantize.rounding import gptq
from ringstep.errors import RingstepError

PARTS = 4  # eight lower the error by another 0.3 dB and take twice the time
# On A's diagonal, as a part of its mean: A x H is a coarse picture of the loss, estimated on little text.
DAMPING = 0.3


def quantise(weight: Tensor, hessian: Tensor, metric: Tensor, grid: Grid, damping: float = gptq.DAMPING,
             parts: int = PARTS) -> QuantisedWeight:  # fmt: skip
    """Quantise a float32 weight [out, in]; `hessian` [in, in] as in gptq.quantise, `metric` [out, out] A above.

    `metric` may have any scale. Raises RingstepError for values that are not finite and sizes that do not fit.
    """
    outputs = len(weight)
    if metric.shape != (outputs, outputs):
        raise RingstepError(f"a metric {list(metric.shape)} for a weight of {outputs} outputs")
    if not torch.isfinite(metric.sum(dtype=torch.float64)):
        raise RingstepError("the gradients of calibration are not finite")
    known = gptq.curvature(weight, hessian, grid, damping)
    order = torch.argsort(metric.diagonal(), descending=True, stable=True)
    coupling = metric.double()[order][:, order]
    mean = float(coupling.diagonal().mean())
    coupling.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    wanted = weight.double()[order]
    errors = torch.zeros_like(wanted)
    edges = [outputs * part // parts for part in range(parts + 1)]
    pieces = []
    for start, stop in itertools.pairwise(edges):
        if start == stop:
            continue
        target = wanted[start:stop]
        if start:
            owed = coupling[start:, :start] @ errors[:start]
            factor = torch.linalg.cholesky(coupling[start:, start:])
            target = target - torch.cholesky_solve(owed, factor)[: stop - start]
        made = gptq.quantise_by(target.float(), known, grid)
        errors[start:stop] = torch.from_numpy(made.dequantised()).double() - wanted[start:stop]
        pieces.append(made)
    return joined(pieces, order.numpy())
