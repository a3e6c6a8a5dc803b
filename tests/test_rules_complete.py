"""Every op that captured joint graphs keep has a rule; decomposed losses and canonical random ops are not kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshwright.kernels.random import canonical_random
from meshwright.partitioner.rules.every import BY_NAME, has_rule
from meshwright.partitioner.rules.loss import DECOMPOSITIONS

SEEN = """
_embedding_bag.default _embedding_bag_backward.default _log_softmax.default _log_softmax_backward_data.default
_native_batch_norm_legit_functional.default _safe_softmax.default
_scaled_dot_product_flash_attention_for_cpu.default _scaled_dot_product_flash_attention_for_cpu_backward.default
_softmax.default _softmax_backward_data.default _to_copy.default _unsafe_index.Tensor _unsafe_index_put.default
_unsafe_view.default abs.default add.Tensor addmm.default alias.default arange.default argmax.default
as_strided.default as_strided_scatter.default bernoulli.p binary_cross_entropy_with_logits.default
bitwise_and.Tensor bitwise_not.default bmm.default cat.default clamp.default clone.default constant_pad_nd.default
convolution.default convolution_backward.default copy.default cos.default cumsum.default detach.default div.Scalar
div.Tensor embedding.default embedding_dense_backward.default empty_like.default eq.Scalar eq.Tensor exp.default
expand.default fill.Tensor flip.default floor.default floor_divide.default full_like.default gather.default
ge.Scalar ge.Tensor gelu.default gelu_backward.default gt.Scalar gt.Tensor histc.default index.Tensor
index_put.default le.Scalar le.Tensor lift_fresh_copy.default log.default logical_and.default lt.Scalar
masked_fill.Scalar max.dim max_pool2d_with_indices.default max_pool2d_with_indices_backward.default mean.default
mean.dim minimum.default mm.default mse_loss.default mse_loss_backward.default mul.Scalar mul.Tensor
native_batch_norm_backward.default native_dropout.default native_dropout_backward.default native_group_norm.default
native_group_norm_backward.default native_layer_norm.default native_layer_norm_backward.default ne.Scalar
neg.default new_empty.default new_empty_strided.default new_ones.default new_zeros.default
nll_loss2d_backward.default nll_loss2d_forward.default nll_loss_backward.default nll_loss_forward.default
ones.default permute.default pow.Tensor_Scalar rand.default randn_like.default relu.default repeat.default
roll.default rsqrt.default rsub.Scalar scalar_tensor.default scatter.src scatter.value scatter_add.default
select.int select_backward.default select_scatter.default sigmoid.default sigmoid_backward.default silu.default
silu_backward.default sin.default slice.Tensor slice_backward.default slice_scatter.default softplus.default
softplus_backward.default sort.default split.Tensor split_with_sizes.default sqrt.default squeeze.dim stack.default
sub.Tensor sum.default sum.dim_IntList t.default tanh.default tanh_backward.default threshold_backward.default
topk.default transpose.int tril.default tril_indices.default unbind.int unsqueeze.default view.default where.self
zeros.default zeros_like.default transformers.grouped_mm_fallback.default
transformers.grouped_mm_fallback_backward.default
"""
"""Ops of the joint graphs of some thirty models, captured without decompositions; `aten` is left out."""

SEEN_DECOMPOSED = """
_unsafe_masked_index_put_accumulate.default amax.default any.dim arange.start_step clamp_max.default
clamp_min.default div.Tensor_mode empty.memory_format empty_permuted.default erf.default fmod.Scalar full.default
index_select.default log1p.default logical_not.default randn.default squeeze.dims var_mean.correction
"""
"""Those that appear when the graphs are decomposed to core ATen."""


def op_of(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def kept(name: str) -> bool:
    return name.startswith("transformers.") or not (op_of(name) in DECOMPOSITIONS or canonical_random(op_of(name)))


@pytest.mark.parametrize("name", [n for n in SEEN.split() + SEEN_DECOMPOSED.split() if kept(n)])
def test_every_op_seen_has_a_rule(name):
    assert name in BY_NAME if name.startswith("transformers.") else has_rule(op_of(name))
