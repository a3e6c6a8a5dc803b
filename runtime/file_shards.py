"""Optimizer state in a file (ZeRO-Infinity): the optimizer steps a rank's shards a sub-group at a time.

    a sub-group    shards, or parts of a larger one, of at most `sub_group_size` elements together
    its step       parameter and gradient -> host; state file -> host (read ahead); the step; all but the gradient ->
                   the file (written behind); parameter -> device
    the file       each part has two slots; a step reads one and writes the other, and they change places when every
                   rank has written everything: a step is applied to all parameters of all ranks, or to none

What fails before that is undone: parameters that were stepped already are read from the slot that is still valid.

The optimizer is the one that the user made, of the shards themselves. A twin of it, with its groups and without hooks,
steps the parts; an element-wise optimizer does not see the difference. Parts of a larger shard start at multiples of
2^16 elements, where torch's vectorised loops start anew too.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.errors import MeshwrightError
from ..partitioner.offload import Offload
from .block_file import Block, BlockFile, FileError
from .host import OffloadReport, chosen
from .state import State

ALIGN = 1 << 16
PARAM = "parameter"


@dataclass(eq=False)
class Piece:
    """A shard, or a part of one, whose state is read, stepped and written as one.

    Attributes:
        name, start, stop: which elements of which shard.
        group: its place in the optimizer's groups.
        keys: {state: its dtype}, of those that are like the parameter and rest in the file.
        blocks: {(what, slot): number in the file}.
        slot: which of the two is valid.
        here: whether its states are in the file; not so before its first step.
        small: states that are not like it, such as a count of steps, in memory.
    """

    name: str
    start: int
    stop: int
    group: int
    keys: dict[str, torch.dtype]
    blocks: dict[tuple[str, int], int] = field(default_factory=dict)
    slot: int = 0
    here: bool = False
    small: dict[str, Any] = field(default_factory=dict)

    def what(self, key: str) -> str:
        return f"{key} of {self.name}" + (f" from element {self.start}" if self.start else "")


@dataclass(eq=False)
class Loaded:
    """A piece on the host: what the optimizer steps, and its states."""

    piece: Piece
    q: nn.Parameter
    states: dict[str, Any]

    @property
    def nbytes(self) -> int:
        per = sum(dtype.itemsize for dtype in self.piece.keys.values()) + 2 * self.q.element_size()
        return self.q.numel() * per


class FileShards:
    """The shards of one rank whose state rests in a file, with the interface of `HostShards`.

    Raises:
        FileError: the file cannot be made.
        MeshwrightError: the optimizer is none that steps parts of tensors, or the buffers are too few.
    """

    def __init__(self, state: State, index: int, offload: Offload):
        self.state, self.index, self.offload = state, index, offload
        self.away = {n: p for n, p in chosen(state, index, offload) if p.numel()}
        self.steps, self.peak = 0, 0
        self._down, self._up = [0, 0], [0, 0]
        self._stepped: list[tuple[Piece, dict[str, Any]]] = []
        self._seen: dict[str, int | None] = {}
        self._stale: set[str] = set()
        self._broken = ""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer is made from: the shards."""
        return self.state.all_of(self.index)

    # -- at first
    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the file, with room for the states that this optimizer will have."""
        self.pieces = list(self._cut(optimizer))
        per = 2 + max((len(p.keys) for p in self.pieces), default=0)
        self.depth = self.offload.buffer_count // per
        if self.depth < 1:
            raise MeshwrightError(
                f"buffer_count={self.offload.buffer_count} of Offload: {type(optimizer).__name__} needs {per} buffers "
                f"for a sub-group: give at least {per}, or {3 * per} to read, step and write at the same time"
            )
        blocks: list[Block] = []
        for piece in self.pieces:
            kinds = {PARAM: self.away[piece.name].dtype} | piece.keys
            for slot in (0, 1):
                for key, dtype in kinds.items():
                    piece.blocks[key, slot] = len(blocks)
                    blocks.append(Block(piece.what(key), (piece.stop - piece.start) * dtype.itemsize))
        self.file = BlockFile(self.offload.nvme_path or "", self.state.comm.ranks[self.index], blocks)
        for name, p in self.away.items():
            self.give(optimizer, name, p, dict(optimizer.state.pop(p, {})))

    def _cut(self, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
        names = {id(p): n for n, p in self.away.items()}
        for at, group in enumerate(optimizer.param_groups):
            keys = {dtype: _states(optimizer, at, dtype) for dtype in {p.dtype for p in group["params"]}}
            for p in group["params"]:
                if id(p) in names:
                    most = max(self.offload.sub_group_size // ALIGN * ALIGN, ALIGN)
                    size = most if p.numel() > self.offload.sub_group_size and p.is_contiguous() else p.numel()
                    for start in range(0, p.numel(), size):
                        yield Piece(names[id(p)], start, min(start + size, p.numel()), at, keys[p.dtype])

    def _sub_groups(self) -> deque[list[Piece]]:
        """What is to be stepped now, in the order of the file."""
        out: deque[list[Piece]] = deque()
        room = 0
        for piece in self.pieces:
            size = piece.stop - piece.start
            if self.away[piece.name].grad is None:
                continue
            if not out or size > room:
                out.append([])
                room = self.offload.sub_group_size
            out[-1].append(piece)
            room -= size
        return out

    # -- a step
    def stage(self, optimizer: torch.optim.Optimizer) -> None:
        """Step every sub-group; its new state goes to the slots that are not valid yet.

        Raises:
            FileError: reading or writing failed; `undo` takes back what was done.
        """
        if self._broken:
            raise FileError(self._broken)
        twin, todo, held = _twin(optimizer), self._sub_groups(), 0
        reads: deque[tuple[list[Loaded], Future[None]]] = deque()
        writes: deque[tuple[int, Future[None]]] = deque()
        self._stepped = []
        self._stale = {n for n, p in self.away.items() if self._seen[n] != p._version}
        with ThreadPoolExecutor(2, thread_name_prefix="meshwright-offload") as pool:
            try:
                while todo or reads or writes:
                    while todo and len(reads) + len(writes) < self.depth:
                        loaded = [self._loaded(piece) for piece in todo.popleft()]
                        held += sum(x.nbytes for x in loaded)
                        self.peak = max(self.peak, held)
                        reads.append((loaded, pool.submit(self._read, loaded)))
                    if reads:
                        loaded, read = reads.popleft()
                        read.result()
                        self._step(twin, optimizer, loaded)
                        writes.append((sum(x.nbytes for x in loaded), pool.submit(self._write, loaded)))
                        del loaded
                    while writes and (writes[0][1].done() or not reads):
                        nbytes, write = writes.popleft()
                        write.result()
                        held -= nbytes
            finally:
                wait([f for _, f in reads] + [f for _, f in writes])

    def _loaded(self, piece: Piece) -> Loaded:
        """Parameter and gradient on the host, and room for its states."""
        p = self.away[piece.name]
        assert p.grad is not None
        q = nn.Parameter(self._host(p.detach(), piece), requires_grad=True)
        q.grad = self._host(p.grad, piece)
        for x in (q, q.grad):
            self._count(self._down, piece, x)
        states: dict[str, Any] = {}
        if piece.here:
            states = {k: torch.empty(q.shape, dtype=d, pin_memory=self.pinned(p)) for k, d in piece.keys.items()}
            states |= {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in piece.small.items()}
        return Loaded(piece, q, states)

    def pinned(self, p: torch.Tensor) -> bool:
        """Whether host memory for this is page-locked."""
        return self.offload.pin_memory and p.is_cuda

    def _host(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        flat = x.reshape(-1)[piece.start : piece.stop]
        return torch.empty(flat.shape, dtype=x.dtype, pin_memory=self.pinned(x)).copy_(flat)

    @staticmethod
    def _count(where: list[int], piece: Piece, x: torch.Tensor) -> None:
        where[0] += piece.start == 0
        where[1] += x.nbytes

    def _read(self, loaded: list[Loaded]) -> None:
        """In a thread: the states; and what others have made of the parameter goes to the file, for `undo`."""
        for x in loaded:
            piece = x.piece
            if piece.name in self._stale:
                self.file.write(piece.blocks[PARAM, piece.slot], x.q)
            for key in piece.keys if piece.here else ():
                self.file.read(piece.blocks[key, piece.slot], x.states[key])

    def _step(self, twin: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, loaded: list[Loaded]) -> None:
        """Step these, and give the device its parameters."""
        of: dict[int, list[Loaded]] = defaultdict(list)
        for x in loaded:
            of[x.piece.group].append(x)
        twin.state = defaultdict(dict, {x.q: x.states for x in loaded if x.states})
        twin.param_groups = [
            {**optimizer.param_groups[at], "params": [x.q for x in some]} for at, some in of.items()
        ]
        twin.step()
        for x in loaded:
            piece, x.states, x.q.grad = x.piece, twin.state.get(x.q, {}), None
            small = {k: v for k, v in x.states.items() if k not in piece.keys}
            if new := [k for k, v in small.items() if isinstance(v, torch.Tensor) and v.shape == x.q.shape]:
                raise self._no_room(piece.name, new)
            self._stepped.append((piece, small))
            self._write_back(piece, x.q)
            self._count(self._up, piece, x.q)
        twin.state = defaultdict(dict)

    def _no_room(self, name: str, keys: list[str]) -> FileError:
        return FileError(
            f"{self.file.path} has no room for {', '.join(keys)} of {name}, which the optimizer did not keep when it "
            f"was made: set its options then, or keep its state on the host, offload='full'"
        )

    def _write_back(self, piece: Piece, value: torch.Tensor) -> None:
        p = self.away[piece.name].detach()
        if piece.stop - piece.start == p.numel():
            p.copy_(value.detach().view(p.shape))
        else:
            p.view(-1)[piece.start : piece.stop].copy_(value.detach())

    def _write(self, loaded: list[Loaded]) -> None:
        """In a thread: what was stepped."""
        for x in loaded:
            piece = x.piece
            self.file.write(piece.blocks[PARAM, 1 - piece.slot], x.q)
            for key in piece.keys:
                if isinstance(x.states.get(key), torch.Tensor):
                    self.file.write(piece.blocks[key, 1 - piece.slot], x.states[key].contiguous())

    def undo(self) -> None:
        """Parameters as before `stage`.

        Raises:
            FileError: the file does not give them back; names those that stay stepped.
        """
        lost: list[str] = []
        for piece, _ in self._stepped:
            p = self.away[piece.name]
            old = torch.empty(piece.stop - piece.start, dtype=p.dtype)
            try:
                self._write_back(piece, self.file.read(piece.blocks[PARAM, piece.slot], old))
            except FileError:
                lost.append(piece.name)
            self._seen[piece.name] = None
        self._stepped = []
        if lost:
            self._broken = (
                f"the optimizer's step failed, and {self.file.path} could not give back {len(lost)} parameters as they "
                f"were before it ({', '.join(lost[:3])}, ...): load the last checkpoint, compiled.load(path)"
            )
            raise FileError(self._broken)

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """What was staged is valid from now on; parameters whose state is on the device are stepped there."""
        for piece, small in self._stepped:
            piece.slot, piece.here, piece.small = 1 - piece.slot, True, small
            self._seen[piece.name] = self.away[piece.name]._version
        self._stepped = []
        self.steps += 1
        away = {id(p) for p in self.away.values()}
        before = [group["params"] for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in away]
            optimizer.step()
        finally:
            for group, params in zip(optimizer.param_groups, before, strict=True):
                group["params"] = params

    # -- checkpoints
    def kept(self, optimizer: torch.optim.Optimizer, name: str, p: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of a parameter, read whole; {} before its first step."""
        if name not in self.away:
            return optimizer.state.get(p, {})
        mine = [piece for piece in self.pieces if piece.name == name]
        if not all(piece.here for piece in mine):
            return {}
        out = dict(mine[0].small)
        for key, dtype in mine[0].keys.items():
            whole = torch.empty(p.numel(), dtype=dtype)
            for piece in mine:
                self.file.read(piece.blocks[key, piece.slot], whole[piece.start : piece.stop])
            out[key] = whole.view(p.shape)
        return out

    def give(self, optimizer: torch.optim.Optimizer, name: str, p: nn.Parameter, kept: dict[str, Any]) -> None:
        """Replace it; {}: as before its first step."""
        if name not in self.away:
            if kept:
                optimizer.state[p] = kept
            elif p.numel():
                optimizer.state.pop(p, None)
            return
        mine = [piece for piece in self.pieces if piece.name == name]
        like = {k for k, x in kept.items() if k != "step" and isinstance(x, torch.Tensor) and x.shape == p.shape}
        if wrong := sorted(like ^ mine[0].keys.keys()) if kept else []:
            raise self._no_room(name, wrong)
        for piece in mine:
            for key in piece.keys if kept else ():
                flat = kept[key].detach().reshape(-1)[piece.start : piece.stop]
                self.file.write(piece.blocks[key, piece.slot], flat.to("cpu").contiguous())
            piece.here, piece.small = bool(kept), {k: x for k, x in kept.items() if k not in piece.keys}
        self._seen[name], self._broken = None, ""

    def report(self, optimizer: torch.optim.Optimizer) -> OffloadReport:
        shards = list(self.state.all_of(self.index))
        device = sum(p.nbytes + (p.grad.nbytes if p.grad is not None else 0) for _, p in shards)
        states = (optimizer.state.get(p, {}) for _, p in shards)
        device += sum(x.nbytes for kept in states for x in kept.values() if isinstance(x, torch.Tensor))
        small = (x for piece in self.pieces for x in piece.small.values())
        host = self.peak + sum(x.nbytes for x in small if isinstance(x, torch.Tensor))
        down, up = (self._down[0], self._down[1]), (self._up[0], self._up[1])
        file = (self.file.nbytes, self.file.read_nbytes, self.file.written_nbytes)
        return OffloadReport(host, device, self.steps, down, up, *file)


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer that does the same, without state, parameters and hooks of its own."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's, which counts the steps of the other
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.state, twin.param_groups = defaultdict(dict), []
    return twin


def _states(optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states that are like a parameter of this group, and their dtypes: of a parameter of three zeros."""
    twin, probe = _twin(optimizer), nn.Parameter(torch.zeros(3, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.param_groups[group].items()}
    twin.param_groups = [{**options, "params": [probe]}]
    twin.state[probe] = {
        k: torch.zeros(3, dtype=x.dtype) if x.shape == p.shape and k != "step" else x.clone()
        for p in optimizer.param_groups[group]["params"][:1]
        for k, x in optimizer.state.get(p, {}).items()
        if isinstance(x, torch.Tensor)
    }
    twin.step()
    return {k: x.dtype for k, x in twin.state[probe].items() if isinstance(x, torch.Tensor) and x.shape == probe.shape}
