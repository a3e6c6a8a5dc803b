"""Chains of ops in a captured graph that become one op, forward and backward; each reads and keeps less memory.

    gated      act(gate) * up, act one of silu, gelu            -> kernels/gated.py, and its three backward ops to one
    residual   dropout(x) + residual                            -> `random.dropout` with its residual
    norm       a norm of x + residual, forward and backward     -> kernels/add_norm.py (`fuse_norm.py`)

Norms and activations that models write out by hand are found before tracing (`known.py`). `auto` fuses where the
device has kernels for it: on a CPU the forms in torch make in backward what they do not keep.
"""

from __future__ import annotations

from collections import Counter
from operator import getitem
from typing import Any

import torch
import torch.fx as fx

from ..kernels import gated as _registers_the_ops  # noqa: F401
from ..kernels import random
from .fuse_norm import fuse_norm

aten = torch.ops.aten
mw = torch.ops.meshwright
NOT = "not fused"
_ACTS: dict[Any, str] = {aten.silu.default: "silu", aten.gelu.default: "gelu"}
_ACTS_BACKWARD = {"silu": aten.silu_backward.default, "gelu": aten.gelu_backward.default}


def wanted(fuse: str, device: str) -> bool:
    """Whether the chains of a program for such a device are fused. Args: fuse: "auto", "none" or "all"."""
    return fuse == "all" or (fuse == "auto" and device != "cpu")


def fuse(graph: fx.Graph) -> Counter[str]:
    """Fuse what there is, in place; how often each kind was, and as "KIND not fused: REASON" how often one was not."""
    found: Counter[str] = Counter()
    for node in list(graph.nodes):
        if node.op != "call_function" or node.meta.get("backward"):
            continue
        said = _gated(graph, node) or _residual(graph, node) or fuse_norm(graph, node, _call)
        if said:
            found[said] += 1
    graph.eliminate_dead_code()
    graph.lint()
    return found


def notes_of(found: Counter[str]) -> tuple[str, ...]:
    """What the plan says of it: what was fused, and what was not and why."""
    said = [f"{n} x {kind}" for kind, n in sorted(found.items())]
    done, left = [s for s in said if NOT not in s], [s for s in said if NOT in s]
    return (*([f"fused: {', '.join(done)}"] if done else []), *left)


def _same(*nodes: Any) -> bool:
    """Tensors of one shape and dtype."""
    vals = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in nodes]
    if not all(isinstance(v, torch.Tensor) for v in vals):
        return False
    return len({(tuple(v.shape), v.dtype) for v in vals if v is not None}) == 1


def _gated(graph: fx.Graph, y: fx.Node) -> str:
    if y.target is not aten.mul.Tensor:
        return ""
    for s, up in (y.args[:2], y.args[1::-1]):
        if isinstance(s, fx.Node) and s.target in _ACTS and s is not up and _same(s, up):
            assert isinstance(up, fx.Node)
            return _fuse_gated(graph, y, s, up)
    return ""


def _fuse_gated(graph: fx.Graph, y: fx.Node, s: fx.Node, up: fx.Node) -> str:
    kind = _ACTS[s.target]
    name = "swiglu" if kind == "silu" else "geglu"
    gate: Any = s.args[0]
    if not _same(gate, s):
        return ""
    later = [u for u in s.users if u is not y]
    back = _backward_of(y, s, up, gate, kind, later)
    if back is None:
        return f"{name} {NOT}: its parts have other readers"
    act = kind + ("_tanh" if s.kwargs.get("approximate") == "tanh" else "")
    made = _call(graph, y, mw.gated.default, (gate, up, act))
    y.replace_all_uses_with(made)
    graph.erase_node(y)
    if back:
        dgate, dup, ds = back
        first = min(ds, dup, key=list(graph.nodes).index)
        both = _call(graph, first, mw.gated_backward.default, (_other(dup, s), gate, up, act), like=dgate)
        for i, old in enumerate((dgate, dup)):
            with graph.inserting_before(first):
                item = graph.call_function(getitem, (both, i))
            item.meta = dict(old.meta, val=both.meta["val"][i])
            old.replace_all_uses_with(item)
    return name


def _backward_of(
    y: fx.Node, s: fx.Node, up: fx.Node, gate: fx.Node, kind: str, later: list[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node] | tuple[()] | None:
    """(gate's gradient, up's, the product before the activation's backward); () where there is no backward; None where
    it is not these three."""
    if not later:
        return () if not any(u.target is _ACTS_BACKWARD[kind] for u in gate.users) else None
    if len(later) != 1 or not _product(later[0]) or not later[0].meta.get("backward"):
        return None
    dup = later[0]
    grad = _other(dup, s)
    for ds in up.users:
        if ds is y or not _product(ds) or _other(ds, up) is not grad or len(ds.users) != 1:
            continue
        dgate = next(iter(ds.users))
        if dgate.target is _ACTS_BACKWARD[kind] and dgate.args[:2] == (ds, gate) and _same(grad, gate, up):
            return dgate, dup, ds
    return None


def _product(node: fx.Node) -> bool:
    return node.target is aten.mul.Tensor and all(isinstance(a, fx.Node) for a in node.args)


def _other(product: fx.Node, one: fx.Node) -> Any:
    return product.args[1] if product.args[0] is one else product.args[0]


def _residual(graph: fx.Graph, y: fx.Node) -> str:
    if y.target is not aten.add.Tensor or y.kwargs or len(y.args) != 2:
        return ""
    for item, residual in (y.args, y.args[::-1]):
        if not isinstance(item, fx.Node) or item.target is not getitem or item is residual or not _same(item, residual):
            continue
        drop: Any = item.args[0]
        if item.args[1] != 0 or drop.target is not random.dropout or "residual" in drop.kwargs:
            continue
        masks = [u for part in drop.users if part is not item for u in part.users]
        if len(item.users) != 1 or any(not u.meta.get("backward") for u in masks):
            return f"dropout + residual {NOT}: what was dropped has other readers"
        made = _call(graph, y, random.dropout, drop.args, {**drop.kwargs, "residual": residual}, like=drop)
        for old in list(drop.users):
            with graph.inserting_before(y):
                part = graph.call_function(getitem, (made, old.args[1]))
            part.meta = dict(old.meta)
            (y if old is item else old).replace_all_uses_with(part)
        graph.erase_node(y)
        return "dropout + residual"
    return ""


def _call(graph: fx.Graph, before: fx.Node, target: Any, args: Any, kwargs: Any = None, like: Any = None) -> fx.Node:
    """A call with the meta of `like` (or of the node it stands before), its value made on fake tensors."""
    like = like or before
    with graph.inserting_before(before):
        made = graph.call_function(target, tuple(args), kwargs or {})
    made.meta = dict(like.meta)
    if target is not random.dropout:
        vals: Any = fx.map_arg(made.args, lambda n: n.meta["val"])
        mode = next(v.fake_mode for v in vals if hasattr(v, "fake_mode"))
        with mode, torch.no_grad():
            made.meta["val"] = target(*vals)
    return made
