"""Names of the dims of a program, where the program itself shows what they are.

    batch              the batch dim of an input
    sequence, height   the dim after it: of tokens and vectors, or of images and volumes
    experts            dim 0 of stacked expert weights
    heads              of attention; with fewer heads of keys: `key heads`, and `query heads a key head`
    head size          of attention
    vocabulary         the rows of an embedding's table
    hidden             a dim that parameters of three or more parts of the model share
    rows, columns of   dim 0 and 1 of the first parameter that has it; `dim 2 of`

Whatever has none of these stays without a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch.fx as fx

from .factors import Factored
from .graph import Graph
from .rules.split import Leaf
from .strategies import Marked, is_view, marked_atoms

PARTS = 3
"""So many parts of a model whose parameters share a dim make it `hidden`."""


def dim_names(graph: Graph, factored: Factored) -> dict[int, str]:
    """Atom -> name. Earlier lines of the list above win."""
    marked, found = marked_atoms(graph, factored), {}
    for name, atoms in _named(graph, factored, marked):
        for atom in atoms:
            found.setdefault(atom, name)
    return found


def names_of_calls(graph: Graph, factored: Factored) -> dict[str, dict[Leaf, str]]:
    """Of each call the names of its leaves that have one; the parts of one dim are told apart by their sizes."""
    names, found = dim_names(graph, factored), {}
    for node in graph.calls():
        mine = {leaf: (names[a], factored.sizes.size(a)) for leaf, a in factored.atoms[node].items() if a in names}
        count = Counter([name for name, _ in mine.values()])
        found[node.name] = {leaf: f"{x} ({size})" if count[x] > 1 else x for leaf, (x, size) in mine.items()}
    return found


def _named(graph: Graph, factored: Factored, marked: Marked) -> Iterator[tuple[str, Iterable[int]]]:
    yield "batch", sorted(marked.batch)
    images = {
        a
        for node, role in zip(graph.placeholders, graph.inputs, strict=True)
        if role.kind == "input" and node in factored.dims and len(factored.dims[node]) >= 4
        for dim in factored.dims[node]
        for a in dim
    }
    yield "height", sorted(marked.sequence & images)
    yield "sequence", sorted(marked.sequence)
    yield "experts", sorted(marked.experts)
    for node in graph.calls():
        yield from _of_attention(node, factored)
    params = {n: str(r.name) for n, r in zip(graph.placeholders, graph.inputs, strict=True) if r.kind == "param"}
    seen = {n: n for n in params}
    for node in graph.calls():
        operands = factored.operands[node]
        if len(operands) == 1 and is_view(node) and operands[0] in seen:
            seen[node] = seen[operands[0]]
        elif "aten.embedding.default" in str(node.target) and operands[0] in seen:
            yield "vocabulary", factored.dims[seen[operands[0]]][0]
    yield from _of_parameters(params, factored)


def _of_attention(node: fx.Node, factored: Factored) -> Iterator[tuple[str, Iterable[int]]]:
    if "meshwright.attention.default" not in str(node.target):
        return
    atoms: dict[str, list[int]] = {}
    for (factor, _), atom in factored.atoms[node].items():
        atoms.setdefault(factor, []).append(atom)
    shared = "g" in atoms and "r" in atoms
    yield "key heads" if shared else "heads", atoms.get("g", ())
    yield "query heads a key head" if shared else "heads", atoms.get("r", ())
    yield "head size", [*atoms.get("d", ()), *atoms.get("e", ())]


def _of_parameters(params: dict[fx.Node, str], factored: Factored) -> Iterator[tuple[str, Iterable[int]]]:
    first: dict[int, str] = {}
    parts: dict[int, set[str]] = {}
    for node, name in params.items():
        *above, _, _ = ("", "", *name.split("."))
        short = ".".join(name.split(".")[-2:])
        for i, dim in enumerate(factored.dims[node]):
            where = ("rows", "columns")[i] if i < 2 else f"dim {i}"
            for atom in dim:
                first.setdefault(atom, f"{where} of {short}")
                parts.setdefault(atom, set()).add(".".join(above))
    yield "hidden", [a for a, some in parts.items() if len(some) >= PARTS]
    for atom, name in first.items():
        yield name, [atom]
