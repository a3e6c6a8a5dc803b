"""The last linear layer, its cross entropy and the gradients of both as one call, where the logits are large.

Before:  z = mm(x, t(w)); nll = nll(z, target); ...; dz = nll_backward(g, z, ...); dx = mm(dz, w); dw = mm(t(dz), x)
After:   nll, dx, dw, _ = linear_nll_step(x, w, None, target, g, ...)         a chunk of z exists at a time

Backward may begin with a loss whose gradient g does not depend on its value, so the loss is made with its gradients: it
and all that is made of it move behind the call, on a stage into its backward. This is done in a whole step where all
classes are on one rank (over a split vocabulary the loss is other calls) and one stage, nobody else reads the logits,
and they are large. Whether a rank does so depends on shapes that all ranks have alike.

The logits that backward reads may be those of forward made again; the products that give them are compared by what
they are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
import torch.fx as fx

from ..kernels.cross_entropy import wide as dtype_of_sums
from ..partitioner.collective import largest_local
from ..partitioner.program import primitive
from .draft import Draft, resharded

aten = torch.ops.aten
mw = torch.ops.meshwright
_SAME_ORDER = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_CAST = aten._to_copy.default
LEAST_BYTES = 1 << 22
"""Of a rank's logits in the dtype of their sums: from here on it pays."""
_DEPTH = 64
"""How many calls deep two values are compared."""


def chunk_loss(draft: Draft) -> Draft:
    if draft.form == "step":
        for node in list(draft.graph.fx.nodes):
            if node.target is mw.nll_backward.default:
                found = _Finder(draft).match(node)
                if found is not None:
                    _rewrite(draft, found)
    return draft


@dataclass(frozen=True)
class Match:
    """The calls of one loss.

    Attributes:
        x, w, bias: the operands, as backward reads them.
        nll: the losses, a getitem of the forward call, and `backward`, the call that makes dz.
        dx, dw, db: the gradients; None where there is none.
        gone: the calls that made these.
    """

    x: fx.Node
    w: fx.Node
    bias: fx.Node | None
    nll: fx.Node
    backward: fx.Node
    dx: fx.Node | None
    dw: fx.Node | None
    db: fx.Node | None
    gone: frozenset[fx.Node]


class _Finder:
    def __init__(self, draft: Draft):
        self.draft = draft
        self._same: dict[tuple[fx.Node, fx.Node], bool] = {}

    def match(self, backward: fx.Node) -> Match | None:
        given: Any = backward.args
        g, z, target, lse, ignore, start = given
        forward: Any = lse.args[0] if isinstance(lse, fx.Node) and lse.target is getitem else None
        if forward is None or forward.target is not mw.nll.default or start != 0:
            return None
        if not self.same((z, target, ignore), forward.args) or not self._large(z):
            return None
        losses = [n for n in backward.graph.nodes if n.target is mw.nll.default and self.same(n, forward)]
        values = [u for n in losses for u in n.users if u.args[1] == 0]
        chains = [self._product(n) for n in (z, *(n.args[0] for n in losses))]
        if len(values) != 1 or None in chains:
            return None
        product, w = chains[0][0][-1], chains[0][1]  # type: ignore[index]
        made = self._gradients(backward, product, w)
        if made is None:
            return None
        results, between = made
        ends = {n for n in results.values() if n is not None}
        inner = {*between, *losses, *(u for n in losses for u in n.users)}
        inner |= {n for chain in chains for n in chain[0]}  # type: ignore[index]
        if not _only_read_in(inner - set(values), inner | ends) or any(_depends(g, n) for n in losses):
            return None
        later = _made_of(values[0])
        if not self._one_stage(inner | ends | set(later)) or not self._kept(later):
            return None
        dx, dw = results["dx"], results["dw"]
        x = product.args[-2] if dw is None else dw.args[1]
        w = w if dx is None else dx.args[1]
        bias = product.args[0] if product.target is aten.addmm.default else None
        if any(_depends(n, backward) for n in (x, w)):
            return None
        return Match(x, w, bias, values[0], backward, **results, gone=frozenset(inner | ends))  # type: ignore[arg-type]

    def _product(self, z: Any) -> tuple[list[fx.Node], fx.Node] | None:
        """The calls from the logits back to the product that gives them, which is last; and w."""
        chain, shape = [z], z.meta["val"].shape
        while chain[-1].target is _CAST or _keeps_order(chain[-1]):
            chain.append(chain[-1].args[0])
        last = chain[-1]
        if last.target is not aten.mm.default and (last.target is not aten.addmm.default or last.kwargs):
            return None
        layouts = self.draft.layouts
        w = last.args[-1]
        if w.target is not aten.t.default or last.meta["val"].shape != shape or layouts[last] != layouts[z]:
            return None
        narrows = any(a.meta["val"].dtype.itemsize < b.meta["val"].dtype.itemsize for a, b in pairwise(chain))
        return None if narrows else (chain, w.args[0])

    def _gradients(self, backward: fx.Node, product: fx.Node, w: fx.Node) -> Any:
        """({"dx", "dw", "db": what is made of dz}, dz in all its shapes), or None if more is made of it."""
        between = list(_onward(backward))
        found: dict[str, fx.Node | None] = {"dx": None, "dw": None, "db": None}
        x, like = product.args[-2], product.meta["val"]
        for node in between:
            val = node.meta["val"]
            whole = val.shape in (like.shape, like.shape[::-1]) and val.dtype == like.dtype
            for user in [u for u in node.users if u not in between]:
                kind = self._kind(user, node, x, w) if whole else None
                if kind is None or found[kind] is not None:
                    return None
                found[kind] = user
        alone = found["dx"] is found["dw"] is None or (found["db"] and product.target is not aten.addmm.default)
        return None if alone else (found, between)

    def _kind(self, user: fx.Node, dz: fx.Node, x: Any, w: fx.Node) -> str | None:
        turned = dz.target is aten.t.default
        if user.target is aten.mm.default and user.args[0] is dz:
            other = user.args[1]
            if not turned and other is not dz and self.same(other, w):
                return "dx"
            if turned and other is not dz and self.same(other, x):
                return "dw"
        if user.target is aten.sum.dim_IntList and not turned and not user.kwargs:
            return "db" if [*map(_plain, user.args[1:])] == [[0], True] else None
        return None

    def _one_stage(self, nodes: set[fx.Node]) -> bool:
        stages = self.draft.plan.stages
        return stages is None or len({stages.of[n.name] for n in nodes if n.name in stages.of}) < 2

    def _kept(self, nodes: list[fx.Node]) -> bool:
        """Whether backward of a stage may read what these read of forward."""
        plan = self.draft.plan
        read = {x for n in nodes for x in n.all_input_nodes if not x.meta.get("backward")} - set(nodes)
        again = any(resharded(x).name in plan.again for x in read if x.target is primitive)
        return plan.stages is None or not (again or any(x.name in plan.recompute for x in read))

    def _large(self, z: fx.Node) -> bool:
        wide = dtype_of_sums(z.meta["val"].dtype).itemsize
        return largest_local(self.draft.layouts[z], self.draft.mesh) * wide >= LEAST_BYTES

    def same(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether two values are one, or are made of the same by the same calls."""
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return type(a) is type(b) and (
                len(a) == len(b) and all(self.same(p, q, depth) for p, q in zip(a, b, strict=True))
                if isinstance(a, (list, tuple))
                else bool(a == b)
            )
        if a is b:
            return True
        if a.op != "call_function" or a.target is not b.target or depth > _DEPTH or set(a.kwargs) != set(b.kwargs):
            return False
        if (a, b) not in self._same:
            pairs = [*zip(a.args, b.args, strict=False), *((v, b.kwargs[k]) for k, v in a.kwargs.items())]
            alike = len(a.args) == len(b.args) and self.draft.layouts.get(a) == self.draft.layouts.get(b)
            self._same[a, b] = alike and all(self.same(p, q, depth + 1) for p, q in pairs)
        return self._same[a, b]


def _plain(x: Any) -> Any:
    return list(x) if isinstance(x, (list, tuple)) else x


def _keeps_order(node: fx.Node) -> bool:
    """A view with the elements in the same order."""
    if node.target is aten.permute.default:
        return list(node.args[1]) == list(range(len(node.args[1])))  # type: ignore[arg-type]
    return node.target in _SAME_ORDER


def _onward(node: fx.Node) -> Iterator[fx.Node]:
    """dz, and it seen in other shapes, turned, or in the dtype of the product."""
    yield node
    for user in node.users:
        if user.target is _CAST or _keeps_order(user) or (user.target is aten.t.default):
            yield from _onward(user)


def _only_read_in(nodes: set[fx.Node], readers: set[fx.Node]) -> bool:
    return all(u in readers for n in nodes for u in n.users)


def _depends(value: Any, on: fx.Node) -> bool:
    seen, todo = set(), [value]
    while todo:
        node = todo.pop()
        if node is on:
            return True
        if isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _rewrite(draft: Draft, found: Match) -> None:
    graph, old = draft.graph.fx, found.backward
    g, _, target, _, ignore, _ = old.args
    _ahead([found.x, found.w], old)
    bias = None if found.bias is None else _for_backward(draft, found.bias, old)
    wants = [n is not None for n in (found.dx, found.dw, found.db)]
    given = (found.x, found.w, bias, target, g, ignore, *wants)
    with graph.inserting_before(old):
        call = graph.call_function(mw.linear_nll_step.default, given)
    fakes = mw.linear_nll_step.default(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in given))
    call.meta = dict(old.meta, val=fakes)
    later = _made_of(found.nll)
    for i, result in enumerate((found.nll, found.dx, found.dw, found.db)):
        if result is not None:
            _replace(draft, call, i, result, old)
    _put_behind(draft, later, old)
    name = old.name
    _erase(draft, found.gone)
    call.name = name


def _ahead(values: list[fx.Node], of: fx.Node) -> None:
    """Move values that are made behind a node, of nothing that needs it, ahead of it."""
    order = {n: i for i, n in enumerate(of.graph.nodes)}
    moved, todo = set(), list(values)
    while todo:
        node = todo.pop()
        if order[node] > order[of] and node not in moved:
            moved.add(node)
            todo += node.all_input_nodes
    for node in sorted(moved, key=order.__getitem__):
        of.prepend(node)


def _for_backward(draft: Draft, value: fx.Node, before: fx.Node) -> fx.Node:
    """The value; of one that is gathered again for backward, a copy."""
    chain = [value]
    while chain[-1].target is primitive:
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    here = chain[-1]
    if here.name not in draft.plan.again:
        return value
    for step in reversed(chain[:-1]):
        with draft.graph.fx.inserting_before(before):
            new = draft.graph.fx.call_function(primitive, (here, step.args[1]))
        new.meta = dict(step.meta, backward=True)
        draft.layouts[new] = draft.layouts[step]
        here = new
    return here


def _erase(draft: Draft, gone: frozenset[fx.Node]) -> None:
    """Take out calls, and what only they read."""
    dead = set(gone)
    for node in reversed(list(draft.graph.fx.nodes)):
        if node not in dead or node.users or node.op != "call_function":
            continue
        dead |= set(node.all_input_nodes)
        draft.graph.fx.erase_node(node)
        draft.layouts.pop(node, None)
        draft.splits.pop(node, None)
        draft.placement.needs.pop(node, None)


def _put_behind(draft: Draft, nodes: list[fx.Node], call: fx.Node) -> None:
    """What is made of the loss, right behind the call; what waits for other ranks, and all that is made of it, at the
    program's end: nobody else waits for it."""
    order = {n: i for i, n in enumerate(call.graph.nodes)}
    end, waits = call.graph.output_node(), set[fx.Node]()
    for node in nodes:
        late = node.target is primitive or not waits.isdisjoint(node.all_input_nodes)
        waits |= {node} if late else set()
        if late or order[node] < order[call]:
            (end if late else call).prepend(node)
            node.meta["backward"] = node.meta.get("backward") or draft.plan.stages is not None


def _made_of(value: fx.Node) -> list[fx.Node]:
    """All that is made of a value, in order."""
    found = {value}
    for node in value.graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    found.discard(value)
    return [n for n in value.graph.nodes if n in found]


def _replace(draft: Draft, call: fx.Node, index: int, result: fx.Node, before: fx.Node) -> None:
    """Let a result of the call stand for a node, under its name."""
    graph, val = draft.graph.fx, result.meta["val"]
    layout, name = draft.layouts[result], result.name
    with graph.inserting_before(before):
        made = graph.call_function(getitem, (call, index))
        made.meta = dict(result.meta, val=call.meta["val"][index], backward=True)
        draft.layouts[made] = layout
        if made.meta["val"].dtype != val.dtype:
            made = graph.call_function(_CAST, (made,), {"dtype": val.dtype})
            made.meta = dict(result.meta, backward=True)
            draft.layouts[made] = layout
    result.replace_all_uses_with(made)
    result.name, made.name = f"{name}_before", name
