"""What rests away from the device, which does without it, in DeepSpeed's words.

    offload_optimizer="cpu"    the state of the optimizer, and a copy of the parameters that it steps (ZeRO-Offload,
                               arXiv 2101.06840): with an fp32 Adam 12 bytes a parameter on the host, 8 fewer on the
                               device; a step copies every gradient down and every parameter up, once
    offload_activations="cpu"  what the blocks of the model save for backward, from its last use in forward until then
    offload_optimizer="nvme"   the same in a file of each rank (ZeRO-Infinity, arXiv 2104.07857); of it the host holds
                               at most buffer_count * sub_group_size elements at a time, in a step
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .graph import Graph
from .hardware import Device, host_bandwidth


@dataclass(frozen=True)
class Offload:
    """What is offloaded; "full" is `Offload(offload_optimizer="cpu")`, to which "auto" comes where `memory=` needs
    it.

    Attributes:
        offload_optimizer: "cpu", "nvme" or "none".
        ratio: the part of the trained elements whose optimizer state rests away, above 0 and at most 1; those of the
            first parameters of the model. Parameters are not cut.
        pin_memory: whether host tensors are page-locked, for faster copies; of no effect without a GPU.
        nvme_path: a folder on this machine, for "nvme": each rank makes one file there, and removes it at the end.
        offload_activations: "cpu" or "none"; `pin={"layers.*.mlp": "offload"}` names parts.
        sub_group_size: elements that are stepped at a time, with "nvme".
        buffer_count: buffers of so many elements that the host has room for, with "nvme". Adam needs 4 for a sub-group
            (parameter, gradient, two moments): 4 reads, steps and writes in turn, 12 one beside the other.
    """

    offload_optimizer: str = "none"
    ratio: float = 1.0
    pin_memory: bool = False
    nvme_path: str | os.PathLike[str] | None = None
    sub_group_size: int = 100_000_000
    buffer_count: int = 12
    offload_activations: str = "none"


def offload_of(given: str | Offload) -> Offload:
    """What the option of `compile` stands for; "auto" puts nothing away until it must."""
    if isinstance(given, Offload):
        return given
    return AWAY if given == "full" else Offload()


AWAY = Offload(offload_optimizer="cpu")
"""What `offload="full"` asks for, and `offload="auto"` where nothing else fits `memory=`."""


def trained(model: Any) -> list[tuple[str, int]]:
    """(name, elements) of the trained parameters of a model, in its order."""
    return [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]


def first_parameters(trained: Iterable[tuple[str, int]], ratio: float) -> list[str]:
    """Names of the first of some (name, elements) that make up a part of all elements; none is cut."""
    trained = list(trained)
    left, out = ratio * sum(n for _, n in trained), []
    for name, n in trained:
        if left <= 0:
            break
        left -= n
        out.append(name)
    return out


def away(model: Any, asked: Offload) -> frozenset[str]:
    """The parameters whose state rests away."""
    names = first_parameters(trained(model), asked.ratio) if asked.offload_optimizer != "none" else ()
    return frozenset(names)


def chosen_away(graph: Graph, model: Any, device: Device) -> Graph:
    """The program with all of the optimizer's state on the host, because `memory=` needs it, and a note of that."""
    rate = host_bandwidth(device) / 1e9
    note = (
        f"offload='auto': nothing else fits memory=, so the optimizer's state rests on the host and is stepped there; "
        f"gradients go down and parameters up at {rate:g} GB/s once a step"
    )
    return replace(graph, away=away(model, AWAY), notes=(*graph.notes, note))


def offload_faults(given: Any, optimizer: Any) -> Iterator[str]:
    """What is wrong with the option, beside the option `optimizer`."""
    if not isinstance(given, Offload) and given not in ("auto", "none", "full"):
        yield f"offload={given!r}: say 'auto', 'none', 'full' or Offload(offload_optimizer='cpu')"
        return
    asked = offload_of(given)
    if asked.offload_optimizer not in ("none", "cpu", "nvme"):
        yield f"offload_optimizer={asked.offload_optimizer!r}: say 'none', 'cpu' or 'nvme'"
        return
    if asked.offload_activations not in ("none", "cpu"):
        yield f"offload_activations={asked.offload_activations!r} of Offload: say 'none' or 'cpu'"
    ratio = asked.ratio
    number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and not math.isnan(ratio)
    if not number or not 0 < ratio <= 1:
        yield f"ratio={ratio!r} of Offload: give a number above 0 and at most 1"
    if not isinstance(asked.pin_memory, bool):
        yield f"pin_memory={asked.pin_memory!r} of Offload: say True or False"
    yield from _file_faults(asked)
    if asked.offload_optimizer != "none" and optimizer is None:
        yield (
            "offload= puts the optimizer's state away, but compile was given no optimizer: pass "
            "optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4), or leave offload= out"
        )


def _file_faults(asked: Offload) -> Iterator[str]:
    for name in ("sub_group_size", "buffer_count"):
        value = getattr(asked, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{name}={value!r} of Offload: give a whole number of at least 1"
    path = asked.nvme_path
    if asked.offload_optimizer != "nvme":
        if path is not None:
            yield f"nvme_path={str(path)!r} of Offload is for offload_optimizer='nvme': say that, or leave it out"
    elif not isinstance(path, (str, os.PathLike)):
        yield f"nvme_path={path!r} of Offload: offload_optimizer='nvme' needs a folder on a local disk"
    elif not Path(path).is_dir():
        yield f"nvme_path={str(path)!r} of Offload is no folder on this machine: make it, or give another"
