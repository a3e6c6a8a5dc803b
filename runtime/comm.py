"""How a rank's program talks: it is a generator that yields requests and is sent the answers.

    handle = yield Start(transfers, tensors)     begins collectives, goes on at once
    handle = yield Post(rank, tensors)           sends to one rank, goes on at once; waiting for it is optional
    handle = yield Expect(rank, kinds)           begins to receive from one rank what its next `Post` sends
    results = yield Wait(handle)                 the list of results, which is the program's own
    sent = yield Pause(value)                    stops until the caller resumes the program with a value

Several transfers in one `Start` are a bucket: same kind, axes and op, sent as one message. A comm runs the programs of
its `ranks`: `InProcessComm` those of all ranks, `DistributedComm` that of its own.
The runner still holds what it sends while the program runs on, so a program that wants to free a result early moves it
out of the list (`take`). Results never share memory with the tensors given, nor between ranks, and are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..partitioner.transfer import Transfer, sent_bytes
from .faults import MismatchError


@dataclass(slots=True)
class Start:
    """Begin the transfers, one a tensor. `where`: the user's source line. `consume`: tensors may be overwritten."""

    transfers: tuple[Transfer, ...]
    tensors: tuple[torch.Tensor, ...]
    where: str = ""
    consume: bool = False

    def __str__(self) -> str:
        first = self.transfers[0]
        op = f"({first.op})" if first.kind in ("all_reduce", "reduce_scatter") else ""
        what = ", ".join(f"{_short(x.dtype)}[{', '.join(map(str, x.shape))}]" for x in self.tensors)
        at = f" at {self.where}" if self.where else ""
        return f"{first.kind}{op} over {'+'.join(first.axes)} of {what}{at}"


@dataclass(slots=True)
class Wait:
    """Wait for the results of a `Start` or an `Expect`, once; the answer is a list. Of a `Post`, an empty one."""

    handle: Any


@dataclass(slots=True)
class Post:
    """Send tensors to a rank; its n-th `Expect` of this one on the same channel gets the n-th.

    They are not written to in this run, or not until a `Wait` for the answer says that they have gone.
    """

    to: int
    tensors: tuple[torch.Tensor, ...]
    where: str = ""
    channel: int = 0

    def __str__(self) -> str:
        what = ", ".join(f"{_short(x.dtype)}[{', '.join(map(str, x.shape))}]" for x in self.tensors)
        return f"send of {what} to rank {self.to}" + (f" at {self.where}" if self.where else "")

    @property
    def kinds(self) -> Kinds:
        return tuple((tuple(x.shape), x.dtype) for x in self.tensors)


@dataclass(slots=True)
class Expect:
    """Receive from a rank tensors of these (shape, dtype); the answer is a handle to wait for, once."""

    source: int
    kinds: Kinds
    where: str = ""
    channel: int = 0

    def __str__(self) -> str:
        what = ", ".join(f"{_short(dtype)}[{', '.join(map(str, shape))}]" for shape, dtype in self.kinds)
        return f"receive of {what} from rank {self.source}" + (f" at {self.where}" if self.where else "")


Kinds = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(slots=True)
class Pause:
    """Stop with a value; the answer is what `resume` sends."""

    value: Any


Program = Generator[Start | Wait | Post | Expect | Pause, Any, Any]
Counts = dict[str, tuple[int, int]]
"""kind -> (calls, payload bytes sent)."""


class Comm(Protocol):
    """What runs rank programs. Lists are by rank, in the order of `ranks`."""

    ranks: tuple[int, ...]
    sent: dict[int, Counts]

    def run(self, programs: Sequence[Program]) -> list[Any]:
        """Run to the end; the values they return."""
        ...

    def prepare_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make ready for messages from the first rank of each pair to the second. Every process calls it alike."""
        ...

    def run_until_pause(self, programs: Sequence[Program]) -> list[Any]:
        """Run until each pauses or ends; the values they paused with or returned."""
        ...

    def resume(self, programs: Sequence[Program], values: Sequence[Any]) -> list[Any]:
        """Send each paused program a value and run until each pauses again or ends."""
        ...


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(start: Start) -> None:
    """That the request is whole: one tensor a transfer, each of the transfer's size, all of one kind, axes and op.

    Raises:
        MismatchError: it is not.
    """
    transfers, tensors = start.transfers, start.tensors
    if not transfers or len(transfers) != len(tensors):
        raise MismatchError(f"{len(transfers)} transfers for {len(tensors)} tensors, at {start.where}")
    first = transfers[0]
    for transfer, x in zip(transfers, tensors, strict=True):
        if x.numel() != math.prod(transfer.view):
            raise MismatchError(f"{start}: a tensor of shape {tuple(x.shape)} where {transfer.view} is expected")
        if transfer is not first and (transfer.kind, transfer.axes, transfer.op) != (first.kind, first.axes, first.op):
            raise MismatchError(f"{start}: a bucket holds one kind, axes and op; it also has {transfer}")


def take(box: Any) -> Any:
    """The content of a list that was sent, which is emptied; other values as they are."""
    if type(box) is not list:
        return box
    out = tuple(box)
    box.clear()
    return out


def signature(start: Start) -> tuple[Any, ...]:
    """What all members of a group must agree on: everything but the sizes that differ from member to member."""
    return tuple(
        (t.kind, t.op, x.dtype, _common_view(t), t.gather_dim, t.gather_sizes, t.split_dim, t.split_sizes)
        for t, x in zip(start.transfers, start.tensors, strict=True)
    )


def _common_view(transfer: Transfer) -> tuple[int, ...]:
    if transfer.kind == "permute":
        return ()
    at = transfer.gather_dim
    return transfer.view[:at] + transfer.view[at + 1 :] if transfer.has_gather else transfer.view


def add_counts(counts: Counts, start: Start, index: int, ranks: int) -> None:
    """Count one call, and the bytes that member `index` of `ranks` sends."""
    kind = start.transfers[0].kind
    calls, nbytes = counts.get(kind, (0, 0))
    for t, x in zip(start.transfers, start.tensors, strict=True):
        nbytes += sent_bytes(t, index, ranks, x.element_size())
    counts[kind] = (calls + 1, nbytes)


def count_sent(counts: Counts, post: Post) -> None:
    """Count one message between two ranks."""
    calls, nbytes = counts.get("send", (0, 0))
    counts["send"] = (calls + 1, nbytes + sum(x.numel() * x.element_size() for x in post.tensors))


def seen(x: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    """The local tensor in the shape the transfer sees."""
    return x.reshape(transfer.view)


def cut(x: torch.Tensor, transfer: Transfer) -> tuple[torch.Tensor, ...]:
    """What goes to each member (views), for the kinds that split and for halos."""
    if transfer.gives:
        whole = seen(x, transfer)
        return tuple(whole.narrow(transfer.gather_dim, start, length) for start, length in transfer.gives)
    return seen(x, transfer).split(transfer.split_sizes, transfer.split_dim)


def join(parts: Sequence[torch.Tensor], transfer: Transfer) -> torch.Tensor:
    """The result from each member's part, for the kinds that gather."""
    return torch.cat(list(parts), transfer.gather_dim).contiguous().reshape(transfer.out_shape)


def reduce_parts(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The sum, max or min in the order given, in new memory; a sum below 32 bits is taken in float32."""
    total = parts[0]
    if len(parts) == 1:
        return total.clone(memory_format=torch.contiguous_format)
    if op != "sum":
        fold = torch.maximum if op == "max" else torch.minimum
        for x in parts[1:]:
            total = fold(total, x)
        return total.contiguous()
    narrow = total.dtype.is_floating_point and total.dtype.itemsize < 4
    total = total.float() + parts[1] if narrow else total + parts[1]
    for x in parts[2:]:
        total.add_(x)
    return total.to(parts[0].dtype).contiguous()
