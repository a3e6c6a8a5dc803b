"""That all processes captured the same program and made the same plan, before any of them runs it.

Each process captures and plans by itself. What could make two differ (another model, another library, a rule found on
one and timed out on another) would show as a hang or a wrong number; a digest of program and plan shows it at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from ..partitioner.program import Program
from ..partitioner.transfer import Transfer
from .comm import Comm, Start, Wait
from .faults import MismatchError

WORDS = 4
"""64-bit words of the digest (SHA-256)."""


def check_agreement(program: Program, comm: Comm, device: torch.device, options: str = "") -> None:
    """Raises:
    MismatchError: the processes' programs, plans, or options of running them differ.
    """
    axes = tuple(a for a in program.mesh.names if program.mesh.sizes[a] > 1)
    if len(comm.ranks) == program.mesh.world_size or not axes:
        return
    digest = hashlib.sha256((program.plan.to_text() + _text(program) + options).encode()).digest()
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(WORDS)]
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    largest, smallest = (comm.run([_bound(mine, axes, op)])[0] for op in ("max", "min"))  # type: ignore[list-item]
    if not torch.equal(largest, smallest):
        raise MismatchError(
            "the processes captured different programs or made different plans: they must run the same script on the "
            "same model with the same versions of torch and meshwright. Compare compiled.dump(...) of two ranks, or "
            "give all the same plan="
        )


def _text(program: Program) -> str:
    """The captured program, one call a line."""
    lines = []
    for node in program.captured.fx.nodes:
        name = getattr(node.target, "__name__", None) or str(node.target)
        lines.append(f"{node.name} {name} {node.args} {dict(node.kwargs)}")
    return "\n".join(lines)


def _bound(mine: torch.Tensor, axes: tuple[str, ...], op: str) -> Iterator[Any]:
    transfer = Transfer("all_reduce", axes, tuple(mine.shape), tuple(mine.shape), op=op)
    (found,) = yield Wait((yield Start((transfer,), (mine,), where="comparing plans")))
    return found
