"""Measures the collectives of one axis of a mesh, with the comm that compiled programs use.

Each kind runs at eight sizes, all groups of the axis at once as in a training step. A size is timed in short batches of
repeats: a batch takes as long as its slowest rank, and the fastest batch counts. Short, because what else runs on the
machine breaks into a long one for sure; by batch, because a rank that comes late to one finds the others' parts there,
and seems fast. In one process the ranks take turns, so the seconds of one are those of all over their number.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..partitioner.mesh import Mesh
from ..partitioner.transfer import Transfer
from .comm import Comm, Expect, Post, Program, Start, Wait
from .measure_device import finish

KINDS = ("permute", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")
HAND = ("message", "stream", "messages", "buffer")
"""What hand-written collectives are made of: `hand_cost` says what each is."""
_POINTS, _BATCHES = 8, 16
_LARGEST = {"cpu": 2**23, "cuda": 2**28}
_SMALLEST, _REPEATS, _REPEATED = 2**12, 4, 2**21
"""Bytes of the whole tensor of the first size; repeats of a batch, fewer where they would move more bytes than that."""


@dataclass
class Case:
    """A kind at one size: `sent` bytes by the ring formula, and of each batch the seconds of one call, on the slowest
    of this process's ranks."""

    kind: str
    nbytes: int
    sent: float
    seconds: list[float] = field(default_factory=lambda: [0.0] * _BATCHES)


def measure_axis(comm: Comm, mesh: Mesh, axis: str, device: torch.device) -> list[Case]:
    """The sweeps of every kind over one axis; this process's ranks only."""
    k = mesh.sizes[axis]
    sizes = [round(_SMALLEST * (_LARGEST[device.type] / _SMALLEST) ** (i / (_POINTS - 1))) for i in range(_POINTS)]
    wholes = [-(-size // (4 * k)) * 4 * k for size in sizes]  # float32 elements that divide among the ranks
    cases = [Case(kind, n, ring_bytes(kind, n, k)) for kind in kinds_on(device) for n in wholes]
    comm.run([sweep(mesh, axis, rank, cases, device) for rank in comm.ranks])
    if len(comm.ranks) > 1:
        for case in cases:
            case.seconds = [s / mesh.world_size for s in case.seconds]
    return cases


def kinds_on(device: torch.device) -> tuple[str, ...]:
    """What is measured: messages too, where collectives may be written by hand."""
    return KINDS if device.type == "cuda" else (*KINDS, *HAND)


def ring_bytes(kind: str, nbytes: int, ranks: int) -> float:
    """Bytes that one rank sends for a whole tensor of `nbytes`."""
    if kind in ("permute", *HAND):
        return float(nbytes)
    return nbytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def sweep(mesh: Mesh, axis: str, rank: int, cases: list[Case], device: torch.device) -> Program:
    """Times the cases on one rank, one after another, into their `seconds`: a batch for each of these."""
    index, group = mesh.coord(rank)[axis], mesh.group((axis,), rank)
    for case in cases:
        transfer, elements = None, case.nbytes // 4
        if case.kind not in HAND:
            transfer, elements = transfer_for(case.kind, axis, index, mesh.sizes[axis], case.nbytes // 4)
        x = torch.zeros(elements, device=device)
        repeats = max(1, min(_REPEATS, _REPEATED // case.nbytes))
        for batch in range(len(case.seconds) + 1):
            count = repeats if batch else 1  # one call warms up
            finish(device)
            start = time.perf_counter()
            for _ in range(count):
                if transfer is not None:
                    yield Wait((yield Start((transfer,), (x,))))
                elif case.kind == "buffer":
                    x.clone()
                else:
                    yield from _messages(case.kind, group, index, x)
            finish(device)
            taken = (time.perf_counter() - start) / (count * (2 if case.kind == "message" else 1))
            if batch:
                case.seconds[batch - 1] = max(taken, case.seconds[batch - 1])


def _messages(kind: str, group: Sequence[int], index: int, x: torch.Tensor) -> Generator[Any, Any, None]:
    """As hand-written collectives send: a message to the second member and one back; one to it; of each to the next."""
    k = len(group)
    if kind == "messages":
        yield from _exchange(x, group[(index + 1) % k], group[index - 1])
    if kind != "messages" and index < 2:
        yield from _exchange(x, *((group[1], None) if index == 0 else (None, group[0])))
    if kind == "message" and index < 2:
        yield from _exchange(x, *((None, group[1]) if index == 0 else (group[0], None)))


def _exchange(x: torch.Tensor, to: int | None, source: int | None) -> Generator[Any, Any, None]:
    """Send, or receive and add, or both at once."""
    coming = going = None
    if source is not None:
        coming = yield Expect(source, ((tuple(x.shape), x.dtype),), "calibrating")
    if to is not None:
        going = yield Post(to, (x,), "calibrating")
    if coming is not None:
        x.add_((yield Wait(coming))[0])
    if going is not None:
        yield Wait(going)


def transfer_for(kind: str, axis: str, index: int, k: int, n: int) -> tuple[Transfer, int]:
    """The transfer of a whole tensor of n elements as member `index` of k sees it, and its local elements."""
    part = (n // k,) * k
    if kind == "all_gather":
        return Transfer(kind, (axis,), (n // k,), (n,), gather_dim=0, gather_sizes=part), n // k
    if kind == "reduce_scatter":
        return Transfer(kind, (axis,), (n,), (n // k,), split_dim=0, split_sizes=part), n
    if kind == "all_to_all":
        both = Transfer(
            kind, (axis,), (n,), (n,), gather_dim=0, gather_sizes=part, split_dim=0, split_sizes=part
        )  # fmt: skip
        return both, n
    peers = ((index + 1) % k, (index - 1) % k) if kind == "permute" else (-1, -1)
    return Transfer(kind, (axis,), (n,), (n,), peers=peers), n
