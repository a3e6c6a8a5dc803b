"""Whether all ranks are in step: the same batch and step, equal copies of parameters and buffers, no NaN of one rank.

    before a program first runs        batch and step; once, the values that the model came with
    every `check_every`-th step        before it: batch, step and copies; after it: NaN of some ranks (`first_nan.py`)

Values are compared by a checksum of their bits, a 64-bit word a tensor; any one element that differs changes it:

    word = shape and dtype + sum over 8-byte pieces v_i of  v_i (2 i + 1) c   modulo 2^64,   c odd

Of ranks that should have the same, those that differ from most of them are named.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.mesh import Mesh
from .faults import DivergedError
from .roll_call import RollCall, odd, ranks_text
from .state import State

MOST = 1 << 22
"""Bytes of a model's tensor that are read to compare its first values: all of it, or evenly spread pieces."""

_BLOCK, _ODD = 1 << 17, -7046029254386353131


def word(x: torch.Tensor, most: int | None = None) -> int:
    """The checksum of a tensor's bits; of more than `most` bytes, of evenly spread elements."""
    named = zlib.crc32(f"{tuple(x.shape)} {x.dtype}".encode())
    if x.is_meta or not x.numel():
        return named
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if most is not None and flat.nbytes > most:
        flat = flat[:: -(-flat.nbytes // most)].contiguous()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    rest = nn.functional.pad(flat[whole:], (0, 8 - (flat.numel() - whole)))
    first = 0
    for piece in (*flat[:whole].split(8 * _BLOCK), rest):
        if piece.storage_offset() % 8:
            piece = piece.clone()
        words = piece.view(torch.int64)
        at = torch.arange(first, first + len(words), device=x.device)
        total += (words * ((2 * at + 1) * _ODD)).sum()
        first += len(words)
    return (int(total) + named) % (1 << 64)


def words(tensors: Iterable[torch.Tensor], most: int | None = None) -> list[int]:
    return [word(x, most) for x in tensors]


# -- what is compared
def compare_first_values(call: RollCall, model: nn.Module) -> None:
    """That all processes were given the same model.

    Raises:
        DivergedError: some have other values.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    mine = words((x for _, x in named), MOST)
    what = "comparing the values of the model"
    if not (out := odd(call.everyones(what, _combined(mine)))):
        return
    every = call.everyones(what, mine)
    differ = [n for i, (n, _) in enumerate(named) if len({row[i] for row in every}) > 1]
    raise DivergedError(
        f"{ranks_text(out)} built the model with other values: {len(differ)} of its {len(named)} tensors, such "
        f"as {differ[0]}. Seed all processes alike before the model is made (torch.manual_seed(0)), or give all of "
        f"them the same state_dict",
        out,
    )


def compare_call(call: RollCall, tensors: list[torch.Tensor], step: int, mesh: Mesh, local: bool) -> None:
    """That all processes are at the same step, and have the same batch; with local inputs, those of one data rank.

    Raises:
        DivergedError: some are at another step, or have another batch.
    """
    every = call.everyones("comparing batch and step", {"step": step, "batch": words(tensors)})
    if out := odd([e["step"] for e in every]):
        at = ", ".join(f"rank {r} at {every[r]['step']}" for r in (*out, _fellow(out, len(every))))
        raise DivergedError(
            f"the processes are not at the same step: {at}. All of them must make the same calls, and load the same "
            f"checkpoint",
            out,
        )
    data = tuple(a for a in mesh.names if mesh.role(a) == "data") if local else ()
    for group in _groups(mesh, data):
        if out := tuple(group[i] for i in odd([every[r]["batch"] for r in group])):
            fellow = next(r for r in group if r not in out)
            differ = [i for i in range(len(tensors)) if every[out[0]]["batch"][i] != every[fellow]["batch"][i]]
            fix = "all ranks of a data rank pass its part" if local else "seed the loaders alike, or say inputs='local'"
            raise DivergedError(
                f"{ranks_text(out)} passed another batch in step {step}: the tensors "
                f"{', '.join(map(str, differ))} of the call differ from those of rank {fellow}; {fix}",
                out,
            )


def compare_copies(call: RollCall | None, state: State, step: int) -> None:
    """That ranks which hold the same piece of a parameter, or a buffer, hold the same bits.

    Raises:
        DivergedError: some do not.
    """
    what = "comparing copies of parameters"
    held = {r: _copies(state, i) for i, r in enumerate(state.comm.ranks)}
    short = {r: {k: _combined([*named.values()]) for k, named in of.items()} for r, of in held.items()}
    every = of_all(call, what, short)
    found = _unequal(every, state.mesh)
    if found is None:
        return
    key, ranks, out = found
    each = of_all(call, what, {r: of.get(key, {}) for r, of in held.items()})
    fellow = next(r for r in ranks if r not in out)
    differ = [n for n, w in each[fellow].items() if each[out[0]].get(n) != w]
    raise DivergedError(
        f"before step {step} {ranks_text(out)} had other values than rank {fellow} in {len(differ)} parameters or "
        f"buffers that {ranks_text(ranks)} should have alike, such as {differ[0]}: memory was damaged, or the script "
        f"changed them on some ranks alone. Load the last checkpoint",
        out,
    )


def of_all(call: RollCall | None, what: str, mine: dict[int, Any]) -> dict[int, Any]:
    """By rank: what each has; all of them live here where there is no roll call."""
    if call is None:
        return mine
    (own,) = mine.values()
    return dict(enumerate(call.everyones(what, own)))


def _copies(state: State, index: int) -> dict[str, dict[str, int]]:
    """By the axes that split them and the stages that hold them, the words of what a held rank has."""
    out: dict[str, dict[str, int]] = {}
    for name, shard in state.shards(index):
        split = [a for a in state.mesh.names if a in state.layouts[name].split_axes]
        out.setdefault(f"{'+'.join(split)}|{state.homes[name]}", {})[name] = word(shard)
    out["|()"] = out.get("|()", {}) | {n: word(of[index]) for n, of in state.buffers.items()}
    return out


def _unequal(every: dict[int, Any], mesh: Mesh) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """A set of tensors, the ranks that should have it alike, and those of them that differ."""
    for key in sorted({k for of in every.values() for k in of}):
        axes = tuple(key.partition("|")[0].split("+")) if not key.startswith("|") else ()
        for group in _groups(mesh, axes):
            ranks = tuple(r for r in group if key in every[r])
            if ranks and (out := odd([every[r][key] for r in ranks])):
                return key, ranks, tuple(ranks[i] for i in out)
    return None


def _groups(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The ranks that agree on their place on these axes."""
    out: dict[tuple[int, ...], list[int]] = {}
    for r in range(mesh.world_size):
        at = mesh.coord(r)
        out.setdefault(tuple(at[a] for a in axes), []).append(r)
    return [tuple(group) for group in out.values()]


def _combined(each: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(repr(each).encode()).digest()[:8], "little")


def _fellow(out: tuple[int, ...], count: int) -> int:
    return next(r for r in range(count) if r not in out)
