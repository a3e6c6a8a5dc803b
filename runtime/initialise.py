"""First values for a model made on the meta device: one module at a time, the same on every mesh.

Where a module's initialiser writes its tensors element by element, as most of PyTorch's do, each rank makes its shards
alone (`by_element.py`). Any other (an orthogonal matrix, a row that is zeroed) draws on a generator seeded by (seed,
the module's name) and makes whole tensors, of which each rank takes its part: no more than one module at a time.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from ..kernels.philox import whole_pieces
from ..partitioner.errors import MeshwrightError
from .by_element import Write, carry_out, noted, pieces_of
from .state import State


def initialise(state: State, seed: int, init: Callable[[nn.Module], Any] | None = None) -> None:
    """Give every tensor without a value one.

    Args:
        init: called with each module that holds such tensors, on the CPU; by default its `reset_parameters()`.

    Raises:
        MeshwrightError: a module has no `reset_parameters`, or left some tensors as they were; names them.
    """
    missing: list[str] = []
    for name, module in state.model.named_modules():
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        names = {k: state.aliases.get(_join(name, k), _join(name, k)) for k in own}
        wanted = {k: full for k, full in names.items() if full in state.empty}
        if not wanted:
            continue
        make = _maker(module, init)
        twin = copy.deepcopy(module).to_empty(device="meta", recurse=False)
        writes = None if make is None else noted(twin, make)
        if writes is not None:
            for k, full in wanted.items():
                _draw(state, full, writes[k], seed)
            continue
        values = None if make is None else _values(module, name, seed, make)
        for k, full in wanted.items():
            if values is None or _untouched(values[k]):
                missing.append(full)
            elif full in state.params:
                state.set_param(full, values[k])
            else:
                state.set_buffer(full, values[k])
    if missing:
        raise MeshwrightError(
            f"{len(missing)} tensors got no value, such as {missing[0]}: their modules have no reset_parameters() that "
            f"sets them. Pass initialize(init=function of a module), or load_state_dict(...)"
        )


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _maker(module: nn.Module, init: Callable[[nn.Module], Any] | None) -> Callable[[nn.Module], Any] | None:
    """What gives a module its values; None when nothing can."""
    if init is not None:
        return init
    own: Any = getattr(type(module), "reset_parameters", None)
    return own if callable(own) else None


def _draw(state: State, name: str, writes: list[Write], seed: int) -> None:
    """Give every shard its values."""
    if name in state.params:
        state.as_given = False
        for p, rank in zip(state.params[name], state.comm.ranks, strict=True):
            if p is not None:
                carry_out(writes, p.detach(), name, pieces_of(state.layouts[name], state.mesh, rank), seed)
    else:
        for b in state.buffers[name]:
            carry_out(writes, b, name, whole_pieces(tuple(b.shape)), seed)
    state.empty.discard(name)


def _values(module: nn.Module, name: str, seed: int, make: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor]:
    """The module's own tensors, made whole on the CPU."""
    twin = copy.deepcopy(module).to_empty(device="cpu", recurse=False)
    tensors = {k: t for k, t in [*twin.named_parameters(recurse=False), *twin.named_buffers(recurse=False)]}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for t in tensors.values():
            _mark(t)
        torch.manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        make(twin)
    return {k: t.detach() for k, t in [*twin.named_parameters(recurse=False), *twin.named_buffers(recurse=False)]}


def _mark(t: torch.Tensor) -> None:
    """Fill with what no initialiser writes, to see later whether it was written at all."""
    if t.is_floating_point() or t.is_complex():
        t.fill_(math.nan)
    elif t.dtype != torch.bool:
        t.fill_(torch.iinfo(t.dtype).min)


def _untouched(t: torch.Tensor) -> bool:
    if t.is_floating_point() or t.is_complex():
        return t.numel() > 0 and bool(t.isnan().all())
    return t.dtype != torch.bool and t.numel() > 0 and bool((t == torch.iinfo(t.dtype).min).all())
