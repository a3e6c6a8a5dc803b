"""What an optimizer holds: its state, and what it makes while it steps.

    AdamW on a CPU    state 8 bytes an element and a step count a parameter; one parameter after another:
                      denom = (sqrt(v) / c) + eps makes two tensors while the denom of the parameter before still stands
    AdamW on a GPU    all parameters at once: sqrt(v) of all
    SGD               state: a momentum buffer, if there is momentum

torch.optim of 2.13: `_single_tensor_adam`, `_multi_tensor_adam`; foreach is what torch takes on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Shards = Sequence[tuple[int, torch.dtype]]
"""Per trained parameter of a rank: elements, dtype."""

COUNT = 4
"""Bytes of the step count that Adam keeps of each parameter."""


@dataclass(frozen=True)
class Stepper:
    """An optimizer, as far as memory goes.

    Attributes:
        moments: tensors like the parameter that it keeps.
        makes: tensors like the parameter that it makes while it steps it.
        counts: whether it keeps a step count for each parameter.
        together: whether it steps all parameters together; None: on GPUs.
    """

    moments: int = 2
    makes: int = 2
    counts: bool = True
    together: bool | None = None

    def state(self, shards: Shards) -> int:
        """Bytes kept between steps."""
        return sum(self.moments * n * dtype.itemsize + COUNT * self.counts for n, dtype in shards)

    def inside(self, shards: Shards, cuda: bool) -> int:
        """The most bytes made at once while it steps."""
        sizes = [n * dtype.itemsize for n, dtype in shards]
        if not sizes or not self.makes:
            return 0
        if cuda if self.together is None else self.together:
            return sum(sizes)
        return max(self.makes * now + before for before, now in zip([0, *sizes], sizes, strict=False))


ADAMW = Stepper()
SGD = Stepper(moments=0, makes=0, counts=False)
