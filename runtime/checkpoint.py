"""What a checkpoint holds of a compiled model, and how it is taken from one and given to another on any mesh.

    params/NAME, buffers/NAME         each piece once: by the first of the ranks that hold it
    optimizer/NAME/KEY                state that is like its shard lies as the parameter does; other state is whole
    groups, schedulers, step, seed, data

Loading stages everything first: whatever is damaged or does not fit is found before the first write. The ranks agree
that all have staged before any of them changes anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..partitioner.errors import MeshwrightError
from ..partitioner.layout import Layout, local_pieces, take_local, whole
from .checkpoint_files import (
    Checkpoint,
    CheckpointError,
    Piece,
    RankPart,
    as_stored,
    finish,
    next_number,
    write_part,
)  # fmt: skip
from .faults import PeerError
from .file_image import Image
from .optimizer import Optimizers
from .plain import from_plain, to_plain
from .state import State, largest, pipeline_ranks
from .watch import Lookout

if TYPE_CHECKING:
    from .placed import Placed

LOOK = 0.5
"""Seconds between two looks whether the other processes are there."""

FRESH = "not stepped"
"""The optimizer of a model that has not been placed: it has no state yet."""


@dataclass(frozen=True)
class Restored:
    """What `load` found: steps done, the `data` that `save` was given, and the checkpoint's folder."""

    step: int
    data: Any
    path: Path


# -- taking
def owns(state: State, name: str, rank: int) -> bool:
    """Whether a rank is the first of those that hold its piece of a parameter."""
    mesh, split = state.mesh, state.layouts[name].split_axes
    stages = {a for a in mesh.names if mesh.role(a) == "pipeline"} - split
    first = not stages or pipeline_ranks(mesh, rank).index(rank) == (state.homes[name] or (0,))[0]
    coord = mesh.coord(rank)
    return first and not any(coord[a] for a in mesh.names if a not in split | stages)


def _piece(x: torch.Tensor, layout: Layout, state: State, rank: int) -> Piece:
    at = tuple(p for dim in local_pieces(layout, state.mesh, rank) for p in dim)
    factors = tuple(tuple(f.size for f in dim) for dim in layout.dims)
    return Piece(x.dtype, layout.shape, factors, at)


def part_of(state: State, index: int, optimizers: Optimizers | None, image: Image) -> RankPart:
    """What a held rank owns, copied into an image of its file."""
    rank, pieces, values = state.comm.ranks[index], {}, {}
    steps = dict(optimizers.host[index].named_parameters()) if optimizers and optimizers.each else {}
    live: dict[str, torch.Tensor] = {}

    def own(key: str, x: torch.Tensor, layout: Layout) -> None:
        pieces[key] = _piece(x, layout, state, rank)
        live[key] = as_stored(x)

    for name, shard in state.shards(index):
        if not owns(state, name, rank):
            continue
        layout = state.layouts[name]
        if shard.numel():
            own(f"params/{name}", shard, layout)
        kept = optimizers.host[index].kept(optimizers.each[index], name, steps[name]) if optimizers and steps else {}
        for key, x in kept.items():
            if isinstance(x, torch.Tensor):
                like = x.shape == shard.shape
                if x.numel() and (like or _first_of(state, name, rank)):
                    own(f"optimizer/{name}/{key}", x, layout if like else whole(x.shape))
            elif _first_of(state, name, rank):
                values.setdefault(name, {})[key] = to_plain(x, f"{key} of {name}")
    if rank == 0:
        for name, held in state.buffers.items():
            own(f"buffers/{name}", held[index], whole(held[index].shape))
    image.take(live)
    return RankPart(rank, pieces, image, values)


def _first_of(state: State, name: str, rank: int) -> bool:
    """Whether a rank, which owns a piece of a parameter, owns the first."""
    coord = state.mesh.coord(rank)
    return not any(coord[a] for a in state.layouts[name].split_axes)


def head_of(compiled: Placed, data: Any) -> dict[str, Any]:
    """What all ranks share."""
    optimizers = compiled.optimizer
    made = optimizers is not None and bool(optimizers.each)
    return {
        "step": compiled.steps,
        "seed": compiled.settings.seed,
        "mesh": dict(compiled.mesh.sizes),
        "data": to_plain(data, "data"),
        "loss_scale": compiled.scaler.state_dict() if compiled.scaler else None,
        "optimizer": _optimizer_of(optimizers) if made and optimizers else FRESH if optimizers else None,
        "schedulers": [
            to_plain(s.each[0].state_dict(), type(s.each[0]).__name__) for s in (optimizers.waiting if made else ())  # type: ignore[union-attr]
        ],
    }  # fmt: skip


def _optimizer_of(optimizers: Optimizers) -> dict[str, Any]:
    names = {id(p): n for n, p in optimizers.host[0].named_parameters()}
    kind = type(optimizers.each[0]).__name__
    groups = [
        {
            "params": [names[id(p)] for p in group["params"]],
            "options": {k: to_plain(v, f"{k} of the optimizer") for k, v in group.items() if k not in NAMES},
        }
        for group in optimizers.each[0].param_groups
    ]
    return {"class": kind, "groups": groups}


NAMES = ("params", "param_names")


class Saving:
    """A save that may still be writing.

    Attributes:
        path: the checkpoint's folder, once it is done.
        images: what is written, of each rank held here. The next save may write over it.
    """

    def __init__(self, compiled: Placed, path: Path, data: Any, keep: int | None, images: list[Image]):
        state = compiled._placed_or_initial()
        state.require_values()
        self.comm, self.mesh, self.device = compiled.comm, compiled.mesh, compiled.device
        self.watch = compiled._watch
        number = largest(self.comm, self.mesh, self.device, next_number(path))
        self.path = path / f"step-{compiled.steps}.save-{number}"
        self.folder = path / f".saving-{self.path.name}"
        head = head_of(compiled, data)
        optimizers = compiled.optimizer if compiled._state else None
        self._in_files = optimizers is not None and optimizers.offload.offload_optimizer == "nvme"
        self.images = images or [Image() for _ in self.comm.ranks]
        parts = [part_of(state, i, optimizers, image) for i, image in enumerate(self.images)]
        self.error: BaseException | None = None
        self._agreed = False
        self._thread = threading.Thread(target=self._write, args=(parts, head, keep), name=f"saving {self.path.name}")
        self._thread.start()

    def __repr__(self) -> str:
        done = "written" if not self._thread.is_alive() else "being written"
        return f"<checkpoint {self.path}, {done}>"

    def _write(self, parts: list[RankPart], head: dict[str, Any], keep: int | None) -> None:
        try:
            for part in parts:
                write_part(self.folder, part)
            if parts[0].rank == 0:
                finish(self.folder, self.path, self.mesh.world_size, head, keep)
        except BaseException as error:  # kept for wait(): a thread has nobody to raise to
            self.error = error
            self._tell(parts[0].rank, error)
        finally:
            if self._in_files:  # a state that was too much for memory does not stay in it
                self.images = []

    def _tell(self, rank: int, error: BaseException) -> None:
        try:
            self.folder.joinpath(f"rank-{rank:05d}.failed").write_text(str(error))
        except OSError:
            return  # rank 0 then waits in vain, and says for whom

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is on disk; every process must call it.

        Raises:
            CheckpointError: it could not be written; older checkpoints are whole.
            PeerError: another process is gone; they are whole too.
        """
        self._until_written()
        if not self._agreed:
            failed = largest(self.comm, self.mesh, self.device, int(self.error is not None))
            self._agreed = True
            if failed and self.error is None:
                self.error = CheckpointError(f"{self.path} was not written: another rank failed")
        if self.error is not None:
            raise self.error
        return self.path


    def _until_written(self) -> None:
        """Until this process has written its part, and rank 0 the rest; one that is gone never will."""
        lookout = Lookout(self.watch) if self.watch else None
        while self._thread.is_alive():
            self._thread.join(LOOK)
            over = lookout.gone(range(self.mesh.world_size)) if lookout and self._thread.is_alive() else {}
            if self.watch and any(why != "ended" for r, why in over.items() if r != self.watch.rank):
                text = f"rank {self.watch.rank}: {self.path.name} is not written, older checkpoints are whole"
                raise PeerError(text, self.watch.blame())


# -- giving
@dataclass
class Staged:
    """What will be written, of each held rank: shards, buffers, and states of the optimizer by parameter."""

    params: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    states: list[dict[str, dict[str, Any]]] = field(default_factory=list)


def fits(checkpoint: Checkpoint, compiled: Placed, model_only: bool) -> None:
    """Raises:
    CheckpointError: it is of another model, optimizer, schedulers or seed; all that differs is named.
    """
    faults = list(_model_faults(checkpoint, compiled))
    if not model_only:
        faults += _run_faults(checkpoint, compiled)
    if faults:
        some = "; ".join(faults[:6]) + (f"; and {len(faults) - 6} more" if len(faults) > 6 else "")
        raise CheckpointError(f"the checkpoint {checkpoint.folder} does not fit: {some}; nothing in memory was changed")


def _model_faults(checkpoint: Checkpoint, compiled: Placed) -> Iterator[str]:
    own = {f"params/{n}": p for n, p in compiled.model.named_parameters()}
    own |= {f"buffers/{n}": b for n, b in compiled.model.named_buffers()}
    there = {n for n in checkpoint.tensors if not n.startswith("optimizer/")}
    empty = {n for n, t in own.items() if not t.numel()}
    yield from (f"it lacks {n}" for n in sorted(own.keys() - there - empty))
    yield from (f"the model has no {n}" for n in sorted(there - own.keys()))
    for name in sorted(there & own.keys()):
        want = (tuple(own[name].shape), own[name].dtype)
        got = (checkpoint.shape(name), checkpoint.dtype(name))
        if want != got:
            yield f"{name} is {list(got[0])} {got[1]}, in the model {list(want[0])} {want[1]}"


def _run_faults(checkpoint: Checkpoint, compiled: Placed) -> Iterator[str]:
    found, optimizers = checkpoint.manifest["optimizer"], compiled.optimizer
    if checkpoint.manifest["seed"] != compiled.settings.seed:
        seed = checkpoint.manifest["seed"]
        yield f"its seed is {seed}, here {compiled.settings.seed}: compile(seed={seed}), or load(model_only=True)"
    if (found is None) != (optimizers is None):
        yield f"it has {'no' if found is None else 'an'} optimizer, compile was given {'one' if optimizers else 'none'}"
        return
    if optimizers is None or not optimizers.each:
        return
    if found == FRESH:
        if compiled.steps:
            yield "it was saved before the first step and has no optimizer state: load it before the first step"
        return
    here = _optimizer_of(optimizers)
    if found["class"] != here["class"]:
        yield f"its optimizer is {found['class']}, here {here['class']}"
    if [g["params"] for g in found["groups"]] != [g["params"] for g in here["groups"]]:
        yield "its parameter groups hold other parameters than those here"
    there, mine = len(checkpoint.manifest["schedulers"]), len(optimizers.waiting)
    if there != mine:
        yield f"it has {there} schedulers, here are {mine}: call compiled.scheduler(...) before load()"


def stage(checkpoint: Checkpoint, state: State, model_only: bool) -> Staged:
    """Read and check everything, and cut it to the shards of the held ranks. Nothing is written."""
    mesh, ranks = state.mesh, state.comm.ranks
    out = Staged(states=[{} for _ in ranks])

    def take(key: str, value: torch.Tensor) -> None:
        kind, _, name = key.partition("/")
        if kind == "buffers":
            out.buffers[name] = value
            return
        name, _, slot = name.rpartition("/") if kind == "optimizer" else (name, "", "")
        layout = state.layouts[name]
        lies = value.shape == layout.shape
        cuts = [take_local(value, layout, mesh, r).clone() if lies else value.clone() for r in ranks]
        lives = [state.lives(name, r) for r in ranks]
        if kind == "params":
            out.params[name] = [x if here else None for x, here in zip(cuts, lives, strict=True)]
            return
        for states, x, here in zip(out.states, cuts, lives, strict=True):
            if here:
                states.setdefault(name, {})[slot] = x

    wanted = [n for n in checkpoint.tensors if not (model_only and n.startswith("optimizer/"))]
    checkpoint.read(wanted, take)
    for name, kept in () if model_only else checkpoint.manifest["values"].items():
        for states, rank in zip(out.states, ranks, strict=True):
            if state.lives(name, rank):
                states.setdefault(name, {}).update(from_plain(kept))
    return out


def restore(checkpoint: Checkpoint, compiled: Placed, state: State, model_only: bool) -> None:
    """Everything of a checkpoint into a compiled model, or nothing.

    Raises:
        CheckpointError: it is damaged or does not fit, on this rank or another.
    """
    error: MeshwrightError | None = None
    staged = Staged()
    try:
        fits(checkpoint, compiled, model_only)
        staged = stage(checkpoint, state, model_only)
    except MeshwrightError as fault:
        error = fault
    failed = largest(compiled.comm, state.mesh, compiled.device, int(error is not None))
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(f"the checkpoint {checkpoint.folder} failed on another rank; nothing was changed")
    _give_model(staged, state)
    if model_only:
        return
    compiled.steps = checkpoint.manifest["step"]
    if compiled.scaler and checkpoint.manifest.get("loss_scale") is not None:
        compiled.scaler.load_state_dict(checkpoint.manifest["loss_scale"])
    if compiled.optimizer and compiled.optimizer.each and checkpoint.manifest["optimizer"] != FRESH:
        _give_optimizer(checkpoint, staged, compiled.optimizer)


def _give_model(staged: Staged, state: State) -> None:
    state.as_given = False
    for name, values in staged.params.items():
        for p, value in zip(state.params[name], values, strict=True):
            if p is not None and value is not None:
                with torch.no_grad():
                    p.copy_(value)
        state.empty.discard(name)
    for name, value in staged.buffers.items():
        state.set_buffer(name, value)


def _give_optimizer(checkpoint: Checkpoint, staged: Staged, optimizers: Optimizers) -> None:
    groups = checkpoint.manifest["optimizer"]["groups"]
    for optimizer, host, states in zip(optimizers.each, optimizers.host, staged.states, strict=True):
        names = {id(p): n for n, p in host.named_parameters()}
        for group, found in zip(optimizer.param_groups, groups, strict=True):
            _give_options(group, from_plain(found["options"]))
            on_device = bool(group.get("capturable") or group.get("fused"))
            for p in group["params"]:
                kept = {k: _placed(k, x, p, on_device) for k, x in states.get(names[id(p)], {}).items()}
                host.give(optimizer, names[id(p)], p, kept)
    for scheduler, found in zip(optimizers.waiting, checkpoint.manifest["schedulers"], strict=True):
        for each in scheduler.each:
            each.load_state_dict(from_plain(found))


def _give_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        old = group.get(key)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
            old.copy_(value)
        else:
            group[key] = value


def _placed(key: str, x: Any, p: torch.Tensor, on_device: bool) -> Any:
    """A state's tensor where torch keeps it: counts of steps stay on the CPU unless a fused optimizer reads them."""
    if not isinstance(x, torch.Tensor) or (key == "step" and not on_device):
        return x
    return x.to(p.device)
