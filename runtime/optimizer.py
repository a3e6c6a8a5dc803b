"""Optimizers on shards, and the true global norm of gradients.

An element-wise `torch.optim` optimizer does on a shard exactly what it does on that part of the whole tensor, so each
rank makes its own from its shards. The norm of all gradients counts each element once, however often it is replicated:

    ||g||_p = (sum over parameters and their distinct pieces of sum |g|^p)^(1/p)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.errors import MeshwrightError
from ..partitioner.offload import AWAY, Offload
from ..partitioner.optimizer_bytes import ADAMW, SGD, Stepper
from ..partitioner.transfer import Transfer
from .block_file import FileError
from .comm import Start, Wait
from .file_shards import FileShards
from .host import HostShards, OffloadReport, added
from .state import State, largest, pipeline_ranks

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
)  # fmt: skip
"""Classes of torch.optim whose update of an element depends on that element's gradient and state alone."""


_NEEDED = inspect.Parameter.empty
_FREE = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


class RankView:
    """What an optimizer factory is given: this rank's shards under the model's own names, or host copies of them."""

    def __init__(self, state: State, index: int, host: HostShards | FileShards | None = None):
        self._state, self._index, self._host = state, index, host

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._host.named_parameters() if self._host else self._state.all_of(self._index)

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, p in self.named_parameters():
            yield p

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Its parameters, so that `optimizer=torch.optim.AdamW` does what it says."""
        return self.parameters()


class Optimizers:
    """One optimizer a held rank, stepped together. Made when the shards are: at the first call."""

    def __init__(self, make: Callable[[RankView], torch.optim.Optimizer], offload: Offload | None = None):
        self.make, self.offload = make, offload or Offload()
        self.host: list[HostShards] | list[FileShards] = []
        self.each: list[torch.optim.Optimizer] = []
        self.waiting: list[Schedulers] = []
        self.skipped = False  # the last step: schedulers then stay where they are

    def attach(self, state: State, away: bool = False) -> None:
        """Make the optimizers, now that there are shards. `away`: the plan needs their state on the host.

        Raises:
            MeshwrightError: the factory returned none, or one that cannot work on shards.
        """
        if away and self.offload.offload_optimizer == "none":
            self.offload = AWAY
        self.state, in_files = state, self.offload.offload_optimizer == "nvme"
        held = range(len(state.comm.ranks))
        shards = FileShards if in_files else HostShards
        self.host = [shards(state, i, self.offload) for i in held]  # type: ignore[assignment]
        self.each = [self.make(RankView(state, i, host)) for i, host in enumerate(self.host)]
        for optimizer, host in zip(self.each, self.host, strict=True):
            _check(optimizer, state, {id(p) for _, p in host.named_parameters()}, in_files)
        self._agreed(lambda host, optimizer: host.adopt(optimizer))
        for scheduler in self.waiting:
            scheduler.attach(self.each)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all ranks held here, one rank after another."""
        return [group for optimizer in self.each for group in optimizer.param_groups]

    def step(self) -> None:
        """Step all of them or, where state in files cannot be read or written, none.

        Raises:
            FileError: of this process or another; whether something has to be loaded again, it says.
        """
        self._agreed(lambda host, optimizer: host.stage(optimizer), lambda host: host.undo())
        for optimizer, host in zip(self.each, self.host, strict=True):
            host.finish(optimizer)

    def _agreed(self, do: Callable[[Any, Any], None], undo: Callable[[Any], None] | None = None) -> None:
        """What may fail, on every rank; where it fails on one it is undone on all."""
        error: Exception | None = None
        try:
            for optimizer, host in zip(self.each, self.host, strict=True):
                do(host, optimizer)
        except Exception as fault:
            error = fault
        except BaseException:
            self._undo(undo)
            raise
        if self.offload.offload_optimizer == "nvme":
            failed = largest(self.state.comm, self.state.mesh, self.state.device, int(error is not None))
            if failed and error is None:
                error = FileError("the optimizer's file of another rank failed")
        if error is not None:
            self._undo(undo)
            if undo is not None and isinstance(error, FileError):
                error = FileError(
                    f"{error}. The step was undone: parameters and state are those before it. Free the disk and step "
                    f"again; where the file itself is damaged, load the last checkpoint, which writes it anew"
                )
            raise error

    def _undo(self, undo: Callable[[Any], None] | None) -> None:
        for host in self.host:
            if undo is not None:
                undo(host)

    def report(self) -> OffloadReport:
        """What rests on the host and what has been copied."""
        return added([h.report(o) for h, o in zip(self.host, self.each, strict=True)])

    def stepper(self) -> Stepper:
        """What it holds on the device, as the memory model counts it: AdamW's, until it is made."""
        if not self.each or not isinstance(self.each[0], torch.optim.SGD):
            return ADAMW
        return replace(SGD, moments=int(self.each[0].defaults["momentum"] != 0))

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none=True)


class Schedulers:
    """One learning-rate scheduler a held rank, stepped together."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], optimizers: Optimizers):
        self.make, self.optimizers = make, optimizers
        self.each: list[Any] = []
        optimizers.waiting.append(self)
        if optimizers.each:
            self.attach(optimizers.each)

    def attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.each = [self.make(optimizer) for optimizer in optimizers]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step each, unless the optimizers' last step was skipped."""
        if self.optimizers.skipped:
            return
        for scheduler in self.each:
            scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        return self.each[0].get_last_lr()


def _check(optimizer: Any, state: State, mine: set[int], in_files: bool) -> None:
    """Refuse what is no optimizer, or one that must see whole tensors while some parameter is split or cut."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MeshwrightError(
            f"optimizer= must return a torch.optim optimizer; it returned {type(optimizer).__name__}. Write "
            f"optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4)"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if foreign := sum(id(p) not in mine for p in held):
        raise MeshwrightError(
            f"the optimizer holds {foreign} tensors that are not the shards it was given, and would train nothing: "
            f"make it from the argument, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4), not from the "
            f"model"
        )
    kind = type(optimizer)
    if inspect.signature(kind.step).parameters.get("closure", _FREE).default is _NEEDED:
        raise MeshwrightError(
            f"{kind.__name__} evaluates the loss itself, by a closure, and a step here is one evaluation: use one of "
            f"{', '.join(ELEMENTWISE)}"
        )
    if any(c.__name__ in ELEMENTWISE and c.__module__.startswith("torch.optim") for c in kind.__mro__):
        return
    if in_files:
        raise MeshwrightError(
            f"{kind.__name__} is not element-wise: its state cannot be read from a file a part at a time. Use one of "
            f"{', '.join(ELEMENTWISE)}, or offload='full'"
        )
    split = [name for name, layout in state.layouts.items() if layout.split_axes]
    if split:
        raise MeshwrightError(
            f"{kind.__name__} is not element-wise: it needs whole tensors, but {len(split)} parameters are split, such "
            f"as {split[0]}. Use one of {', '.join(ELEMENTWISE)}, or a mesh and zero=0 that keep parameters whole"
        )


def global_norm(state: State, norm_type: float = 2.0) -> torch.Tensor:
    """The p-norm of all gradients of the model, a 0-d tensor equal on every rank.

    Args:
        norm_type: p; `math.inf` for the largest element.
    """
    p = float(norm_type)
    programs = [_norm_program(state, i, rank, p) for i, rank in enumerate(state.comm.ranks)]
    with torch.no_grad():
        return state.comm.run(programs)[0]


def _norm_program(state: State, index: int, rank: int, p: float) -> Generator[Any, Any, torch.Tensor]:
    mesh = state.mesh
    total = torch.zeros((), dtype=torch.float64, device=state.device)
    for name, p_ in state.shards(index):
        grad = p_.grad
        if grad is None:
            continue
        norm = torch.linalg.vector_norm(grad, p, dtype=_wide(grad.dtype)).double()
        if math.isinf(p):
            total = torch.maximum(total, norm)
            continue
        line = len(pipeline_ranks(mesh, rank))
        holders = mesh.world_size // line * (len(state.homes[name]) or line)
        copies = holders // mesh.group_size(tuple(state.layouts[name].split_axes))
        total = total + norm**p / copies
    axes = tuple(a for a in mesh.names if mesh.sizes[a] > 1)
    if axes:
        op = "max" if math.isinf(p) else "sum"
        transfer = Transfer("all_reduce", axes, (), (), op=op)
        (total,) = yield Wait((yield Start((transfer,), (total,), where="gradient norm")))
    return (total if math.isinf(p) else total ** (1.0 / p)).float()


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def clip_grad_norm(state: State, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), as torch does; returns the norm before."""
    norm = global_norm(state, norm_type)
    scale = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    for _, p in state.shards():
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad.device))
    return norm
