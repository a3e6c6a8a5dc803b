"""Factors of the whole program: which dims of which tensors are the same size for the same reason.

Every tensor dim is a list of *atoms*. Walking the graph once, the rule of each call says which dims of its operands are
one factor; their atoms are united. Where a view writes a dim as several, its atom is cut, everywhere it occurs:

    n = a * b   (view [n] -> [a, b])         every dim that held atom n now holds atoms a, b

so a view is the identity on atoms, and splitting the heads inside a packed hidden size is a split of one atom. Two dims
that disagree about how to be cut (48 as 6 x 8 here, as 16 x 3 there) stay apart; the call in between has them whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map

from .atoms import Atoms
from .graph import Graph, is_getitem, is_tensor, tensor_operands, values_of
from .layout import Factor, Layout
from .rules.every import rule_of
from .rules.notation import Dims, Rule
from .rules.split import Call, Leaf, LeafDims, Shape


@dataclass
class Factored:
    """The factors of a graph.

    Attributes:
        shapes: per call its rule laid on the layouts' factors.
        calls: per call what its rule was made from.
        atoms: per call and leaf the atom it is; per value (see `dims`) the atoms of each dim.
        dims: per tensor node, per dim, its atoms.
        operands: per call its tensor operands, as `tensor_operands` has them.
    """

    shapes: dict[fx.Node, Shape] = field(default_factory=dict)
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    atoms: dict[fx.Node, dict[Leaf, int]] = field(default_factory=dict)
    dims: dict[fx.Node, list[list[int]]] = field(default_factory=dict)
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    sizes: Atoms = field(default_factory=Atoms)

    def moved(self, twins: Mapping[fx.Node, fx.Node]) -> Factored:
        """These, of a copy of the graph: `twins` has of each node the one that is it there."""
        return Factored(
            {twins[n]: x for n, x in self.shapes.items()},
            {twins[n]: x for n, x in self.calls.items()},
            {twins[n]: x for n, x in self.atoms.items()},
            {twins[n]: x for n, x in self.dims.items()},
            {twins[n]: [twins[o] for o in x] for n, x in self.operands.items()},
            self.sizes,
        )

    def whole(self, node: fx.Node) -> Layout:
        """The layout of a whole tensor, written with its factors."""
        return Layout(tuple(tuple(Factor(self.sizes.size(a)) for a in dim) for dim in self.dims[node]))


@dataclass(frozen=True)
class _Kind:
    """What calls of one signature share.

    Attributes:
        call, rule: the call on fake tensors, and its rule.
        sizes: of the rule's factors.
        loose: (which operand or output, dim) of the dims that are no factor and not of size 1; operands come first.
        settled: the shapes of its calls so far, by the pattern of their atoms.
    """

    call: Call
    rule: Rule
    sizes: dict[str, int]
    loose: tuple[tuple[int, int], ...]
    settled: dict[Any, tuple[Shape, dict[Leaf, int]]] = field(default_factory=dict)


@dataclass
class _Laid:
    """A call whose factors have been united but may still be cut: per factor its atoms, and what stays apart."""

    kind: _Kind
    operands: list[fx.Node]
    values: tuple[fx.Node | None, ...]
    known: dict[str, list[int]] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)


def factor_graph(
    graph: Graph, resting: Mapping[str, Layout] | None = None, held: Mapping[fx.Node, Layout] | None = None
) -> Factored:
    """Walk the graph once, uniting and cutting; then read every call's leaves off the final atoms.

    `resting`: layouts that parameters already have; their dims are cut at least as finely. `held`: of other inputs.
    """
    out = Factored()
    laid: dict[fx.Node, _Laid] = {}
    kinds = _Kinds()
    for node in graph.fx.nodes:
        if node.op in ("placeholder", "get_attr") and is_tensor(node):
            out.dims[node] = [out.sizes.new(n) for n in node.meta["val"].shape]
        elif node.op == "call_function" and not is_getitem(node):
            kind, operands = kinds.of(node)
            out.calls[node], out.operands[node] = kind.call, operands
            laid[node] = _lay(kind, operands, values_of(node), out)
    cut = dict(held or {})
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if resting and role.kind == "param" and (layout := resting.get(str(role.name))):
            cut[node] = layout
    for node, layout in cut.items():
        for atoms, dim in zip(out.dims[node], layout.dims, strict=True):
            out.sizes.divide(atoms, [f.size for f in dim])
    _cut_gradients(graph, out)
    final = _Final(out.sizes)
    for node, dims in out.dims.items():
        out.dims[node] = [final.leaves(d) for d in dims]
    for node, one in laid.items():
        out.shapes[node], out.atoms[node] = _settled(one, out, final)
    out.sizes.settle()
    return out


def _cut_gradients(graph: Graph, out: Factored) -> None:
    """A gradient rests as its parameter does: where one is cut more finely, the other is cut so too."""
    inputs = zip(graph.placeholders, graph.inputs, strict=True)
    params = {r.name: n for n, r in inputs if r.kind == "param"}
    for value, role in zip(graph.output_values, graph.outputs, strict=True):
        if role.kind == "grad" and value in out.dims and value is not None:
            for own, theirs in zip(out.dims[value], out.dims[params[role.name]], strict=True):
                if len(out.sizes.leaves(own)) != len(out.sizes.leaves(theirs)):
                    out.sizes.unite(own, theirs)


def extended(old: Factored, graph: Graph) -> Factored | None:
    """The factors of a graph in which some calls were replaced; None where the new calls cut old dims anew."""
    own = (old.shapes, old.calls, old.atoms, old.dims, old.operands)
    out = Factored(*(dict(x) for x in own), old.sizes.copy())  # type: ignore[arg-type]
    nodes = list(graph.fx.nodes)
    alive = set(nodes)
    for of_node in (out.shapes, out.calls, out.atoms, out.dims, out.operands):
        for node in [n for n in of_node if n not in alive]:
            del of_node[node]  # type: ignore[arg-type]
    before, kinds = old.sizes.count(), _Kinds()
    laid: dict[fx.Node, _Laid] = {}
    for node in nodes:
        if node.op == "call_function" and not is_getitem(node) and node not in out.shapes:
            kind, operands = kinds.of(node)
            out.calls[node], out.operands[node] = kind.call, operands
            laid[node] = _lay(kind, operands, values_of(node), out)
    if out.sizes.touched(before):
        return None
    final = _Final(out.sizes)
    for one in laid.values():
        for value in one.values:
            if value in out.dims:
                out.dims[value] = [final.leaves(d) for d in out.dims[value]]
    for node, one in laid.items():
        out.shapes[node], out.atoms[node] = _settled(one, out, final)
    out.sizes.settle()
    return out if _still_fit(out, laid) else None


def _still_fit(out: Factored, laid: dict[fx.Node, _Laid]) -> bool:
    """Whether the calls that read what new calls make see it in the factors that they saw before."""
    for one in laid.values():
        for value in (v for v in one.values if v is not None):
            own = [[out.sizes.size(a) for a in d] for d in out.dims[value]] if value in out.dims else None
            for user in value.users:
                if user in out.shapes and user not in laid:
                    operands = tensor_operands(user)
                    out.operands[user] = operands
                    seen = [[n for _, n in d] for d in out.shapes[user].inputs[operands.index(value)]]
                    if seen != own:
                        return False
    return True


class _Kinds:
    """The kinds of the calls of one graph, by signature: target, plain arguments, shapes and dtypes of tensors."""

    def __init__(self) -> None:
        self._kinds: dict[Any, _Kind] = {}
        self._tensors: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> tuple[_Kind, list[fx.Node]]:
        operands: list[fx.Node] = []
        args = tuple([self._key(x, operands) for x in node.args])
        kwargs = tuple([(k, self._key(x, operands)) for k, x in node.kwargs.items()]) if node.kwargs else ()
        signature = (node.target, args, kwargs, self._value(node))
        kind = self._kinds.get(signature)
        if kind is None:
            call = call_of(node)
            rule = rule_of(call)
            kind = self._kinds[signature] = _Kind(call, rule, _sizes(rule, call), _loose(rule, call))
        return kind, operands

    def _key(self, x: Any, operands: list[fx.Node]) -> Any:
        if isinstance(x, fx.Node):
            found = self._tensors.get(x) or self._value(x)
            if found[0] is _TENSOR:
                operands.append(x)
            return found
        if isinstance(x, (list, tuple)):
            return tuple([self._key(y, operands) for y in x])
        if isinstance(x, dict):
            return tuple([(k, self._key(y, operands)) for k, y in x.items()])
        return (type(x), x if isinstance(x, (int, float, bool, str)) else str(x))

    def _value(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        many = isinstance(val, (tuple, list))
        found = self._tensors[node] = ("several", *map(_tensor_key, val)) if many else _tensor_key(val)
        return found


_TENSOR = object()


def _tensor_key(val: Any) -> tuple:
    if isinstance(val, torch.Tensor):
        shape: Any = val.shape
        if not all([type(n) is int for n in shape]):
            shape = tuple(map(str, shape))
        return (_TENSOR, shape, val.dtype)
    return (type(val), str(val))


def call_of(node: fx.Node) -> Call:
    """The call of a node on fake tensors."""

    def fake(x: Any) -> Any:
        return x.meta["val"] if isinstance(x, fx.Node) else x

    return Call(node.target, tree_map(fake, node.args), tree_map(fake, dict(node.kwargs)), node.meta["val"])


def _lay(kind: _Kind, operands: list[fx.Node], values: tuple[fx.Node | None, ...], out: Factored) -> _Laid:
    one = _Laid(kind, operands, values)
    rule, store, known = kind.rule, out.sizes, one.known
    for operand, dims in zip(operands, rule.inputs, strict=True):
        for names, atoms in zip(dims, out.dims[operand], strict=True):
            if len(names) == 1:  # by far the most
                group = known.setdefault(names[0], atoms)
                if group is not atoms and group != atoms and not store.unite(group, atoms):
                    one.apart.add(names[0])
            elif names:
                _take(names, atoms, one, store)
    for value, dims, tensor in zip(values, rule.outputs, kind.call.outputs, strict=False):
        if dims is None or not isinstance(tensor, torch.Tensor):
            continue
        made = [_make(names, n, one, store) for names, n in zip(dims, tensor.shape, strict=True)]
        if value is not None:
            out.dims[value] = made
    return one


def _loose(rule: Rule, call: Call) -> tuple[tuple[int, int], ...]:
    sides = [*zip(rule.inputs, call.operands, strict=False), *zip(rule.outputs, call.outputs, strict=False)]
    return tuple(
        (i, j)
        for i, (dims, t) in enumerate(sides)
        if dims is not None and isinstance(t, torch.Tensor)
        for j, (names, n) in enumerate(zip(dims, t.shape, strict=True))
        if not names and not (isinstance(n, int) and n == 1)
    )


def _sizes(rule: Rule, call: Call) -> dict[str, int]:
    """Sizes of the factors that stand alone in some dim, and of composites' last unknown."""
    sizes = dict(rule.sizes)
    seen = [
        (names, n)
        for dims, t in [*zip(rule.inputs, call.operands, strict=False), *zip(rule.outputs, call.outputs, strict=False)]
        if dims is not None and isinstance(t, torch.Tensor)
        for names, n in zip(dims, t.shape, strict=True)
        if isinstance(n, int)
    ]
    sizes |= {names[0]: n for names, n in seen if len(names) == 1}
    for names, n in seen:
        unknown = [f for f in names if f not in sizes]
        if len(unknown) == 1:
            known = 1
            for f in names:
                known *= sizes.get(f, 1)
            sizes[unknown[0]] = n // max(1, known)
    return sizes


def _take(names: tuple[str, ...], atoms: list[int], one: _Laid, store: Atoms) -> None:
    """An operand's dim of several factors: unite its atoms with them, or set them apart."""
    groups = store.divide(atoms, [one.kind.sizes[f] for f in names])
    if groups is None:
        one.apart |= set(names)
        return
    for f, group in zip(names, groups, strict=True):
        if f not in one.known:
            one.known[f] = group
        elif not store.unite(one.known[f], group):
            one.apart.add(f)


def _make(names: tuple[str, ...], n: Any, one: _Laid, store: Atoms) -> list[int]:
    """An output's dim: the atoms of its factors; fresh ones for a factor that no operand has, or that is apart."""
    if not names or any(f in one.apart for f in names):
        one.apart |= set(names)
        return store.new(n)
    for f in names:
        if f not in one.known:
            one.known[f] = store.new(n if len(names) == 1 else one.kind.sizes[f])
    if len(names) == 1:
        return one.known[names[0]]
    return [a for f in names for a in one.known[f]]


class _Final:
    """The leaves of atoms, now that no atom will be cut any more."""

    def __init__(self, store: Atoms):
        self._store = store
        self._known: dict[int, list[int]] = {}

    def leaves(self, atoms: list[int]) -> list[int]:
        if len(atoms) == 1:
            found = self._known.get(atoms[0])
            if found is None:
                found = self._known[atoms[0]] = self._store.leaves(atoms)
            return found
        return [leaf for a in atoms for leaf in self.leaves([a])]


def _settled(one: _Laid, out: Factored, final: _Final) -> tuple[Shape, dict[Leaf, int]]:
    """A call's shape, and the atom of each of its leaves.

    Calls of one kind whose atoms make the same pattern share one `Shape`, which later stages know equal calls by.
    """
    known = {f: final.leaves(a) for f, a in one.known.items() if f not in one.apart}
    number: dict[int, int] = {}
    pattern = [tuple([number.setdefault(a, len(number)) for a in atoms]) for atoms in known.values()]
    if one.apart:  # else the atoms of the other dims follow from the factors'
        for dims in _dims_of(one, out):
            pattern += [tuple([number.setdefault(a, len(number)) for a in dim]) for dim in dims]
    elif one.kind.loose:
        own = _dims_of(one, out)
        pattern += [tuple([number.setdefault(a, len(number)) for a in own[i][j]]) for i, j in one.kind.loose if own[i]]
    used = tuple([v is not None and v in out.dims for v in one.values]) if len(one.values) > 1 else ()
    apart = tuple(known) if one.apart else ()
    key = (tuple(pattern), tuple([out.sizes.size(a) for a in number]), apart, used)
    found = one.kind.settled.get(key)
    if found is None:
        shape, atoms = _settle(one, known, out)
        found = one.kind.settled[key] = (shape, {leaf: number[a] for leaf, a in atoms.items()})
    order = list(number)
    return found[0], {leaf: order[i] for leaf, i in found[1].items()}


def _dims_of(one: _Laid, out: Factored) -> list[list[list[int]]]:
    """The atoms of the dims of every operand and output; none where an output is not there."""
    outputs = zip(one.kind.rule.outputs, [*one.values, *[None] * len(one.kind.rule.outputs)], strict=False)
    return [out.dims[o] for o in one.operands] + [out.dims[v] if d and v in out.dims else [] for d, v in outputs]


def _settle(one: _Laid, known: dict[str, list[int]], out: Factored) -> tuple[Shape, dict[Leaf, int]]:
    """Read a call's leaves off the final atoms."""
    store, rule = out.sizes, one.kind.rule
    sides = zip([*rule.inputs, *rule.outputs], _dims_of(one, out), strict=True)
    leaves = _sound_leaves(known, [(dims, own) for dims, own in sides if own])

    def dims_of(dims: Dims, own: list[list[int]]) -> LeafDims:
        return tuple(
            _labels(names, atoms, leaves, store) or tuple((None, store.size(a)) for a in atoms)
            for names, atoms in zip(dims, own, strict=True)
        )

    inputs = tuple(dims_of(d, out.dims[o]) for o, d in zip(one.operands, rule.inputs, strict=True))
    outputs: list[LeafDims | None] = []
    for value, dims in zip(one.values, rule.outputs, strict=False):
        outputs.append(dims_of(dims, out.dims[value]) if dims is not None and value in out.dims else None)
    sizes = {f: tuple(store.size(a) for a in atoms) for f, atoms in leaves.items()}
    return Shape(rule, sizes, inputs, tuple(outputs)), {
        (f, i): a for f, atoms in leaves.items() for i, a in enumerate(atoms)
    }


def _sound_leaves(leaves: dict[str, list[int]], seen: list) -> dict[str, list[int]]:
    """The leaves of the factors that every dim they stand in shows; a factor hidden in one dim is not to be split."""
    while True:
        hidden = {
            f
            for dims, own in seen
            for names, atoms in zip(dims, own, strict=True)
            if names and not _shows(names, atoms, leaves)
            for f in names
            if f in leaves
        }
        if not hidden:
            return leaves
        leaves = {f: a for f, a in leaves.items() if f not in hidden}


def _shows(names: tuple[str, ...], atoms: list[int], leaves: dict[str, list[int]]) -> bool:
    """Whether a dim is made of just the leaves of its factors."""
    return all(f in leaves for f in names) and [a for f in names for a in leaves[f]] == atoms


def _labels(
    names: tuple[str, ...], atoms: list[int], leaves: dict[str, list[int]], store: Atoms
) -> tuple[tuple[Leaf | None, int], ...] | None:
    """Per layout factor of a dim the leaf it is; None when the dim does not show its factors."""
    if not _shows(names, atoms, leaves):
        return None
    return tuple(((f, i), store.size(a)) for f in names for i, a in enumerate(leaves[f]))
