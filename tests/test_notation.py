"""Factor notation and what it says of a call."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.rules.dims import dims_of, fitted, whole_rule
from meshwright.partitioner.rules.every import has_rule, rule_of
from meshwright.partitioner.rules.notation import Rule, rule
from meshwright.partitioner.rules.split import Call, Split, factor_sizes, plain_shape
from meshwright.partitioner.rules.table import merged, on
from meshwright.partitioner.rules.views import Refinement
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten


def mm_call(m=4, k=6, n=5):
    a, b = torch.ones(m, k), torch.ones(k, n)
    return Call(aten.mm.default, (a, b), {}, a @ b)


def test_a_line_reads_as_written():
    got = rule("b (h d) k!, _, k n -> b h 1 {k d|max}, -", linear="0 1, 2", ordered="b")
    assert got.inputs == ((("b",), ("h", "d"), ("k",)), (), (("k",), ("n",)))
    assert got.outputs == ((("b",), ("h",), ()), None)
    assert got.sums == ({"k": "sum", "d": "max"}, {})
    assert got.whole == {"k"} and got.ordered == {"b"}
    assert got.linear == (frozenset({0, 1}), frozenset({2}))
    assert got.factors == ("b", "h", "d", "k", "n")


def test_a_line_without_arrow_is_refused():
    with pytest.raises(ValueError, match="no '->'"):
        rule("m k, k n")


def test_layouts_of_a_split_product():
    call = mm_call()
    split = Split(plain_shape(rule_of(call), call), axes={("k", 0): ("tp",), ("m", 0): ("dp",)})
    assert str(split.input_layout(0)) == "[4:dp, 6:tp]"
    assert str(split.input_layout(1)) == "[6:tp, 5]"
    assert str(split.output_layout()) == "[4:dp, 5] +tp"


def test_layouts_of_a_partial_operand():
    call = mm_call()
    split = Split(plain_shape(rule_of(call), call), partial={"tp": 1})
    assert str(split.input_layout(1)) == "[6, 5] +tp" and str(split.output_layout()) == "[4, 5] +tp"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m k, j n -> m n {k}", "'j'|not"),
        ("m, k n -> m n", "gives 1 dims"),
        ("m k, m n -> m n", "as 4 and as 6"),
        ("(a b) k, k n -> (a b) n", "open"),
    ],
)
def test_a_rule_that_does_not_fit_says_so(line, words):
    call = mm_call()
    if "j" in line:
        assert factor_sizes(rule(line), call)["j"] == 6
        return
    with pytest.raises(ValueError, match=words):
        factor_sizes(rule(line), call)


def test_factors_of_size_one_drop_out():
    got = rule_of(mm_call(m=1, k=1))
    assert got.inputs == (((), ()), ((), ("n",))) and got.outputs == (((), ("n",)),)
    assert got.sums == ({},)


def test_an_unknown_op_is_whole_and_says_so():
    x = torch.ones(3, 3)
    call = Call(aten.linalg_inv_ex.default, (torch.eye(3),), {}, aten.linalg_inv_ex.default(torch.eye(3)))
    assert not has_rule(call.target)
    got = rule_of(call)
    assert got.whole == set(got.factors) and "no sharding rule for aten::linalg_inv_ex" in got.note
    number = Call(aten._local_scalar_dense.default, (x.sum(),), {}, 9.0)
    assert rule_of(number).outputs == (None,)


def test_pointwise_by_tag():
    assert has_rule(aten.erf.default) and not has_rule(aten.linalg_inv_ex.default)
    x = torch.ones(3, 1)
    got = rule_of(Call(aten.atan2.default, (x, torch.ones(5)), {}, torch.atan2(x, torch.ones(5))))
    assert got.inputs == ((("d0",), ()), (("d1",),)) and got.outputs == ((("d0",), ("d1",)),)


def test_two_rules_for_an_op_are_refused():
    one, two = {}, {}
    for table in (one, two):
        on(table, aten.erf.default)(lambda call: whole_rule(call))
    with pytest.raises(ValueError, match="two rules for"):
        on(one, aten.erf.default)(lambda call: whole_rule(call))
    with pytest.raises(ValueError, match="two rules for"):
        merged((one, two))


def test_reductions_name_dims_from_the_front():
    assert dims_of(None, 3) == dims_of([], 3) == (0, 1, 2)
    assert dims_of([-1, 0], 3) == (0, 2) and dims_of(-2, 3) == (1,) and dims_of([-1], 0) == ()


def _depends_on_data():
    """A tensor whose first dim is known only when it runs."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        rows = torch.nonzero(torch.ones(6))
        return mode, rows, torch.ones(6, 4).index_select(0, rows[:, 0])


@pytest.mark.parametrize(
    ("op", "more", "free"),
    [
        (aten.neg.default, (), {"d1"}),
        (aten.mul.Tensor, (torch.ones(4),), {"d1"}),
        (aten.sum.dim_IntList, ([0],), {"d1"}),
        (aten.mean.dim, ([0],), {"d1"}),
        (aten.amax.default, ([0],), {"d1"}),
        (aten.t.default, (), {"d1"}),
        (aten.unsqueeze.default, (1,), {"d1"}),
        (aten.squeeze.dim, (1,), {"d1"}),
        (aten.view.default, ([-1, 2, 2],), set()),
        (aten.slice.Tensor, (1, 0, 2), {"r"}),
        (aten.select.int, (1, 0), set()),
        (aten.zeros_like.default, (), {"d1"}),
        (aten.new_zeros.default, ([3],), {"x1", "d0"}),
        (aten.mm.default, (torch.ones(4, 3),), {"k", "n"}),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",  # sets print in another order in each process
)
def test_sizes_that_depend_on_data_are_whole(op, more, free):
    mode, _, x = _depends_on_data()
    with mode:
        args = (x, *(mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in more))
        call = Call(op, args, {}, op(*args))
    got = rule_of(call)
    assert set(got.factors) - got.whole == free
    split = Split(plain_shape(got, call), axes={(f, 0): ("x",) for f in sorted(free)[:1]})
    target, local, kwargs = split.localize(call, args, {}, Mesh(x=2, device="cpu"), 1)
    assert callable(target) and local[0] is x and kwargs == call.kwargs


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.sampled_from((1, 2, 3, 4, 6, 10, 12)), min_size=1, max_size=4), data=st.data())
def test_a_refinement_is_one_list_of_factors(sizes, data):
    out, rest = [], math.prod(sizes)
    while rest > 1:
        out.append(data.draw(st.sampled_from([d for d in (2, 3, 4, 5, 6, 8, 12) if rest % d == 0])))
        rest //= out[-1]
    fine = Refinement((tuple(sizes), tuple(out)))
    shared = [[f for dim in fine.dims(side) for f in dim if f not in fine.whole] for side in (0, 1)]
    assert shared[0] == shared[1]
    for side, shape in enumerate((sizes, out)):
        assert [math.prod(fine.sizes[f] for f in dim) for dim in fine.dims(side)] == list(shape)


def test_fitting_keeps_a_rule_that_has_nothing_to_drop():
    line: Rule = rule("m k, k n -> m n {k}")
    assert fitted(line, mm_call()) is line
