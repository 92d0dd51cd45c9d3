"""The passes in the order they run. Each line says why it stands where it does."""

from __future__ import annotations

from sanitize.passes import (
    Pass,
    common_subexpressions,
    dead,
    duplicates,
    fold,
    fuse_gelu,
    fuse_layer_norm,
    fuse_linear,
    fuse_rms_norm,
    fuse_softmax,
    linear_as_conv,
    lower_gather_nd,
    lower_rotary_embedding,
    merge_projections,
    names,
    nan_guards,
    narrow_types,
    noop,
    rank0,
    reshape_allowzero,
    split_heads,
    split_projections,
    transposed,
)

PASSES: tuple[Pass, ...] = (
    dead.PASS,  # nothing below looks at what nobody reads
    fold.PASS,  # constants first: what follows recognises constants, not the arithmetic that makes them
    noop.PASS,
    nan_guards.PASS,
    reshape_allowzero.PASS,  # after fold: it needs the shapes as constants
    rank0.PASS,
    lower_gather_nd.PASS,  # after fold: it needs constant indices
    lower_rotary_embedding.PASS,  # before fusing: it leaves norms and the like to be fused
    fuse_rms_norm.PASS,
    fuse_layer_norm.PASS,
    fuse_gelu.PASS,
    fuse_softmax.PASS,
    fuse_linear.PASS,
    narrow_types.PASS,  # after fusing, which looks through the casts of norms
    common_subexpressions.PASS,
    duplicates.PASS,
    transposed.PASS,
    names.PASS,
)

LAYOUTS: tuple[Pass, ...] = (
    linear_as_conv.PASS,
    split_heads.PASS,
    merge_projections.PASS,
    split_projections.PASS,
)
"""Off unless asked for with --with."""
