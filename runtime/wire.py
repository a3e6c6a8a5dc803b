"""One request as messages of torch.distributed: what is packed, what is called, how the results are read.

    all_gather       all_gather_single; where pieces are uneven, all_to_all_single of copies (exact bytes, no padding)
    all_reduce       all_reduce of one flat buffer a dtype
    reduce_scatter   NCCL: reduce_scatter_single. gloo: all_to_all_single and a local sum, b (k - 1) / k bytes; its own
                     reduce-scatter sends 2 b (k - 1) / k
    all_to_all       all_to_all_single
    permute          batched isend and irecv
    halo             all_to_all_single of the rows that others need; what a rank keeps is not sent

A bucket is one message: the parts for a member, one after the other. Moves carry bytes, so every dtype is fine; sums
see complex as pairs of reals, and bool as uint8 with max for sum. Nothing is copied where one tensor is cut or joined
along its leading dim. On gloo an all-to-all of copies starts in half the time of the other collectives, so small
gathers and all-reduces go that way (an all-reduce of k > 2 ranks then sends b (k - 1) bytes, counted as
2 b (k - 1) / k).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ..partitioner.transfer import Transfer
from .comm import Expect, Post, Start, cut, join, reduce_parts, seen
from .faults import MismatchError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_REDUCIBLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_FLAT = torch.contiguous_format
_SMALL_PAIR, _SMALL = 65536, 8192
"""Bytes below which gloo all-reduces by an all-to-all of copies: between two ranks (no more bytes), and more."""

Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Group:
    """The ranks of a collective in the order of `Mesh.group`, and their process group (None for one rank alone)."""

    process_group: Any
    ranks: tuple[int, ...]
    index: int
    nccl: bool

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Of each place in the process group (which is in order of rank), the index in `ranks`."""
        return tuple(sorted(range(len(self.ranks)), key=lambda i: self.ranks[i]))

    @cached_property
    def in_order(self) -> bool:
        return self.places == tuple(range(len(self.ranks)))


@dataclass(slots=True)
class Pending:
    """Calls under way, and how to read the results; `keep` holds what the calls read and write."""

    group: Group
    works: list[Any]
    finish: Callable[[], Results]
    keep: Any = None

    @property
    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def results(self) -> Results:
        for work in self.works:
            work.wait()
        return self.finish()


def begin(start: Start, group: Group) -> Pending:
    """Start the calls of a request."""
    if len(group.ranks) == 1:
        pairs = zip(start.transfers, start.tensors, strict=True)
        results = tuple(x.clone(memory_format=_FLAT).reshape(t.out_shape) for t, x in pairs)
        return Pending(group, [], lambda: results)
    return _BEGIN[start.transfers[0].kind](start, group)


def send(post: Post, group: Any) -> Pending:
    """Begin to send tensors to a rank; they are kept, and must not be written to, until they have gone."""
    kept = [x.contiguous() for x in post.tensors]
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, _real(x), post.to, group, post.channel) for x in kept])
    return Pending(Group(None, (post.to,), 0, False), works, lambda: (), kept)


def receive(expect: Expect, rank: int, group: Any, nccl: bool) -> Pending:
    """Begin to receive tensors from a rank."""
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    made = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in expect.kinds)
    ops = [dist.P2POp(dist.irecv, _real(x), expect.source, group, expect.channel) for x in made]
    works = dist.batch_isend_irecv(ops)
    return Pending(Group(None, (expect.source, rank), 1, nccl), works, lambda: made)


def _real(x: torch.Tensor) -> torch.Tensor:
    """Bytes of the same memory where a message cannot carry the dtype."""
    return x if x.dtype in _REDUCIBLE else torch.view_as_real(x) if x.is_complex() else x.reshape(-1).view(torch.uint8)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The elements as a flat run of bytes: of `x` itself where it is contiguous."""
    if x.is_complex():
        x = x.resolve_conj()
    return x.resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of the parts, one after the other; of a single part without a copy."""
    return _as_bytes(parts[0]) if len(parts) == 1 else torch.cat([_as_bytes(p) for p in parts])


def _typed(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Bytes as a tensor, in place where they are aligned."""
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(*shape) if shape else flat.view(dtype).view(())


def _leads(transfer: Transfer, dim: int) -> bool:
    """Parts along `dim` lie one after the other in memory."""
    return all(n == 1 for n in transfer.view[:dim])


def _part_shape(transfer: Transfer, sender: int, receiver: int) -> tuple[int, ...]:
    """The shape of what one member sends to another, in all kinds that exchange parts."""
    shape = list(transfer.view)
    if transfer.has_split:
        shape[transfer.split_dim] = transfer.split_sizes[receiver]
    if transfer.has_gather:
        shape[transfer.gather_dim] = transfer.gather_sizes[sender]
    return tuple(shape)


def _received(start: Start, group: Group, sender: int) -> list[tuple[tuple[int, ...], int]]:
    """Of each transfer, shape and bytes of what comes from a member."""
    shapes = [_part_shape(t, sender, group.index) for t in start.transfers]
    return [(s, math.prod(s) * x.element_size()) for s, x in zip(shapes, start.tensors, strict=True)]


def _reader(start: Start, group: Group, got: torch.Tensor, reduce: bool) -> Callable[[], Results]:
    """Reads the results out of the members' messages, which lie in `got` in the order of places."""
    transfers, dtypes = start.transfers, [x.dtype for x in start.tensors]
    shapes = [_received(start, group, m) for m in group.places]

    def read() -> Results:
        first = transfers[0]
        if len(transfers) == 1 and not reduce and group.in_order and _leads(first, first.gather_dim):
            return (_typed(got, dtypes[0], first.out_shape),)
        parts: list[list[torch.Tensor]] = [[got] * len(group.ranks) for _ in transfers]
        at = 0
        for member, message in zip(group.places, shapes, strict=True):
            for i, (shape, nbytes) in enumerate(message):
                parts[i][member] = _typed(got[at : at + nbytes], dtypes[i], shape)
                at += nbytes
        if reduce:
            return tuple(reduce_parts(p, t.op).reshape(t.out_shape) for p, t in zip(parts, transfers, strict=True))
        return tuple(join(p, t) for p, t in zip(parts, transfers, strict=True))

    return read


def _outgoing(start: Start, group: Group) -> tuple[torch.Tensor, list[int]]:
    """The message for each place, one after the other, and their bytes."""
    first, k = start.transfers[0], len(group.ranks)
    pairs = zip(start.tensors, start.transfers, strict=True)
    parts = [cut(x, t) if t.has_split else (seen(x, t),) * k for x, t in pairs]
    sizes = [sum(p[m].numel() * p[m].element_size() for p in parts) for m in group.places]
    if len(parts) == 1 and first.has_split and group.in_order and _leads(first, first.split_dim):
        return _as_bytes(seen(start.tensors[0], first)), sizes
    return _packed([p[m] for m in group.places for p in parts]), sizes


def _exchange(start: Start, group: Group, reduce: bool) -> Pending:
    """Each member gets its part from each: cut parts, or copies where the transfer does not split."""
    sent, sizes = _outgoing(start, group)
    came = [sum(n for _, n in _received(start, group, m)) for m in group.places]
    got = sent.new_empty(sum(came))
    work = dist.all_to_all_single(got, sent, came, sizes, group=group.process_group, async_op=True)
    return Pending(group, [work], _reader(start, group, got, reduce), (sent, got))


def _all_to_all(start: Start, group: Group) -> Pending:
    return _exchange(start, group, reduce=False)


def _halo(start: Start, group: Group) -> Pending:
    """Each member is sent the rows it needs."""
    transfers, dtypes, me = start.transfers, [x.dtype for x in start.tensors], group.index
    parts = [cut(x, t) for x, t in zip(start.tensors, transfers, strict=True)]
    others = [m for m in group.places if m != me]
    sent = _packed([p[m] for m in others for p in parts])
    sizes = [0 if m == me else sum(p[m].nbytes for p in parts) for m in group.places]
    shapes = {m: [_came(t, m) for t in transfers] for m in group.places}
    lengths = {m: [math.prod(s) * d.itemsize for s, d in zip(shapes[m], dtypes, strict=True)] for m in others}
    came = [0 if m == me else sum(lengths[m]) for m in group.places]
    got = sent.new_empty(sum(came))
    work = dist.all_to_all_single(got, sent, came, sizes, group=group.process_group, async_op=True)

    def read() -> Results:
        pieces = iter(got.split([n for m in others for n in lengths[m]]))
        for m in others:
            for i, shape in enumerate(shapes[m]):
                held[i][m] = _typed(next(pieces), dtypes[i], shape)
        return tuple(join(h, t) for h, t in zip(held, transfers, strict=True))

    held = [list(p) for p in parts]
    return Pending(group, [work], read, (sent, got))


def _came(transfer: Transfer, sender: int) -> tuple[int, ...]:
    """The shape of what a member gives to this rank in a halo."""
    at = transfer.gather_dim
    return (*transfer.view[:at], transfer.gets[sender], *transfer.view[at + 1 :])


def _all_gather(start: Start, group: Group) -> Pending:
    nbytes = sum(x.nbytes for x in start.tensors)
    if any(len(set(t.gather_sizes)) > 1 for t in start.transfers) or (not group.nccl and nbytes <= _SMALL_PAIR):
        return _exchange(start, group, reduce=False)
    sent = _packed([seen(x, t) for x, t in zip(start.tensors, start.transfers, strict=True)])
    got = sent.new_empty(len(group.ranks) * sent.numel())
    work = dist.all_gather_single(got, sent, group=group.process_group, async_op=True)
    return Pending(group, [work], _reader(start, group, got, False), (sent, got))


def _reduce_scatter(start: Start, group: Group) -> Pending:
    dtype = start.tensors[0].dtype
    even = all(len(set(t.split_sizes)) == 1 for t in start.transfers)
    plain = dtype in _REDUCIBLE and all(x.dtype == dtype for x in start.tensors)
    if not (group.nccl and even and plain):
        return _exchange(start, group, reduce=True)
    sent = _outgoing(start, group)[0].view(dtype)
    got = sent.new_empty(sent.numel() // len(group.ranks))
    op = _OPS[start.transfers[0].op]
    work = dist.reduce_scatter_single(got, sent, op, group=group.process_group, async_op=True)
    sizes = [math.prod(t.out_shape) for t in start.transfers]
    shapes = [t.out_shape for t in start.transfers]

    def read() -> Results:
        return tuple(p.view(s) for p, s in zip(got.split(sizes), shapes, strict=True))

    return Pending(group, [work], read, (sent, got))


def _all_reduce(start: Start, group: Group) -> Pending:
    small = _SMALL_PAIR if len(group.ranks) == 2 else _SMALL
    if not group.nccl and sum(x.nbytes for x in start.tensors) <= small:
        return _exchange(start, group, reduce=True)
    works, results, keep = [], list(start.tensors), []
    for dtype in dict.fromkeys(x.dtype for x in start.tensors):
        which = [i for i, x in enumerate(start.tensors) if x.dtype == dtype]
        tensors = [start.tensors[i] for i in which]
        flat = _flat(tensors, start.consume)
        wire, op = _reducible(flat, start.transfers[0].op)
        works.append(dist.all_reduce(wire, _OPS[op], group=group.process_group, async_op=True))
        keep.append((which, [x.numel() for x in tensors], flat, wire))
    shapes = [t.out_shape for t in start.transfers]

    def read() -> Results:
        for which, sizes, flat, wire in keep:
            if wire.dtype.itemsize != flat.dtype.itemsize and not flat.is_complex():
                flat = wire.to(flat.dtype)
            for i, part in zip(which, flat.split(sizes), strict=True):
                results[i] = part.view(shapes[i])
        return tuple(results)

    return Pending(group, works, read, keep)


def _flat(tensors: list[torch.Tensor], consume: bool) -> torch.Tensor:
    """One flat buffer that may be overwritten: the tensor's own memory if it may be consumed."""
    if len(tensors) > 1:
        return torch.cat([x.reshape(-1) for x in tensors])
    x = tensors[0]
    if consume and x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x.view(-1)
    return x.resolve_conj().resolve_neg().clone(memory_format=_FLAT).view(-1)


def _reducible(flat: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """The buffer as a dtype that backends reduce (the same memory where one fits), and the op on it."""
    if flat.is_complex():
        if op != "sum":
            raise MismatchError(f"there is no {op} of complex numbers")
        return torch.view_as_real(flat), op
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8), "max" if op == "sum" else op
    if flat.dtype in _REDUCIBLE:
        return flat, op
    return flat.to(torch.float32 if flat.dtype.is_floating_point else torch.int64), op


def _permute(start: Start, group: Group) -> Pending:
    """One message to each peer; transfers of a bucket may have different peers."""
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[int]] = {}
    for i, (t, x) in enumerate(zip(start.transfers, start.tensors, strict=True)):
        if x.numel() and t.peers[0] != group.index:
            outgoing.setdefault(t.peers[0], []).append(x)
        if math.prod(t.out_shape):
            incoming.setdefault(t.peers[1], []).append(i)
    nbytes = [math.prod(t.out_shape) * x.element_size() for t, x in zip(start.transfers, start.tensors, strict=True)]
    own = [start.tensors[i] for i in incoming.get(group.index, [])]
    first = start.tensors[0]
    got = {
        peer: _packed(own).clone()
        if peer == group.index
        else torch.empty(sum(nbytes[i] for i in which), dtype=torch.uint8, device=first.device)
        for peer, which in incoming.items()
    }
    sent = {peer: _packed(tensors) for peer, tensors in outgoing.items()}
    pg, ranks = group.process_group, group.ranks
    calls = [dist.P2POp(dist.irecv, b, ranks[p], pg) for p, b in got.items() if p != group.index]
    calls += [dist.P2POp(dist.isend, b, ranks[p], pg) for p, b in sent.items()]
    transfers, dtypes = start.transfers, [x.dtype for x in start.tensors]

    def read() -> Results:
        results = [first.new_empty(t.out_shape, dtype=d) for t, d in zip(transfers, dtypes, strict=True)]
        for peer, which in incoming.items():
            for i, part in zip(which, got[peer].split([nbytes[i] for i in which]), strict=True):
                results[i] = _typed(part, dtypes[i], transfers[i].out_shape)
        return tuple(results)

    return Pending(group, dist.batch_isend_irecv(calls) if calls else [], read, (got, sent))


_BEGIN: dict[str, Callable[[Start, Group], Pending]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "halo": _halo,
}
