"""Carries out a rank program's all-reduces, reduce-scatters and all-gathers by messages between two ranks.

`by_hand` stands between a program and its comm: it answers the program's `Start` and `Wait` itself, and yields the
`Post`, `Expect` and `Wait` of a `HandProgram` in their place. All else passes through. A start posts the first round,
so that it is on its way while the program goes on; its wait does the others. Ranks must wait for the collectives of a
group in one order, as the programs of one mesh-wide graph do.

Every collective has a channel of its own (its group and its number there), so that its messages never meet those of
another, or those of a pipeline. A bucket is one buffer a dtype, and a message has a part of each. Partial sums travel
in the dtype of the tensor, as in torch's: below 32 bits each of the k - 1 additions rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any

import torch

from ..partitioner.collective_programs import KINDS, even
from ..partitioner.hand_cost import program_for
from ..partitioner.mesh import Mesh
from ..partitioner.transfer import Transfer
from .comm import Expect, Post, Program, Start, Wait, check, cut, join, seen
from .faults import MismatchError

_FOLD = {
    "sum": lambda a, b: a.add_(b),
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
}


def by_hand(program: Program, name: str, mesh: Mesh, rank: int) -> Program:
    """The program with its collectives written out as messages.

    Args:
        name: of `collective_programs.ALGORITHMS`, "server:S", or "auto".
    """
    counts: dict[tuple[str, ...], itertools.count] = {}
    answer: Any = None
    try:
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = None
            if isinstance(request, Start) and _written_out(request, mesh):
                axes = request.transfers[0].axes
                channel = channel_of(axes, mesh, next(counts.setdefault(axes, itertools.count())))
                answer = _Run(request, name, mesh, rank, channel)
                yield from answer.begin()
            elif isinstance(request, Wait) and isinstance(request.handle, _Run):
                answer = yield from request.handle.end()
            else:
                answer = yield request
            del request
    finally:
        program.close()


def _written_out(start: Start, mesh: Mesh) -> bool:
    """A start of a kind that has programs, in a group of more than one rank."""
    first = start.transfers[0] if start.transfers else None
    return first is not None and first.kind in KINDS and mesh.group_size(first.axes) > 1


def channel_of(axes: tuple[str, ...], mesh: Mesh, number: int) -> int:
    """A number of its own for the n-th collective over these axes; 2^16 may be under way at once."""
    ordered = [p for n in range(1, len(mesh.names) + 1) for p in itertools.permutations(mesh.names, n)]
    return ((1 + ordered.index(axes)) << 16) + number % (1 << 16)


class _Buffer:
    """The tensors of one dtype, one after another chunk by chunk; `at`: where each chunk begins."""

    def __init__(self, flat: torch.Tensor, sizes: Sequence[int]):
        self.flat, self.at = flat, (0, *itertools.accumulate(sizes))

    def pieces(self, chunks: tuple[int, ...]) -> list[torch.Tensor]:
        """Views of the chunks, neighbours as one."""
        runs: list[tuple[int, int]] = []
        for c in chunks:
            start, stop = self.at[c], self.at[c + 1]
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return [self.flat[a:b] for a, b in runs]

    def part(self, chunks: tuple[int, ...]) -> torch.Tensor:
        """The chunks as one flat tensor: a view where they are neighbours."""
        found = self.pieces(chunks)
        return found[0] if len(found) == 1 else torch.cat(found)

    def put(self, chunks: tuple[int, ...], x: torch.Tensor, fold: Any) -> None:
        """Add to the chunks, or replace them."""
        at = 0
        for piece in self.pieces(chunks):
            came = x[at : at + piece.numel()]
            fold(piece, came) if fold else piece.copy_(came)
            at += piece.numel()

    def length(self, chunks: tuple[int, ...]) -> int:
        return sum(self.at[c + 1] - self.at[c] for c in chunks)


class _Run:
    """One collective of one rank, under way."""

    def __init__(self, start: Start, name: str, mesh: Mesh, rank: int, channel: int):
        check(start)
        first = start.transfers[0]
        if first.op != "sum" and any(x.is_complex() for x in start.tensors):
            raise MismatchError(f"{start}: there is no {first.op} of complex numbers")
        self.transfers, self.kind, self.channel = start.transfers, first.kind, channel
        self.fold = _FOLD[first.op]
        self.group = mesh.group(first.axes, rank)
        self.member = self.group.index(rank)
        self.program = program_for(name, self.kind, first.axes, mesh, _whole_bytes(start))
        self.dtypes = [x.dtype for x in start.tensors]
        self.buffers = [
            self._buffer([(t, x) for t, x in zip(start.transfers, start.tensors, strict=True) if x.dtype == d])
            for d in dict.fromkeys(self.dtypes)
        ]
        self.text = f"{start} by {self.program.name}"
        self.rounds = iter(self.program.of(self.member))
        self.coming: tuple[Any, ...] = ()
        self.sent: list[Any] = []

    def _buffer(self, pairs: list[tuple[Transfer, torch.Tensor]]) -> _Buffer:
        """The tensors of one dtype; memory of its own, that nobody else writes to."""
        if self.kind == "all_reduce":
            flat = _own([x.reshape(-1) for _, x in pairs])
            return _Buffer(flat, even(flat.numel(), self.program.chunks))
        k, (_, x) = self.program.members, pairs[0]
        sizes = [sum(math.prod(_piece(t, m)) for t, _ in pairs) for m in range(k)]
        chunks = [n for size in sizes for n in even(size, self.program.parts)]
        if self.kind == "reduce_scatter":
            cuts = [cut(y, t) for t, y in pairs]
            return _Buffer(_own([c[m].reshape(-1) for m in range(k) for c in cuts]), chunks)
        made = _Buffer(torch.empty(sum(sizes), dtype=x.dtype, device=x.device), chunks)
        made.put(self._mine(), _own([seen(y, t).reshape(-1) for t, y in pairs]), None)
        return made

    def _mine(self, member: int | None = None) -> tuple[int, ...]:
        """The chunks of a member in a gather or scatter."""
        m, parts = self.member if member is None else member, self.program.parts
        return tuple(range(m * parts, (m + 1) * parts))

    def begin(self) -> Generator[Any, Any, None]:
        """Send and expect what the next round has."""
        found = next(self.rounds, None)
        if found is None:
            self.coming = ()
            return
        sends, receives = found
        coming = []
        for m in receives:
            kinds = tuple(((b.length(m.chunks),), b.flat.dtype) for b in self.buffers)
            coming.append((m, (yield Expect(self.group[m.source], kinds, self.text, self.channel))))
        for m in sends:
            parts = tuple(b.part(m.chunks) for b in self.buffers)
            self.sent.append((yield Post(self.group[m.to], parts, self.text, self.channel)))
        self.coming = (coming,)

    def end(self) -> Generator[Any, Any, list[torch.Tensor]]:
        """The other rounds; the results, which are nobody else's once all that was sent has gone."""
        while self.coming:
            for m, handle in self.coming[0]:
                parts = yield Wait(handle)
                for buffer, x in zip(self.buffers, parts, strict=True):
                    buffer.put(m.chunks, x, self.fold if m.add else None)
                del parts
            yield from self.begin()
        for handle in self.sent:
            yield Wait(handle)
        self.sent.clear()
        return self._results()

    def _results(self) -> list[torch.Tensor]:
        out: list[torch.Tensor] = [b.flat for b in self.buffers] * len(self.transfers)
        for dtype, buffer in zip(dict.fromkeys(self.dtypes), self.buffers, strict=True):
            which = [i for i, d in enumerate(self.dtypes) if d == dtype]
            for i, x in zip(which, self._read(buffer, [self.transfers[i] for i in which]), strict=True):
                out[i] = x
        return out[: len(self.transfers)]

    def _read(self, buffer: _Buffer, transfers: list[Transfer]) -> list[torch.Tensor]:
        if self.kind == "all_gather":
            parts: list[list[torch.Tensor]] = [[] for _ in transfers]
            for m in range(self.program.members):
                sizes = [math.prod(_piece(t, m)) for t in transfers]
                for own, t, x in zip(parts, transfers, buffer.part(self._mine(m)).split(sizes), strict=True):
                    own.append(x.reshape(_piece(t, m)))
            return [join(p, t) for p, t in zip(parts, transfers, strict=True)]
        whole = buffer.flat if self.kind == "all_reduce" else buffer.part(self._mine())
        shapes = [t.out_shape for t in transfers]
        pieces = whole.split([math.prod(s) for s in shapes])
        if len(shapes) > 1 or whole.numel() < buffer.flat.numel():
            pieces = [p.clone() for p in pieces]  # the rest of the buffer can be freed
        return [p.reshape(s) for p, s in zip(pieces, shapes, strict=True)]


def _piece(transfer: Transfer, member: int) -> tuple[int, ...]:
    """The shape of a member's piece of a gather or scatter."""
    shape = list(transfer.view)
    if transfer.has_split:
        shape[transfer.split_dim] = transfer.split_sizes[member]
    if transfer.has_gather:
        shape[transfer.gather_dim] = transfer.gather_sizes[member]
    return tuple(shape)


def _own(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts as one flat tensor in memory of its own."""
    if len(parts) > 1:
        return torch.cat(parts)
    return parts[0].resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _whole_bytes(start: Start) -> int:
    """Bytes of what is reduced, or of what a gather ends with."""
    if start.transfers[0].kind == "all_gather":
        pairs = zip(start.transfers, start.tensors, strict=True)
        return sum(math.prod(t.out_shape) * x.element_size() for t, x in pairs)
    return sum(x.nbytes for x in start.tensors)
