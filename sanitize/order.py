"""The passes in the order they run; the comment says why one stands where it does."""

from __future__ import annotations

from sanitize.passes import (
    Pass,
    accurate_divide,
    accurate_exp,
    accurate_gelu,
    accurate_sigmoid,
    accurate_softmax,
    accurate_softplus,
    accurate_square,
    common_subexpressions,
    dead,
    duplicates,
    fold,
    fuse_gelu,
    fuse_layer_norm,
    fuse_linear,
    fuse_rms_norm,
    fuse_softmax,
    infinities,
    linear_as_conv,
    lower_attention,
    lower_fused_matmul,
    lower_gather_nd,
    lower_gelu,
    lower_group_query_attention,
    lower_layer_norm,
    lower_matmul_nbits,
    lower_multi_head_attention,
    lower_packed_attention,
    lower_rotary_embedding,
    lower_skip_norm,
    lower_swish,
    merge_projections,
    names,
    nan_guards,
    narrow_types,
    noop,
    rank0,
    reshape_allowzero,
    reshape_pairs,
    split_heads,
    split_projections,
    transposed,
)

PASSES: tuple[Pass, ...] = (
    rank0.PASS,  # first: the inference of types stops at a scalar where a list belongs
    dead.PASS,  # nothing below looks at what nobody reads
    fold.PASS,  # what follows recognises constants, not the arithmetic that makes them
    noop.PASS,
    reshape_pairs.PASS,
    nan_guards.PASS,  # they hide what they guard
    infinities.PASS,  # after the guards, whose rows it keeps finite
    reshape_allowzero.PASS,  # after fold: it needs the shapes as constants
    lower_matmul_nbits.PASS,  # fused operators come apart before their parts are fused for the target
    lower_fused_matmul.PASS,
    lower_skip_norm.PASS,
    lower_attention.PASS,
    lower_multi_head_attention.PASS,
    lower_packed_attention.PASS,
    lower_group_query_attention.PASS,
    lower_rotary_embedding.PASS,  # after attention, which makes some
    lower_gather_nd.PASS,  # after fold: it needs constant indices
    lower_gelu.PASS,
    lower_swish.PASS,
    fuse_layer_norm.PASS,  # before RMSNorm, which a LayerNorm holds
    fuse_rms_norm.PASS,
    lower_layer_norm.PASS,  # after fusing: a v68 lacks the fused one
    fuse_gelu.PASS,
    fuse_softmax.PASS,
    fuse_linear.PASS,
    accurate_sigmoid.PASS,  # after fusing: they begin at whole SiLUs, GELUs and norms
    accurate_gelu.PASS,
    accurate_softplus.PASS,
    accurate_softmax.PASS,
    accurate_exp.PASS,  # after those that write an Exp with a bounded argument
    accurate_square.PASS,
    accurate_divide.PASS,  # after those that write a division
    narrow_types.PASS,  # after fusing, which looks through the casts of norms
    common_subexpressions.PASS,
    duplicates.PASS,
    transposed.PASS,
    names.PASS,  # last, for the names of what the others made
)

LAYOUTS: tuple[Pass, ...] = (
    merge_projections.PASS,
    split_projections.PASS,
    split_heads.PASS,
    linear_as_conv.PASS,
)
"""Off unless asked for with --with."""
