"""A residual added and the norm of the sum become one op, forward and backward (`kernels/add_norm.py`).

    h = x + r;  y, statistics = norm(h)                    ->  y, h, statistics = add_norm(x, r)
    d = norm_backward(gy, h, statistics)[0];  d + gh       ->  add_norm_backward(gy, gh, h, statistics)

Only where the sum is made by the module that holds the norm: the sum that ends a block and the norm that begins the
next stay two ops, since a stage may end between them, and one op could not be on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any

import torch
import torch.fx as fx

from ..kernels import add_norm as _registers_the_ops  # noqa: F401

aten = torch.ops.aten
mw = torch.ops.meshwright
Make = Callable[..., fx.Node]
"""(graph, node to stand before, target, args) -> the call, its value made."""

_KINDS: dict[Any, tuple[str, Any, Any, Any]] = {
    mw.rms_norm.default: (
        "residual + rms norm",
        mw.add_rms_norm.default,
        mw.rms_norm_backward.default,
        mw.add_rms_norm_backward.default,
    ),
    aten.native_layer_norm.default: (
        "residual + layer norm",
        mw.add_layer_norm.default,
        aten.native_layer_norm_backward.default,
        mw.add_layer_norm_backward.default,
    ),
}


def fuse_norm(graph: fx.Graph, norm: fx.Node, make: Make) -> str:
    """Fuse a norm with the sum it reads, in place. What was fused, "KIND not fused: REASON", or ""."""
    if norm.target not in _KINDS:
        return ""
    kind, forward, backward, both = _KINDS[norm.target]
    total: Any = norm.args[0]
    if total.target is aten._to_copy.default and _is_sum(total.args[0]):
        return f"{kind} not fused: the sum is cast to another dtype before"
    if total.target is getitem and "residual" in total.args[0].kwargs:
        return f"{kind} not fused: the sum is one with its dropout"
    if not _is_sum(total):
        return ""
    if _parent(norm) != (total.meta.get("module") or ""):
        return f"{kind} not fused: the sum is another module's"
    if any(u < norm for u in total.users):
        return f"{kind} not fused: the sum is read before"
    backs = [u for u in total.users if u.target is backward and u.args[1] is total]
    if any(_masked(b) for b in backs):
        return f"{kind} not fused: not all of its gradients are made"
    made = make(graph, norm, forward, (*total.args, *norm.args[1:]))
    y, h, *statistics = _items(graph, norm, made, range(len(made.meta["val"])))
    for item in list(norm.users):
        place: Any = item.args[1]
        item.replace_all_uses_with((y, *statistics)[place])
    total.replace_all_uses_with(h)
    for back in backs:
        _fuse_backward(graph, back, both, make)
    return kind


def _is_sum(node: Any) -> bool:
    """Of two tensors of its own shape and dtype, made in forward."""
    plain = node.target is aten.add.Tensor and not node.kwargs and not node.meta.get("backward")
    return plain and _same(node, *node.args)


def _same(*nodes: Any) -> bool:
    vals = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in nodes]
    return all(isinstance(v, torch.Tensor) and (v.shape, v.dtype) == (vals[0].shape, vals[0].dtype) for v in vals)  # type: ignore[union-attr]


def _parent(norm: fx.Node) -> str:
    return (norm.meta.get("module") or "").rpartition(".")[0]


def _masked(back: fx.Node) -> bool:
    """Whether a layer norm's backward leaves a gradient out that ours makes."""
    if back.target is not aten.native_layer_norm_backward.default:
        return False
    weight, bias, mask = back.args[5:8]
    return not all(m for m, there in zip(mask, (True, weight, bias), strict=True) if there is not None)  # type: ignore[arg-type]


def _items(graph: fx.Graph, before: fx.Node, made: fx.Node, places: Iterable[int]) -> list[fx.Node]:
    out = []
    for i in places:
        with graph.inserting_before(before):
            item = graph.call_function(getitem, (made, i))
        item.meta = dict(made.meta, val=made.meta["val"][i])
        out.append(item)
    return out


def _fuse_backward(graph: fx.Graph, back: fx.Node, both: Any, make: Make) -> None:
    """The op's backward in place of the norm's, and of the sum of its gradient with the residual's where there is
    one."""
    items = {u.args[1]: u for u in back.users}
    added, other = _added(back, items.get(0))
    rest = back.args[2:7] if back.target is aten.native_layer_norm_backward.default else back.args[2:]
    made = make(graph, back, both, (back.args[0], other, back.args[1], *rest))
    for i, old in items.items():
        (item,) = _items(graph, back, made, (i,))  # type: ignore[arg-type]
        (added if i == 0 and added is not None else old).replace_all_uses_with(item)


def _added(back: fx.Node, dx: fx.Node | None) -> tuple[fx.Node | None, Any]:
    """The sum of dx with another gradient that is there before, and that gradient."""
    if dx is None or len(dx.users) != 1:
        return None, None
    added = next(iter(dx.users))
    if added.target is not aten.add.Tensor or added.kwargs or not _same(dx, added, *added.args):
        return None, None
    other: Any = added.args[1] if added.args[0] is dx else added.args[0]
    return (added, other) if other is not dx and other < back else (None, None)
