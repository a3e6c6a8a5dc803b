"""Every rule of views, pieces, element-wise ops, reductions, contractions and factories, proved on small tensors.

Each case names how many factors split (`free`) and how many alternatives of partial operands there are (`sums`); the
number of proved splits follows from them.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.rules.every import rule_of
from meshwright.partitioner.rules.split import Call, Split, plain_shape
from rulecheck import check_call

torch.set_num_threads(1)
aten = torch.ops.aten


def T(*shape, dtype=torch.float32):
    """A tensor of small distinct values."""
    g = torch.Generator().manual_seed(len(shape))
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(1, 9, shape, generator=g, dtype=dtype)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def count(free, sums):
    """How many splits `check_call` proves of a rule with so many free factors and linear alternatives."""
    return 2 * (free + sums) + free * (free + 1) // 2 + free * sums


def proved(free, sums, op, *args, **kwargs):
    assert check_call(op, args, kwargs) == count(free, sums), rule_of(Call(op, args, kwargs, op(*args, **kwargs)))


def case(free, sums, op, *args, **kwargs):
    shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args]
    return pytest.param(free, sums, op, args, kwargs, id=f"{str(op).removeprefix('aten.')} {shapes} {kwargs or ''}")


def check(cases):
    @pytest.mark.parametrize(("free", "sums", "op", "args", "kwargs"), cases)
    def test(free, sums, op, args, kwargs):
        proved(free, sums, op, *args, **kwargs)

    return test


I64, BOOL, C64, F64, BF16 = torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16

test_reshape = check(
    [
        case(2, 1, aten.view.default, T(6, 4), [24]),
        case(2, 1, aten.view.default, T(24), [6, 4]),
        case(3, 1, aten.view.default, T(5, 12), [5, 3, 4]),
        case(3, 1, aten.view.default, T(2, 6, 5), [-1, 5]),
        case(3, 1, aten.view.default, T(4, 6), [8, 3]),
        case(2, 1, aten.view.default, T(12, 8), [16, 6]),
        case(0, 1, aten.view.default, T(5, 6), [6, 5]),
        case(0, 1, aten.view.default, T(3, 5), [5, 3]),
        case(1, 1, aten.view.default, T(2, 3, 5), [2, 5, 3]),
        case(2, 1, aten.view.default, T(5, 3), [1, 5, 1, 3, 1]),
        case(0, 1, aten.view.default, T(1), []),
        case(0, 1, aten.view.default, T(0, 4), [0]),
        case(2, 0, aten.view.default, T(6, 4, dtype=BOOL), [24]),
        case(3, 1, aten.reshape.default, T(4, 3, 5).transpose(0, 1), [12, 5]),
        case(2, 1, aten._unsafe_view.default, T(15), [3, 5]),
        case(2, 1, aten._reshape_alias.default, T(15), [3, 5], [5, 1]),
        case(2, 0, aten.view.dtype, T(5, 3), torch.int32),
        case(1, 0, aten.view.dtype, T(5, 4), torch.int16),
        case(2, 1, aten.detach.default, T(5, 3)),
        case(2, 1, aten.alias.default, T(5, 3)),
        case(1, 1, aten.lift_fresh_copy.default, T(5)),
    ]
)

test_permute = check(
    [
        case(2, 1, aten.t.default, T(5, 3)),
        case(1, 1, aten.t.default, T(5)),
        case(3, 1, aten.transpose.int, T(2, 5, 3), -1, 0),
        case(3, 1, aten.permute.default, T(2, 5, 3), [2, 0, -2]),
        case(3, 1, aten.expand.default, T(5, 1), [3, -1, 4]),
        case(2, 1, aten.expand.default, T(5, 3), [5, 3]),
        case(1, 1, aten.expand.default, T(), [5]),
        case(2, 1, aten.unsqueeze.default, T(5, 3), -1),
        case(1, 1, aten.squeeze.dim, T(5, 1), 1),
        case(2, 1, aten.squeeze.dim, T(2, 3), 0),
        case(1, 1, aten.squeeze.default, T(1, 2, 1)),
        case(2, 1, aten.squeeze.dims, T(2, 1, 3, 1), [0, 1]),
        case(2, 1, aten.squeeze.dims, T(2, 3), [0]),
        case(1, 1, aten.flip.default, T(5, 3), [0]),
        case(1, 1, aten.roll.default, T(5, 3), [2], [-1]),
        case(0, 1, aten.roll.default, T(5, 3), [2]),
        case(3, 1, aten.repeat.default, T(5, 3), [1, 2]),
        case(4, 1, aten.repeat.default, T(1, 3), [2, 3, 2]),
        case(0, 1, aten.repeat.default, T(), [1]),
        case(3, 1, aten.tril.default, T(2, 5, 4)),
        case(2, 1, aten.tril.default, T(5, 7), 2),
        case(2, 1, aten.triu.default, T(5, 7), -2),
        case(2, 0, aten.triu.default, T(5, 5, dtype=BOOL), 1),
        case(1, 1, aten.diagonal.default, T(4, 5, 4), 0, 0, 2),
        case(1, 1, aten.view_as_complex.default, T(5, 2)),
        case(2, 1, aten.view_as_real.default, T(5, 3, dtype=C64)),
        case(1, 1, aten.unfold.default, T(5, 8), 1, 3, 2),
        case(1, 1, aten.select.int, T(5, 3), -1, 1),
        case(1, 1, aten.select.int, T(5, 3), 0, -1),
        case(1, 1, aten.unbind.int, T(3, 5)),
        case(0, 1, aten.as_strided.default, T(5, 3), [3, 2], [1, 3], 1),
        case(0, 1, aten.as_strided_scatter.default, T(15), T(3, 2), [3, 2], [1, 3], 1),
        case(2, 1, aten._conj.default, T(5, 3, dtype=C64)),
    ]
)

test_pieces = check(
    [
        case(2, 1, aten.slice.Tensor, T(5, 7)),
        case(2, 1, aten.slice.Tensor, T(5, 7), 1, 0, 2**63 - 1),
        case(2, 1, aten.slice.Tensor, T(5, 7), 1, 0, -1),
        case(2, 1, aten.slice.Tensor, T(5, 15), -1, 5, 10),
        case(2, 1, aten.slice.Tensor, T(5, 15), 1, None, 10),
        case(2, 1, aten.slice.Tensor, T(5, 15), 1, -5),
        case(2, 1, aten.slice.Tensor, T(5, 10), 1, 1, 2**63 - 1, 2),
        case(2, 1, aten.slice.Tensor, T(5, 9), 1, 1, 2**63 - 1, 2),
        case(1, 1, aten.slice.Tensor, T(5, 6), 1, 4, 2),
        case(1, 1, aten.slice.Tensor, T(5, 1), 1, 0, 1),
        case(2, 1, aten.slice.Tensor, T(5, 38), 1, 0, 2),
        case(2, 1, aten.slice_backward.default, T(5, 5), [5, 15], 1, 5, 10, 1),
        case(2, 1, aten.slice_backward.default, T(5, 6), [5, 7], 1, 0, -1, 1),
        case(2, 1, aten.slice_backward.default, T(3, 7), [9, 7], 0, 2, 2**63 - 1, 3),
        case(2, 1, aten.slice_scatter.default, T(5, 15), T(5, 5), 1, 5, 10),
        case(1, 1, aten.slice_scatter.default, T(5, 7), T(5, 2), 1, 3, 5),
        case(2, 0, aten.slice_scatter.default, T(5, 4, dtype=BOOL), T(5, 2, dtype=BOOL), 1, 0, 2),
        case(1, 1, aten.select_backward.default, T(5), [5, 3], 1, -1),
        case(1, 1, aten.select_scatter.default, T(5, 3), T(3), 0, 2),
        case(2, 1, aten.split.Tensor, T(5, 15), 5, -1),
        case(2, 1, aten.split.Tensor, T(15, 4), 6),
        case(1, 1, aten.split.Tensor, T(7, 5), 4),
        case(2, 1, aten.split_with_sizes.default, T(5, 24), [12, 6, 6], 1),
        case(2, 1, aten.split_with_sizes.default, T(5, 12), [12, 0], 1),
        case(1, 1, aten.split_with_sizes.default, T(5, 8), [3, 5], 1),
        case(2, 1, aten.cat.default, [T(5, 4), T(5, 4), T(5, 8)], -1),
        case(1, 1, aten.cat.default, [T(5, 4), T(5, 3)], 1),
        case(2, 1, aten.cat.default, [T(4, 5), T(0)]),
        case(2, 1, aten.cat.default, [T(4, 5), T(0, 5)]),
        case(1, 1, aten.cat.default, [T(1, 5), T(1, 5)]),
        case(1, 0, aten.cat.default, [T(5, dtype=BOOL)]),
        case(2, 1, aten.stack.default, [T(5, 3), T(5, 3)], -1),
        case(2, 1, aten.constant_pad_nd.default, T(5, 7), [0, 1]),
        case(2, 0, aten.constant_pad_nd.default, T(5, 7), [0, 1], 2.0),
        case(2, 1, aten.constant_pad_nd.default, T(5, 6), [3, 9]),
        case(2, 1, aten.constant_pad_nd.default, T(5, 6), [-3, 0]),
        case(3, 1, aten.constant_pad_nd.default, T(5, 6, 3), [1, 0, 0, 2]),
        case(2, 1, aten.constant_pad_nd.default, T(5, 6), [0, 0]),
    ]
)

X, Y, MASK = T(5, 3), T(5, 3), T(5, 3, dtype=BOOL)

test_pointwise = check(
    [
        case(2, 1, aten.add.Tensor, X, T(3)),
        case(2, 1, aten.add.Tensor, X, T(5, 1), alpha=2),
        case(2, 1, aten.add.Tensor, T(5, 1), T(1, 3)),
        case(2, 1, aten.add.Tensor, X, T()),
        case(2, 0, aten.add.Tensor, X, 2.0),
        case(2, 0, aten.add.Tensor, MASK, MASK),
        case(2, 1, aten.add.Tensor, T(5, 3, dtype=I64), T(3, dtype=I64)),
        case(3, 1, aten.sub.Tensor, X, T(2, 1, 3)),
        case(2, 0, aten.rsub.Scalar, X, 1),
        case(2, 2, aten.mul.Tensor, X, T(3)),
        case(2, 1, aten.mul.Tensor, X, 2.0),
        case(2, 1, aten.mul.Tensor, X, MASK),
        case(2, 1, aten.mul.Scalar, X, 2.0),
        case(2, 1, aten.div.Tensor, X, T(3)),
        case(2, 1, aten.div.Tensor, X, 2.0),
        case(2, 0, aten.div.Tensor_mode, X, 2.0, rounding_mode="floor"),
        case(2, 1, aten.div.Scalar, X, 2.0),
        case(2, 0, aten.floor_divide.default, T(5, 3, dtype=I64), T(3, dtype=I64)),
        case(2, 1, aten.neg.default, X),
        case(0, 1, aten.neg.default, T()),
        case(2, 1, aten.neg.default, T(3, 5).t()),
        case(1, 1, aten.neg.default, T(5, 0)),
        case(2, 1, aten.clone.default, X, memory_format=torch.contiguous_format),
        case(2, 0, aten.rsqrt.default, X.abs()),
        case(2, 0, aten.pow.Tensor_Scalar, X, 2),
        case(2, 0, aten.abs.default, T(5, 3, dtype=C64)),
        case(2, 0, aten.angle.default, T(5, 3, dtype=C64)),
        case(2, 0, aten.sgn.default, X),
        case(2, 1, aten.complex.default, X, T(3)),
        case(2, 0, aten.polar.default, X.abs(), Y),
        case(2, 0, aten.le.Tensor, X, T(3)),
        case(2, 0, aten.bitwise_and.Tensor, MASK, T(3, dtype=BOOL)),
        case(2, 0, aten.logical_not.default, X),
        case(2, 0, aten.clamp.default, X, -1, 1),
        case(2, 1, aten.where.self, MASK, X, T(3)),
        case(2, 1, aten.where.self, T(3, dtype=BOOL), X, T()),
        case(2, 1, aten.where.ScalarOther, MASK, X, 0.0),
        case(2, 0, aten.where.ScalarOther, MASK, X, 1.0),
        case(2, 1, aten.where.ScalarSelf, MASK, 0, X),
        case(2, 0, aten.where.Scalar, MASK, 0, 1),
        case(2, 1, aten.masked_fill.Scalar, X, T(3, dtype=BOOL), 0),
        case(2, 0, aten.masked_fill.Scalar, X, MASK, -3.0),
        case(2, 1, aten.masked_fill.Tensor, X, MASK, T()),
        case(2, 1, aten._to_copy.default, X, dtype=F64),
        case(2, 0, aten._to_copy.default, X, dtype=BF16),
        case(2, 0, aten._to_copy.default, X, dtype=I64),
        case(2, 0, aten._to_copy.default, MASK, dtype=torch.float32),
        case(2, 1, aten.copy.default, X, T(3)),
        case(2, 0, aten.copy.default, T(5, 3, dtype=BF16), T(3)),
        case(2, 1, aten.fill.Tensor, X, T()),
        case(2, 0, aten.fill.Scalar, X, 2.0),
        case(2, 1, aten.threshold_backward.default, X, Y, 0),
        case(2, 1, aten.gelu_backward.default, X, Y),
        case(2, 1, aten.silu_backward.default, X, Y),
        case(2, 1, aten.tanh_backward.default, X, Y),
        case(2, 1, aten.sigmoid_backward.default, X, Y),
        case(2, 1, aten.softplus_backward.default, X, Y, 1, 20),
        case(2, 1, aten.leaky_relu_backward.default, X, Y, 0.1, False),
        case(2, 1, aten.hardtanh_backward.default, X, Y, -1, 1),
        case(2, 1, aten.elu_backward.default, X, 1, 1, 1, False, Y),
        case(2, 1, aten.hardswish_backward.default, X, Y),
        case(2, 1, aten.log_sigmoid_backward.default, X, *torch.ops.aten.log_sigmoid_forward(Y)),
        case(2, 0, aten.log_sigmoid_forward.default, X),
        case(2, 0, aten._prelu_kernel.default, X, T(1, 3)),
        case(2, 0, aten._prelu_kernel_backward.default, X, Y, T(1, 3)),
        case(2, 2, aten.addcmul.default, X, T(3), T(5, 1), value=2),
        case(2, 1, aten.addcdiv.default, X, T(3), T(5, 1)),
        case(2, 1, aten.lerp.Scalar, X, Y, 0.3),
        case(2, 0, aten.lerp.Tensor, X, Y, T(3)),
        case(2, 0, aten.gelu.default, X),
        case(2, 0, aten.maximum.default, X, T(3)),
    ]
)

INTS = T(5, 4, dtype=I64)

test_reductions = check(
    [
        case(2, 1, aten.sum.default, T(5, 3)),
        case(0, 1, aten.sum.default, T()),
        case(2, 1, aten.sum.dim_IntList, T(5, 3), [-1]),
        case(3, 1, aten.sum.dim_IntList, T(5, 3, 2), [0, 2], True),
        case(2, 1, aten.sum.dim_IntList, T(5, 3), None, dtype=F64),
        case(2, 1, aten.sum.dim_IntList, T(5, 3), []),
        case(2, 0, aten.sum.dim_IntList, T(5, 3, dtype=BOOL), [0]),
        case(2, 1, aten.sum.dim_IntList, INTS, [0]),
        case(1, 1, aten.sum.dim_IntList, T(5, 0), [1]),
        case(2, 0, aten.count_nonzero.dim_IntList, T(5, 3, dtype=BOOL), [0]),
        case(2, 1, aten.mean.default, T(5, 4)),
        case(2, 1, aten.mean.dim, T(5, 4), [0]),
        case(3, 1, aten.mean.dim, T(5, 4, 3), [-1, 1], True, dtype=F64),
        case(2, 1, aten.mean.dim, T(4, 5).t(), [1]),
        case(2, 0, aten.amax.default, T(5, 4), [1]),
        case(2, 0, aten.amax.default, INTS, [1], True),
        case(2, 0, aten.amin.default, T(5, 4)),
        case(2, 0, aten.amin.default, T(5, 4, dtype=BOOL), [0]),
        case(2, 0, aten.max.default, T(5, 4)),
        case(2, 0, aten.min.default, INTS),
        case(1, 0, aten.max.dim, T(5, 4), 1),
        case(1, 0, aten.min.dim, T(5, 4), 0, True),
        case(1, 0, aten.argmax.default, T(5, 4), 1),
        case(0, 0, aten.argmax.default, T(5, 4)),
        case(1, 0, aten.any.dim, T(5, 4, dtype=BOOL), 1),
        case(0, 0, aten.all.default, T(5, 4, dtype=BOOL)),
        case(1, 0, aten.prod.dim_int, T(5, 4), 1),
        case(1, 0, aten.var.correction, T(5, 4), [1], correction=0, keepdim=True),
        case(1, 0, aten.var_mean.correction, T(5, 4), [0]),
        case(1, 0, aten.std.correction, T(5, 4), [1]),
        case(1, 0, aten.logsumexp.default, T(5, 4), [1]),
        case(1, 0, aten.linalg_vector_norm.default, T(5, 4), 2, [1], True),
        case(0, 0, aten.linalg_vector_norm.default, T(5, 4)),
        case(1, 0, aten.norm.ScalarOpt_dim, T(5, 4), 2, [1]),
        case(1, 1, aten._fft_r2c.default, T(5, 8), [1], 0, True),
        case(1, 1, aten._fft_c2r.default, T(5, 5, dtype=C64), [1], 0, 8),
        case(2, 1, aten._fft_c2c.default, T(5, 3, 4, dtype=C64), [2], 0, True),
    ]
)

OFFS = torch.tensor([2, 2, 8], dtype=torch.int32)

test_contractions = check(
    [
        case(3, 2, aten.mm.default, T(5, 4), T(4, 3)),
        case(2, 2, aten.mm.default, T(1, 4), T(4, 3)),
        case(3, 2, aten.mm.default, T(4, 5).t(), T(3, 4).t()),
        case(2, 2, aten.mm.default, T(5, 0), T(0, 3)),
        case(4, 2, aten.bmm.default, T(2, 5, 4), T(2, 4, 3)),
        case(2, 2, aten.mv.default, T(5, 4), T(4)),
        case(1, 2, aten.dot.default, T(5), T(5)),
        case(3, 2, aten.addmm.default, T(3), T(5, 4), T(4, 3)),
        case(3, 2, aten.addmm.default, T(1, 3), T(5, 4), T(4, 3), beta=2, alpha=3),
        case(3, 2, aten.addmm.default, T(5, 1), T(5, 4), T(4, 3)),
        case(3, 2, aten.addmm.default, T(), T(5, 4), T(4, 3)),
        case(4, 2, aten.baddbmm.default, T(1, 5, 3), T(2, 5, 4), T(2, 4, 3), beta=2),
        case(2, 2, aten.addmv.default, T(5), T(5, 4), T(4)),
    ]
)

test_factories = check(
    [
        case(2, 0, aten.zeros.default, [5, 3]),
        case(0, 0, aten.zeros.default, []),
        case(1, 0, aten.ones.default, [5, 1], dtype=I64),
        case(2, 0, aten.full.default, [5, 3], 2.0),
        case(2, 1, aten.new_zeros.default, T(5, 3), [5, 3]),
        case(4, 1, aten.new_zeros.default, T(5, 3), [7, 2]),
        case(3, 0, aten.new_ones.default, T(5), [5, 3], dtype=BOOL),
        case(2, 0, aten.new_full.default, T(5, 3), [5, 3], 2),
        case(2, 1, aten.zeros_like.default, T(5, 3)),
        case(2, 0, aten.ones_like.default, T(5, 3), dtype=I64),
        case(2, 0, aten.full_like.default, T(5, 3), 3),
        case(1, 0, aten.arange.default, 7),
        case(1, 0, aten.arange.default, 5, dtype=torch.float32),
        case(1, 0, aten.arange.start, 3, 10),
        case(1, 0, aten.arange.start_step, 10, -4, -3),
        case(0, 0, aten.arange.start_step, 0.0, 1.0, 0.1),
        case(0, 0, aten.eye.default, 4),
        case(0, 0, aten.tril_indices.default, 4, 4),
        case(0, 0, aten.linspace.default, 0, 1, 5),
        case(0, 0, aten.scalar_tensor.default, 2.0),
        case(1, 0, torch.ops.prims.iota.default, 7, start=2, step=3, dtype=I64, device="cpu", requires_grad=False),
    ]
)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.empty.memory_format, ([5, 3],), {"dtype": BF16}),
        (aten.empty_strided.default, ([5, 3], [1, 5]), {}),
        (aten.empty_permuted.default, ([5, 3], [1, 0]), {}),
        (aten.new_empty.default, (T(5, 3), [5, 3]), {}),
        (aten.new_empty_strided.default, (T(4), [5, 3], [3, 1]), {"dtype": I64}),
        (aten.empty_like.default, (T(5, 3),), {}),
    ],
    ids=lambda x: str(x) if not isinstance(x, (tuple, dict)) else "",
)
def test_empty_tensors_have_the_local_shape(op, args, kwargs):
    call = Call(op, args, kwargs, op(*args, **kwargs))
    split = Split(plain_shape(rule_of(call), call), axes={("d0", 0): ("x",)})
    operands = tuple(T(3, 3) if isinstance(a, torch.Tensor) else a for a in args)
    target, local, more = split.localize(call, operands, kwargs, Mesh(x=2, device="cpu"), 0)
    out = target(*local, **more)
    assert tuple(out.shape) == (3, 3) and out.dtype == call.output.dtype


def _grouped_cpu():
    try:
        return aten._grouped_mm.default(T(8, 16, dtype=BF16), T(3, 16, 8, dtype=BF16), OFFS) is not None
    except (RuntimeError, NotImplementedError):
        return False


@pytest.mark.skipif(not _grouped_cpu(), reason="this torch has no grouped product on CPU")
@pytest.mark.parametrize(
    ("shapes", "free"),
    [(((8, 16), (3, 16, 8)), 2), (((3, 8, 16), (16, 8)), 2), (((8, 8), (8, 16)), 2), (((3, 8, 16), (3, 16, 8)), 4)],
)
def test_grouped_product(shapes, free):
    a, b = (T(*s, dtype=BF16) for s in shapes)
    args = (a, b) if len(shapes[0]) == len(shapes[1]) == 3 else (a, b, OFFS)
    assert check_call(aten._grouped_mm.default, args, rtol=0.05, atol=0.1) == count(free, 2)


def test_grouped_product_of_transformers():
    """Found by name: the package need not be imported by the rules."""
    pytest.importorskip("transformers.integrations.moe")
    ops = torch.ops.transformers
    args = (T(8, 6), T(3, 6, 4), OFFS)
    assert check_call(ops.grouped_mm_fallback.default, args) == count(2, 2)
    assert check_call(ops.grouped_mm_fallback_backward.default, (*args, T(8, 4))) == count(2, 1)


def test_mean_of_half_precision_does_not_overflow():
    x = torch.full((6, 4), 30000.0, dtype=torch.float16)
    assert check_call(aten.mean.default, (x,), rtol=1e-2, ranks=(2,)) > 0


def test_widened_half_precision_stays_a_sum():
    args = (T(5, 3, dtype=BF16),)
    assert check_call(aten._to_copy.default, args, {"dtype": torch.float32}, rtol=0.05, atol=0.05) == count(2, 1)


def test_view_of_strides_that_allow_none():
    """The graph was captured on strides that allow the view; a rank's local tensor need not have them."""
    x = T(4, 3, 2).transpose(0, 1).contiguous().transpose(0, 1).transpose(0, 1)
    call = Call(aten.view.default, (x, [12, 2]), {}, x.view(12, 2))
    split = Split(plain_shape(rule_of(call), call))
    other = T(4, 3, 2).transpose(0, 1)
    target, args, kwargs = split.localize(call, (other, [12, 2]), {}, Mesh(x=2, device="cpu"), 0)
    assert torch.equal(target(*args, **kwargs), other.reshape(12, 2))


def test_as_strided_reads_the_captured_strides():
    x = T(3, 4).t()
    call = Call(aten.as_strided.default, (x, [2, 2], [4, 1], 1), {}, x.as_strided([2, 2], [4, 1], 1))
    split = Split(plain_shape(rule_of(call), call))
    args = (x.contiguous(), [2, 2], [4, 1], 1)
    target, args, kwargs = split.localize(call, args, {}, Mesh(x=2, device="cpu"), 0)
    assert torch.equal(target(*args, **kwargs), call.output)


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def reshapes(draw):
    """Two shapes of as many elements."""
    sizes = draw(SIZES)
    out, rest = [], math.prod(sizes)
    while rest > 1:
        out.append(draw(st.sampled_from([d for d in (2, 3, 4, 5, 6, 8, 12) if rest % d == 0])))
        rest //= out[-1]
    return sizes, out or [1]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(reshapes())
def test_any_reshape(shapes):
    sizes, out = shapes
    check_call(aten.view.default, (T(*sizes), out), ranks=(3,))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(size=st.integers(1, 12), start=st.integers(-14, 14), end=st.integers(-14, 14), step=st.integers(1, 4))
def test_any_slice(size, start, end, step):
    x = T(size, 3)
    y = aten.slice.Tensor(x, 0, start, end, step)
    check_call(aten.slice.Tensor, (x, 0, start, end, step))
    check_call(aten.slice_backward.default, (y.clone(), [size, 3], 0, start, end, step), ranks=(2,))
    check_call(aten.slice_scatter.default, (x, y.clone(), 0, start, end, step), ranks=(2,))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_any_split_and_cat(sizes):
    check_call(aten.split_with_sizes.default, (T(sum(sizes), 3), sizes))
    check_call(aten.cat.default, ([T(n, 3) for n in sizes],))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=SIZES, ones=st.lists(st.booleans(), min_size=4, max_size=4), drop=st.integers(0, 4))
def test_any_broadcast(shape, ones, drop):
    other = [1 if one else n for n, one in zip(shape, ones, strict=False)][drop:]
    check_call(aten.mul.Tensor, (T(*shape), T(*other)))
    check_call(aten.expand.default, (T(*other), shape), ranks=(2,))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=SIZES, dims=st.sets(st.integers(0, 3)), keep=st.booleans())
def test_any_reduction(shape, dims, keep):
    listed = [d for d in dims if d < len(shape)]
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
        check_call(op, (T(*shape), listed, keep), ranks=(2,))
