"""Atoms: sizes that may turn out to be one, or to be a product of others (`factors.py`)."""

from __future__ import annotations

from typing import Any

UNKNOWN = -1
"""The size of a dim that depends on data: never split."""


class Atoms:
    """A union-find over sizes whose members can be cut in parts. Atoms of size 1 do not exist."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._parts: list[tuple[int, ...]] = []
        self._own: list[tuple[int, tuple[int, ...]]] = []

    def new(self, size: Any) -> list[int]:
        """Fresh atoms for one dim: one, or none for a dim of size 1."""
        if isinstance(size, int) and size == 1:
            return []
        self._parent.append(len(self._parent))
        self._size.append(size if isinstance(size, int) else UNKNOWN)
        self._parts.append(())
        return [len(self._parent) - 1]

    def count(self) -> int:
        """How many atoms there are."""
        return len(self._parent)

    def touched(self, before: int) -> bool:
        """Whether one of the first `before` atoms was cut, or united with another of them, by what came later."""
        return any(self._own[i] != (self._parent[i], self._parts[i]) for i in range(before))

    def copy(self) -> Atoms:
        made = Atoms()
        made._parent, made._size, made._parts = list(self._parent), list(self._size), list(self._parts)
        made._own = list(self._own)
        return made

    def settle(self) -> None:
        """Remember the atoms as they are, for `touched`."""
        self._own = list(zip(self._parent, self._parts, strict=True))

    def size(self, atom: int) -> int:
        return self._size[atom]

    def _root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def leaves(self, atoms: list[int]) -> list[int]:
        """The atoms, each as the uncut ones it is now made of."""
        if len(atoms) == 1 and not self._parts[root := self._root(atoms[0])]:
            return atoms if atoms[0] == root else [root]
        out: list[int] = []
        stack = list(reversed(atoms))
        while stack:
            root = self._root(stack.pop())
            if self._parts[root]:
                stack.extend(reversed(self._parts[root]))
            else:
                out.append(root)
        return out

    def _cut(self, atom: int, major: int) -> None:
        """Cut a leaf of size n in (major, n / major)."""
        minor = self._size[atom] // major
        self._parts[atom] = (*self.new(major), *self.new(minor))

    def unite(self, a: list[int], b: list[int]) -> bool:
        """Make two lists of atoms of one product the same; False (and nothing changes) when their cuts disagree."""
        if len(a) == len(b) == 1:  # by far the most
            x, y = self._root(a[0]), self._root(b[0])
            if x == y:
                return True
            if self._size[x] == self._size[y] and not self._parts[x] and not self._parts[y]:
                self._parent[max(x, y)] = min(x, y)
                return True
        left, right = self.leaves(a), self.leaves(b)
        if left == right:
            return True
        if len(left) == len(right) == 1 and self._size[left[0]] == self._size[right[0]]:
            self._parent[max(left[0], right[0])] = min(left[0], right[0])
            return True
        if not _agree([self._size[x] for x in left], [self._size[x] for x in right]):
            return False
        while True:
            left, right = self.leaves(a), self.leaves(b)
            pair = next(((x, y) for x, y in zip(left, right, strict=False) if x != y), None)
            if pair is None:
                return True
            x, y = pair
            if self._size[x] == self._size[y]:
                self._parent[max(x, y)] = min(x, y)
            elif self._size[x] > self._size[y]:
                self._cut(x, self._size[y])
            else:
                self._cut(y, self._size[x])

    def divide(self, atoms: list[int], sizes: list[int]) -> list[list[int]] | None:
        """The atoms of one dim in consecutive groups of these sizes, cutting where needed; None if that cannot be."""
        leaves = self.leaves(atoms)
        own, asked = [self._size[a] for a in leaves], [n for n in sizes if n != 1]
        if UNKNOWN in own:
            return None
        if own == asked:
            left = iter(leaves)
            return [[next(left)] if n != 1 else [] for n in sizes]
        if not _agree(own, asked):
            return None
        groups = [self.new(n) for n in sizes]
        return groups if self.unite(atoms, [a for g in groups for a in g]) else None


def _agree(a: list[int], b: list[int]) -> bool:
    """Whether two lists of sizes of one product have a common refinement by cutting."""
    if 0 in a or 0 in b or UNKNOWN in a or UNKNOWN in b:
        return a == b
    left, right = list(reversed(a)), list(reversed(b))
    while left and right:
        x, y = left.pop(), right.pop()
        if x == y:
            continue
        big, small = max(x, y), min(x, y)
        if big % small:
            return False
        (left if x > y else right).append(big // small)
    return not left and not right
