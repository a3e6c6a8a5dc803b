"""What one call may do on one mesh axis, and what that means for its operands and outputs.

A *choice* of a call on an axis is
    a leaf (factor, index)   split that factor over the axis
    an int k                 run on partial sums: alternative k of the rule's `linear`
    None                     run whole: every rank of the axis does the same
The *state* of a tensor on an axis is a Spot (that factor is split), "sum" | "max" | "min" (partial), or None (whole).
What a call needs may also be a `Seen`: that factor split, and beside its own piece the rows that a window needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.fx as fx

from .factors import Factored
from .graph import Graph, is_tensor
from .layout import Spot, piece
from .mesh import TIME, Mesh
from .rules.split import Leaf, LeafDims, Shape
from .window import Through

Choice = Leaf | int | None
State = Spot | str | None


class Seen(NamedTuple):
    """A dim of `size`, split in (parts, rows of a part) as `own` says, seen through a window."""

    spot: Spot
    through: Through
    own: tuple[int, int]
    size: int


def input_state(shape: Shape, operand: int, choice: Choice) -> State | Seen:
    """The state a call needs of an operand."""
    if isinstance(choice, int):
        return "sum" if operand in shape.rule.linear[choice] else None
    if not choice:
        return None
    for (k, dim), (factor, _) in shape.rule.windows.items():
        if k == operand and factor == choice[0] and (through := shape.through(operand, dim)):
            if factor in shape.rule.decompose:  # the simpler ops see through windows of their own
                return (dim, 0)
            sizes = [n for _, n in shape.inputs[operand][dim]]
            size = math.prod(sizes)
            return Seen((dim, 0), through, (sizes[0], size // max(1, sizes[0])), size)
    return _spot(shape.inputs[operand], choice)


def output_state(shape: Shape, output: int, choice: Choice) -> State:
    """The state a call gives an output."""
    if isinstance(choice, int):
        return "sum"
    if choice is None:
        return None
    sums = shape.rule.sums[output] if output < len(shape.rule.sums) else {}
    if choice[0] in sums:
        return sums[choice[0]]
    dims = shape.outputs[output]
    return _spot(dims, choice) if dims is not None else None


def _spot(dims: LeafDims, leaf: Leaf) -> Spot | None:
    for i, dim in enumerate(dims):
        for j, (name, _) in enumerate(dim):
            if name == leaf:
                return (i, j)
    return None


def never_empty(size: int, ranks: tuple[int, ...]) -> bool:
    """Whether every rank gets a part of a factor cut over axes of these sizes, outermost first."""
    return piece(size, tuple((n, n - 1) for n in ranks))[1] > 0


@dataclass(frozen=True)
class Marked:
    """Atoms with a part to play: the batch (and how many micro-batches it is cut into), the sequence, experts."""

    batch: frozenset[int]
    sequence: frozenset[int]
    experts: frozenset[int]
    micro_batches: int = 1

    def least(self, size: int, atom: int) -> int:
        """Of a factor's size what the smallest micro-batch has: ranks divide that."""
        m = self.micro_batches
        return piece(size, ((m, m - 1),))[1] if m > 1 and atom in self.batch else size


def marked_atoms(graph: Graph, factored: Factored, micro_batches: int = 1) -> Marked:
    """Find the atoms roles speak of, from the program's inputs and parameters.

    batch: of each input its batch dim. sequence: the dim after it (the height of an image), unless that is the only
    other dim of a float tensor (features). experts: dim 0 of parameters with three or more dims that a batched
    or grouped matmul or an index reads.
    """
    batch, sequence, experts = set(), set(), set()
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if not is_tensor(node):
            continue
        dims, val = factored.dims[node], node.meta["val"]
        if role.kind == "input" and (at := graph.batch[int(role.name)]) is not None:
            batch |= set(dims[at])
            after = _sequence_dim(val, at)
            sequence |= set(dims[after]) if after is not None else set()
        if role.kind == "param" and val.dim() >= 3 and _is_stacked(node):
            experts |= set(dims[0])
    sequence |= _through_windows(graph, factored, sequence)
    return Marked(frozenset(batch), frozenset(sequence - batch), frozenset(experts - batch), micro_batches)


def _through_windows(graph: Graph, factored: Factored, atoms: set[int]) -> set[int]:
    """The atoms of factors whose windows see one of these atoms, and of factors whose windows see those."""
    found, before = set(atoms), -1
    seen = [n for n in graph.calls() if factored.shapes[n].rule.windows]
    while len(found) > before:
        before = len(found)
        for node in seen:
            operands = factored.operands[node]
            for (k, dim), (factor, _) in factored.shapes[node].rule.windows.items():
                if not found.isdisjoint(factored.dims[operands[k]][dim]):
                    found |= {atom for leaf, atom in factored.atoms[node].items() if leaf[0] == factor}
    return found


def _sequence_dim(val: torch.Tensor, batch: int) -> int | None:
    rest = [d for d in range(val.dim()) if d != batch]
    if val.dim() >= 4:
        return rest[1]
    if val.dim() == 3 or (val.dim() == 2 and not val.is_floating_point()):
        return rest[0]
    return None


_LOOKS = ("transpose", "permute", "view", "unsqueeze", ".t.", "expand")


def _is_stacked(param: fx.Node) -> bool:
    seen, todo = set(), [param]
    while todo:
        node = todo.pop()
        for user in node.users:
            name = str(user.target)
            if any(word in name for word in ("bmm", "index", "grouped_mm")):
                return True
            if user not in seen and any(w in name for w in _LOOKS):
                seen.add(user)
                todo.append(user)
    return False


HEADS = ("g", "r")
"""The factors of attention that are its heads: `tp` must split one of them if it can."""

HEAVY = 1.0
"""A call of at least this many flops is a contraction: `tp` must split its weight if it can."""


class Choices:
    """The legal choices of every call on one axis. `weights`: what `weights_read` gives."""

    def __init__(
        self, factored: Factored, mesh: Mesh, axis: str, marked: Marked, weights: dict[fx.Node, tuple[int, ...]]
    ):
        self.factored, self.marked, self.weights = factored, marked, weights
        self.axis, self.role, self.ranks = axis, mesh.role(axis), mesh.sizes[axis]

    def of(self, node: fx.Node) -> list[Choice]:
        """The choices of a call."""
        shape, atoms = self.factored.shapes[node], self.factored.atoms[node]
        if self.factored.calls[node].depends_on_data:
            return [None]
        legal = [leaf for leaf, atom in atoms.items() if self.may_split(shape, leaf, atom)]
        # partial first: of equal plans, the one that reduces late reduces less
        partial: list[Choice] = [*range(len(shape.rule.linear))]
        wanted = {"data": self.marked.batch, "context": self.marked.sequence, "expert": self.marked.experts}
        if self.role in wanted:
            mine: list[Choice] = [leaf for leaf in legal if atoms[leaf] in wanted[self.role]]
            if self.role == "context" and self._must_gather(node, mine):
                mine += [leaf for leaf in legal if leaf not in mine and atoms[leaf] not in self.marked.batch]
            if self.role == "data" and self.axis != TIME and self._adds_up_little(node, mine):
                mine += [None, *(leaf for leaf in legal if atoms[leaf] not in self.marked.batch)]
            return mine or [*partial, None]
        if self.role == "tensor":
            legal = [leaf for leaf in legal if atoms[leaf] not in self.marked.batch]
            forced: list[Choice] = [leaf for leaf in legal if self._splits_weight(node, shape, leaf)]
            if "meshwright.attention" in str(node.target):
                forced = [leaf for leaf in legal if leaf[0] in HEADS]
            if forced:
                return forced
        return [*partial, None, *legal]

    def _must_gather(self, node: fx.Node, mine: list[Choice]) -> bool:
        """Whether splitting the sequence leaves an operand's sequence whole, as attention's keys and values.

        Such a call may split another factor instead: heads, with an all-to-all before and after (Ulysses).
        """
        shape = self.factored.shapes[node]
        for k, operand in enumerate(self.factored.operands[node]):
            has = {a for d in self.factored.dims[operand] for a in d}
            if has & self.marked.sequence and any(c and input_state(shape, k, c) is None for c in mine):
                return True
        return False

    def _adds_up_little(self, node: fx.Node, mine: list[Choice]) -> bool:
        """Whether a call sums over its split what is smaller than the sum, and at little cost.

        So does the gradient of an embedding: the rows of few tokens may be gathered instead of the sum being reduced.
        """
        shape = self.factored.shapes[node]
        if not mine or not is_tensor(node) or shape.rule.flops >= HEAVY:
            return False
        if any(_spot(out, leaf) for out in shape.outputs if out for leaf in mine if isinstance(leaf, tuple)):
            return False
        return sum(o.meta["val"].nbytes for o in self.factored.operands[node]) < node.meta["val"].nbytes

    def may_split(self, shape: Shape, leaf: Leaf, atom: int) -> bool:
        """Whether a call can be split there, whatever its role on the axis."""
        name, index = leaf
        rule = shape.rule
        if name in rule.whole or (name in rule.ordered and index > 0):
            return False
        if not any(_spot(d, leaf) for d in (*shape.inputs, *(o for o in shape.outputs if o))):
            return False
        return never_empty(self.marked.least(shape.leaves[name][index], atom), (self.ranks,))

    def _splits_weight(self, node: fx.Node, shape: Shape, leaf: Leaf) -> bool:
        if shape.rule.flops < HEAVY:
            return False
        return any(_spot(shape.inputs[i], leaf) for i in self.weights.get(node, ()))


def weights_read(graph: Graph, factored: Factored) -> dict[fx.Node, tuple[int, ...]]:
    """Per call the operands that are a parameter of two or more dims, seen through views."""
    inputs = zip(graph.placeholders, graph.inputs, strict=True)
    views = {n for n, r in inputs if r.kind == "param" and n.meta["val"].dim() > 1}
    out: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.calls():
        operands = factored.operands[node]
        mine = tuple(i for i, o in enumerate(operands) if o in views)
        if mine and len(operands) == 1 and is_tensor(node) and is_view(node):
            views.add(node)
        elif mine:
            out[node] = mine
    return out


_aten = torch.ops.aten
VIEW_OPS = frozenset(
    (
        _aten.view, _aten._unsafe_view, _aten.reshape, _aten.t, _aten.transpose, _aten.permute, _aten.expand,
        _aten.unsqueeze, _aten.squeeze, _aten._to_copy,
    )
)  # fmt: skip
"""Ops of one tensor that only look at it differently (a cast counts: it is joined to the weight it casts)."""


def is_view(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in VIEW_OPS
