"""Lookups and writes by index. An indexed dim may be split where one index tensor reaches it: each rank serves the
indices it holds and gives zeros for the others, so the results are partial sums."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.embedding import embedding_rows, embedding_rows_backward
from . import masked
from .dims import additive, argument, bound, dim_of, names, plain, replaced, unit, whole_rule
from .lead import own_whole
from .notation import Dims, Local, Rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}

Made = tuple[Any, tuple, dict]


def _cut(local: Local, operand: int, dim: int) -> bool:
    """This rank holds only part of a dim of an operand."""
    return local.in_shape(operand)[dim] != local.whole_shape(operand)[dim]


@on(TABLE, aten.embedding.default)
def embedding(call: Call) -> Rule:
    """`v d, i -> i d {v}`."""
    weight, ids = call.operands
    i = names(ids.shape, "i")

    def localize(local: Local) -> Made:
        if not _cut(local, 0, 0):
            return local.target, local.args, local.kwargs
        return embedding_rows, (local.args[0], local.args[1], local.start("v"), local.whole_shape(0)[0]), {}

    return Rule(
        ((("v",), ("d",)), i),
        ((*i, ("d",)),),
        ({"v": "sum"},),
        ordered=frozenset({"v"}),
        linear=additive(call, {0}),
        localize=localize,
    )


@on(TABLE, aten.embedding_dense_backward.default)
def embedding_backward(call: Call) -> Rule:
    """`i d, i -> v d {i}`; with gradients scaled by frequency the ids stay whole."""
    ids = call.operands[1]
    i = names(ids.shape, "i")
    a = bound(call)
    rows = frozenset(f for d in i for f in d)

    def localize(local: Local) -> Made:
        num = local.out_shape()[0]
        if num == a["num_weights"]:
            return local.target, local.args, local.kwargs
        args = (*local.args[:2], num, a["padding_idx"], a["scale_grad_by_freq"], local.start("v"))
        return embedding_rows_backward, args, {}

    return Rule(
        ((*i, ("d",)), i),
        ((("v",), ("d",)),),
        ({f: "sum" for f in rows},),
        whole=rows if a["scale_grad_by_freq"] else frozenset(),
        ordered=frozenset({"v"}),
        linear=additive(call, {0}),
        localize=localize,
    )


class Indexing:
    """How an indexed tensor is laid out: `self[indices]` in torch's (and numpy's) advanced indexing.

    Attributes:
        at: the indexed dims of self.
        own: dims of self; an indexed one is factor `x<dim>`, the others `d<dim>`.
        ids: per index tensor, its dims: factors `n<j>` of the broadcast index shape.
        result, result_shape: dims and sizes of the result.
    """

    def __init__(self, tensor: torch.Tensor, indices: list[Any]):
        self.at = [i for i, x in enumerate(indices) if x is not None]
        given = [indices[i] for i in self.at]
        self.shape = tuple(torch.broadcast_shapes(*(x.shape for x in given)))
        index = names(self.shape, "n")
        self.own: Dims = names(tensor.shape)
        self.ids = [_aligned(x.shape, self.shape, index) for x in given]
        rest = [d for i, d in enumerate(self.own) if i not in self.at]
        adjacent = self.at[-1] - self.at[0] + 1 == len(self.at)
        place = self.at[0] if adjacent else 0
        self.result: Dims = tuple(rest[:place]) + index + tuple(rest[place:])
        sizes = tuple(n for i, n in enumerate(tensor.shape) if i not in self.at)
        self.result_shape = sizes[:place] + self.shape + sizes[place:]
        for i in self.at:
            self.own = replaced(self.own, i, (f"x{i}",))
        self.index_factors = frozenset(f for d in index for f in d)
        self.indexed = frozenset(f"x{i}" for i in self.at)

    @property
    def single(self) -> bool:
        return len(self.at) == 1


def _aligned(shape: Any, full: tuple[Any, ...], dims: Dims) -> Dims:
    """Dims of a tensor that broadcasts to `full`, whose dims are `dims`."""
    tail = dims[len(full) - len(shape) :] if shape else ()
    return tuple(() if unit(n) else d for n, d in zip(shape, tail, strict=True))


def _by_mask(call: Call) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in call.args[1])


@on(TABLE, aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> Rule:
    """`a x b, n -> a n b {x}`; with several index tensors the indexed dims are whole."""
    if _by_mask(call) or not call.args[1]:
        return whole_rule(call, note="indexing by a mask gives a size that depends on the data")
    form = Indexing(call.args[0], list(call.args[1]))
    number = call.output.dtype != torch.bool

    def localize(local: Local) -> Made:
        at = form.at[0]
        if not form.single or not _cut(local, 0, at):
            return local.target, local.args, local.kwargs
        size = local.whole_shape(0)[at]
        return masked.take_rows, (local.args[0], at, local.args[1][at], local.start(f"x{at}"), size, -size), {}

    split = form.single and number
    return Rule(
        (form.own, *form.ids),
        (form.result,),
        ({f: "sum" for f in form.indexed} if split else {},),
        whole=frozenset() if split else form.indexed,
        ordered=form.indexed if split else frozenset(),
        linear=additive(call, {0}),
        localize=localize,
    )


@on(TABLE, aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: Call) -> Rule:
    """`a x b, n, a n b -> a x b`, plus `{n}` when values are added: self then counts on one rank only."""
    if _by_mask(call) or not call.args[1]:
        return whole_rule(call, note="a write by mask reads its values in the mask's order")
    form = Indexing(call.args[0], list(call.args[1]))
    values, add = call.args[2], bound(call)["accumulate"]

    def localize(local: Local) -> Made:
        first = not add or not any(local.start(f) for f in form.index_factors)
        at = form.at[0]
        if form.single and _cut(local, 0, at):
            size = local.whole_shape(0)[at]
            args = (local.args[0], at, local.args[1][at], local.args[2], local.start(f"x{at}"), size, add, first)
            return masked.put_rows, args, {}
        if first:
            return local.target, local.args, local.kwargs
        return masked.put_added, local.args, local.kwargs

    numbers = call.output.dtype != torch.bool
    adds = add and numbers
    return Rule(
        (form.own, *form.ids, _aligned(values.shape, form.result_shape, form.result)),
        (form.own,),
        ({f: "sum" for f in form.index_factors} if adds else {},),
        whole=(frozenset() if form.single else form.indexed) | (frozenset() if adds else form.index_factors),
        ordered=(form.indexed if form.single else frozenset()) | (form.index_factors if adds else frozenset()),
        linear=additive(call, {0, len(call.operands) - 1}) if add else (),
        localize=localize,
    )


@on(TABLE, aten.index_select.default)
def index_select(call: Call) -> Rule:
    """`a x b, n -> a n b {x}`."""
    x = call.operands[0]
    dim = dim_of(bound(call)["dim"], x.dim())
    if not x.dim():
        return whole_rule(call)
    own = replaced(names(x.shape), dim, ("x",))
    number = x.dtype != torch.bool

    def localize(local: Local) -> Made:
        if not _cut(local, 0, dim):
            return local.target, local.args, local.kwargs
        ids = argument(local, "index")
        return masked.take_rows, (local.args[0], dim, ids, local.start("x"), local.whole_shape(0)[dim]), {}

    return Rule(
        (own, (("n",),) * call.operands[1].dim()),
        (replaced(own, dim, ("n",)),),
        ({"x": "sum"} if number else {},),
        whole=frozenset() if number else frozenset({"x"}),
        ordered=frozenset({"x"}),
        linear=additive(call, {0}),
        localize=localize,
    )


@on(TABLE, aten.index_add.default)
def index_add(call: Call) -> Rule:
    """`a x b, n, a n b -> a x b {n}`; self counts on the first rank of n only."""
    x, ids = call.operands[:2]
    if not x.dim() or x.dtype == torch.bool:
        return whole_rule(call)
    dim = dim_of(bound(call)["dim"], x.dim())
    own = replaced(names(x.shape), dim, ("x",))

    def localize(local: Local) -> Made:
        first = local.start("n") == 0
        if _cut(local, 0, dim):
            size, index = local.whole_shape(0)[dim], argument(local, "index")
            args = (index, argument(local, "source"), local.start("x"), size, argument(local, "alpha"))
            return masked.add_rows, (local.args[0], dim, *args, first), {}
        if first:
            return local.target, local.args, local.kwargs
        return masked.index_added, local.args, local.kwargs

    return Rule(
        (own, (("n",),) * ids.dim(), replaced(own, dim, ("n",))),
        (own,),
        ({"n": "sum"},),
        ordered=frozenset({"x", "n"}),
        linear=additive(call, {0, 2}),
        localize=localize,
    )


@on(TABLE, aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_write(call: Call) -> Rule:
    """`a x! b, n!, a n! b -> a x! b`."""
    x = call.operands[0]
    if not x.dim():
        return whole_rule(call)
    dim = dim_of(bound(call)["dim"], x.dim())
    own = replaced(names(x.shape), dim, ("x",))
    more = tuple(replaced(own, dim, ("n",)) if t.dim() == x.dim() and t.dim() > 1 else (("n",),) * t.dim()
                 for t in call.operands[2:])
    return Rule((own, (("n",),) * call.operands[1].dim(), *more), (own,), whole=frozenset({"x", "n"}))


def _along(call: Call) -> tuple[int, Dims, Dims, frozenset[str]]:
    """For gather and scatter: the dim, self's dims, the index's dims, and the factors that are whole.

    A dim in which index is shorter than self reads (or writes) only self's first rows: whole on both sides.
    """
    tensors = call.operands
    x, ids = tensors[:2]
    dim = dim_of(bound(call)["dim"], x.dim())
    own, index_dims = [], []
    whole = set()
    for i, (m, n) in enumerate(zip(x.shape, ids.shape, strict=True)):
        sizes = [n, *(t.shape[i] for t in tensors[2:])]
        same = plain(m, *sizes) and len(set(sizes)) == 1
        if i == dim:
            own.append(("x",))
            index_dims.append(("n",))
        elif same and m == n:
            own.append((f"d{i}",))
            index_dims.append((f"d{i}",))
        else:
            own.append((f"s{i}",))
            index_dims.append((f"t{i}",))
            whole |= {f"s{i}", f"t{i}"}
    return dim, tuple(own), tuple(index_dims), frozenset(whole)


@on(TABLE, aten.gather.default)
def gather(call: Call) -> Rule:
    """`a x b, a n b -> a n b {x}`."""
    if not call.operands[0].dim() or call.operands[1].dim() != call.operands[0].dim():
        return whole_rule(call)
    dim, own, ids, whole = _along(call)
    number = call.output.dtype != torch.bool

    def localize(local: Local) -> Made:
        if not _cut(local, 0, dim):
            return local.target, local.args, local.kwargs
        ids = argument(local, "index")
        return masked.gather_rows, (local.args[0], dim, ids, local.start("x"), local.whole_shape(0)[dim]), {}

    return Rule(
        (own, ids),
        (ids,),
        ({"x": "sum"} if number else {},),
        whole=whole if number else whole | {"x"},
        ordered=frozenset({"x"}) if number else frozenset(),
        linear=additive(call, {0}),
        localize=localize,
    )


_ADDING = (aten.scatter_add.default,)


@on(TABLE, aten.scatter.src, aten.scatter.value, *_ADDING)
def scatter(call: Call) -> Rule:
    """`a x b, a n b, a n b -> a x b`, n whole; a scatter_add sums over n, self counting on its first rank."""
    x, ids = call.operands[:2]
    if not x.dim() or ids.dim() != x.dim():
        return whole_rule(call)
    dim, own, index_dims, whole = _along(call)
    add = call.target in _ADDING and x.dtype != torch.bool
    sources, more = _sources(call, dim, index_dims)
    whole |= more
    if not add or more:
        whole |= {"n"}

    def localize(local: Local) -> Made:
        first = "n" in whole or local.start("n") == 0
        if _cut(local, 0, dim):
            at = (local.start("x"), local.whole_shape(0)[dim])
            args = (local.args[0], dim, argument(local, "index"), local.args[3], *at, add, first)
            return masked.scatter_rows, args, {}
        if first:
            return local.target, local.args, local.kwargs
        return masked.scatter_added, local.args, local.kwargs

    linear: tuple[frozenset[int], ...] = ()
    if len(call.operands) == 3:
        linear = additive(call, {0, 2})
    positional = len(call.args) > 3
    return Rule(
        (own, index_dims, *sources),
        (own,),
        ({"n": "sum"} if "n" not in whole else {},),
        whole=whole if positional else whole | {"x", "n"},
        ordered=frozenset({"x", "n"}) - whole,
        linear=linear,
        localize=localize,
    )


def _sources(call: Call, dim: int, index_dims: Dims) -> tuple[list[Dims], frozenset[str]]:
    """Dims of scatter's source: the index's own where sizes agree, else whole ones."""
    out, whole = [], frozenset()
    for src in call.operands[2:]:
        dims, own = own_whole(src.shape, "r")
        same = [plain(a, b) and a == b for a, b in zip(src.shape, call.operands[1].shape, strict=True)]
        dims = tuple(i if ok else d for i, ok, d in zip(index_dims, same, dims, strict=True))
        out.append(dims)
        whole |= frozenset(f for d in dims for f in d) & own
    return out, whole


@on(TABLE, aten.scatter_reduce.two, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_reduce(call: Call) -> Rule:
    """`a x! b, a n! b, a n! b -> a x! b`."""
    if not call.operands[0].dim() or call.operands[1].dim() != call.operands[0].dim():
        return whole_rule(call)
    dim, own, index_dims, whole = _along(call)
    sources, more = _sources(call, dim, index_dims)
    return Rule((own, index_dims, *sources), (own,), whole=whole | more | {"x", "n"})


@on(TABLE, aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(call: Call) -> Rule:
    """`v! d, i!, ... -> o! d`: the columns are free, save where a maximum is taken; its helpers are whole."""
    if bound(call)["mode"] == 2:
        return whole_rule(call, note="embedding_bag by maximum")
    rule = whole_rule(call)
    columns = (rule.inputs[0][0], ("d",))
    out = (rule.outputs[0][0], ("d",)) if rule.outputs[0] else None
    return rule.but(inputs=(columns, *rule.inputs[1:]), outputs=(out, *rule.outputs[1:]), whole=rule.whole - {"i0_1"})


@on(TABLE, aten._embedding_bag_backward.default)
def embedding_bag_backward(call: Call) -> Rule:
    return whole_rule(call, note="the gradient of embedding_bag")


@on(TABLE, aten._unsafe_masked_index.default, aten._unsafe_masked_index_put_accumulate.default)
def masked_index(call: Call) -> Rule:
    return whole_rule(call, note="indexing under a mask")
