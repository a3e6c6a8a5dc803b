"""What rests in host memory while the device does without it, in DeepSpeed's words.

    offload_optimizer="cpu"    the state of the optimizer, and a copy of the parameters that it steps (ZeRO-Offload,
                               arXiv 2101.06840): with an fp32 Adam 12 bytes a parameter on the host, 8 fewer on the
                               device; a step copies every gradient down and every parameter up, once
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Offload:
    """What is offloaded; `offload="full"` is `Offload(offload_optimizer="cpu")`.

    Attributes:
        offload_optimizer: "cpu" or "none".
        ratio: the part of the trained elements whose optimizer state rests on the host, above 0 and at most 1; those
            of the first parameters of the model. Parameters are not cut.
        pin_memory: whether host tensors are page-locked, for faster copies; of no effect without a GPU.
    """

    offload_optimizer: str = "none"
    ratio: float = 1.0
    pin_memory: bool = False


def offload_of(given: str | Offload) -> Offload:
    """What the option of `compile` stands for."""
    if isinstance(given, Offload):
        return given
    return Offload(offload_optimizer="cpu" if given == "full" else "none")


def offload_faults(given: Any, optimizer: Any) -> Iterator[str]:
    """What is wrong with the option, beside the option `optimizer`."""
    if not isinstance(given, Offload) and given not in ("none", "full"):
        yield f"offload={given!r}: say 'none', 'full' or Offload(offload_optimizer='cpu')"
        return
    asked = offload_of(given)
    if asked.offload_optimizer not in ("none", "cpu"):
        yield f"offload_optimizer={asked.offload_optimizer!r}: say 'none' or 'cpu'"
        return
    ratio = asked.ratio
    number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and not math.isnan(ratio)
    if not number or not 0 < ratio <= 1:
        yield f"ratio={ratio!r} of Offload: give a number above 0 and at most 1"
    if not isinstance(asked.pin_memory, bool):
        yield f"pin_memory={asked.pin_memory!r} of Offload: say True or False"
    if asked.offload_optimizer == "cpu" and optimizer is None:
        yield (
            "offload= puts the optimizer's state on the host, but compile was given no optimizer: pass "
            "optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4), or leave offload= out"
        )
