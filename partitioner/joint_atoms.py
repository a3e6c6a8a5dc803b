"""What atoms are to the groups that may split them: which stand for each other, and which contractions need whole."""

from __future__ import annotations

from .factors import Factored
from .strategies import HEAVY


def atoms_seen(factored: Factored) -> dict[int, int]:
    """Atoms that see each other through windows (the rows into and out of a convolution) are one for a group's values:
    where one call splits the rows in, another splits the rows out. Each such atom, and the one that stands for them."""
    stands: dict[int, int] = {}

    def root(a: int) -> int:
        while stands.get(a, a) != a:
            a = stands[a]
        return a

    for node, shape in factored.shapes.items():
        for (k, dim), (factor, _) in shape.rule.windows.items():
            atoms = [*factored.dims[factored.operands[node][k]][dim]]
            atoms += [a for leaf, a in factored.atoms[node].items() if leaf[0] == factor]
            if atoms:
                low = min(map(root, atoms))
                stands |= {root(a): low for a in atoms} | {low: low}
    return {a: root(a) for a in stands}


def closed_atoms(factored: Factored) -> frozenset[int]:
    """The atoms that some contraction needs whole."""
    found: set[int] = set()
    for node, shape in factored.shapes.items():
        if shape.rule.flops >= HEAVY and shape.rule.whole:
            found |= {a for leaf, a in factored.atoms[node].items() if leaf[0] in shape.rule.whole}
    return frozenset(found)
