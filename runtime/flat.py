"""Named tensors as one run of bytes, and back: what a parameter server and its workers send each other."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

_ALIGN = 16


class Flat:
    """Where each tensor lies. Before the first there is a byte a tensor: whether there is one (a gradient may be None).

    Args:
        named: tensors whose shapes and dtypes they have.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]):
        self.kinds = {n: (tuple(x.shape), x.dtype) for n, x in named.items()}
        at = -(-len(named) // _ALIGN) * _ALIGN
        self.at: dict[str, int] = {}
        for name, (shape, dtype) in self.kinds.items():
            self.at[name] = at
            at += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        self.nbytes = at

    def pack(self, values: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        out = torch.zeros(self.nbytes, dtype=torch.uint8)
        for i, name in enumerate(self.kinds):
            if (x := values[name]) is not None:
                out[i] = 1
                self._view(out, name).copy_(x.detach())
        return out

    def unpack(self, flat: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Views of the bytes."""
        return {name: self._view(flat, name) if flat[i] else None for i, name in enumerate(self.kinds)}

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        shape, dtype = self.kinds[name]
        nbytes = math.prod(shape) * dtype.itemsize
        return flat[self.at[name] : self.at[name] + nbytes].view(dtype).view(shape)


def shared_out(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Names dealt to parts of about equal size: the largest first, each to the part that has least."""
    found: list[list[str]] = [[] for _ in range(parts)]
    have = [0] * parts
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        least = have.index(min(have))
        found[least].append(name)
        have[least] += sizes[name]
    order = list(sizes)
    return [sorted(names, key=order.index) for names in found]
