"""A model's tensors on a mesh: placed at the first call, read and set whole, saved, loaded, stepped by optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.errors import MeshwrightError
from ..partitioner.layout import whole
from ..partitioner.mesh import Mesh
from .checkpoint import Restored, Saving, fits, restore
from .checkpoint_files import Checkpoint, CheckpointError, latest
from .comm import Comm
from .file_image import Image
from .host import OffloadReport
from .initialise import initialise
from .launch import comm_for, watch_here
from .loss_scale import Scaler
from .optimizer import Optimizers, RankView, Schedulers
from .plain import from_plain
from .request import Settings
from .roll_call import RollCall
from .state import State
from .watch import Watch


class Placed:
    """What a compiled model holds; see `Compiled`."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, settings: Settings):
        self.model, self.mesh, self.device, self.settings = model, mesh, device, settings
        self.optimizer = Optimizers(settings.optimizer, settings.offload) if settings.optimizer else None
        scaling = settings.precision.scaling if settings.precision else None
        self.scaler = Scaler(scaling) if scaling else None
        self.steps = 0
        self._comm: Comm | None = None
        self._state: State | None = None
        self._pending: tuple[Checkpoint, bool] | None = None
        self._saving: Saving | None = None

    @property
    def comm(self) -> Comm:
        """What runs the ranks that live in this process."""
        if self._comm is None:
            self._comm = comm_for(self.mesh, self.settings.timeout, self._watch)
        return self._comm

    @cached_property
    def _watch(self) -> Watch | None:
        return watch_here(self.settings.timeout)

    @cached_property
    def _roll_call(self) -> RollCall | None:
        return RollCall(self._watch, self.settings.timeout) if self._watch else None

    def _telling(self) -> AbstractContextManager[None]:
        """An error in the block is written down for the other processes, which wait for this one."""
        return self._watch.telling() if self._watch else nullcontext()

    def _have_state(self) -> State:
        if self._state is None:
            raise MeshwrightError(
                "nothing is placed yet: call the compiled model or step() once, or pass args= to compile"
            )
        return self._state

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards of the ranks of this process, under the model's names (a name comes once a rank)."""
        state = self._have_state()
        for i in range(len(self.comm.ranks)):
            yield from RankView(state, i).named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, p in self.named_parameters():
            yield p

    def gather(self, what: str) -> dict[str, Any]:
        """Whole tensors by fully qualified name: "params", "grads" (None where there is none) or "buffers".

        Raises:
            ValueError: another word.
        """
        state = self._initial_state() if self._state is None else self._state
        if what == "params":
            return {n: state.whole_param(n) for n in state.params}
        if what == "grads":
            return {n: state.whole_grad(n) for n in state.params}
        if what == "buffers":
            return {n: state.whole_buffer(n) for n in state.buffers}
        raise ValueError(f"gather({what!r}): say 'params', 'grads' or 'buffers'")

    def _initial_state(self) -> State:
        resting = {n: whole(p.shape) for n, p in self.model.named_parameters()}
        state = State(self.model, resting, self.mesh, self.comm, self.device)
        if self._pending is not None:
            restore(self._pending[0], self, state, model_only=True)
        return state

    def _placed_or_initial(self) -> State:
        return self._initial_state() if self._state is None else self._state

    def save(self, path: str | Path, *, data: Any = None, keep: int | None = None, wait: bool = True) -> Saving:
        """Write a checkpoint into a folder: parameters, buffers, optimizer, schedulers, the step, and `data`.

        Each process writes what its ranks own, into a folder that all share; the older checkpoints there are whole
        until this one is. See docs/checkpoints.md.

        Args:
            data: where the data stands, or what else is to come back from `load`: numbers, texts, lists, dicts.
            keep: how many checkpoints stay in `path`, this one included; None for all.
            wait: False to write beside training, from a copy, whose memory is kept for the next save of this kind; call
                `.wait()` on what comes back.

        Raises:
            CheckpointError: it cannot be written, or the save before this one could not.
            MeshwrightError: something of it cannot be written without pickling.
        """
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise CheckpointError(f"keep={keep!r}: give the number of checkpoints that stay, at least 1, or None")
        if self._pending is not None:
            raise CheckpointError("a loaded checkpoint waits for the first call: make that before save()")
        images: list[Image] = []
        if self._saving is not None:
            before, self._saving = self._saving, None
            before.wait()
            images = before.images
        with self._telling():
            saving = Saving(self, Path(path).absolute(), data, keep, images)
            if wait:
                saving.wait()
                saving.images = []
        self._saving = None if wait else saving
        return saving

    def load(self, path: str | Path, *, model_only: bool = False) -> Restored:
        """Take a checkpoint of any mesh and options: the one at `path`, or the last saved in that folder.

        Before the first call it is checked at once and taken when the parameters are placed.

        Args:
            model_only: parameters and buffers alone, without optimizer, schedulers and step.

        Raises:
            CheckpointError: it is damaged, partial, foreign or does not fit; names files and tensors, and nothing has
                changed.
        """
        checkpoint = Checkpoint(latest(Path(path).absolute()))
        if self._state is None:
            fits(checkpoint, self, model_only)
            checkpoint.read(list(checkpoint.tensors), lambda name, value: None)
            self._pending = (checkpoint, model_only)
        else:
            restore(checkpoint, self, self._state, model_only)
        found = checkpoint.manifest
        return Restored(found["step"], from_plain(found["data"]), checkpoint.folder)

    def _take_pending(self) -> None:
        """A checkpoint loaded before the first call, now that there is where to put it."""
        if self._pending is not None and self._state is not None:
            restore(self._pending[0], self, self._state, self._pending[1])
            self._pending = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors under the keys of the model's own `state_dict`."""
        state = self._have_state()
        found = {n: state.whole_param(n) for n in state.params} | {n: state.whole_buffer(n) for n in state.buffers}
        return {key: found[state.aliases.get(key, key)] for key in self.model.state_dict() if _known(key, found, state)}

    def load_state_dict(self, values: dict[str, torch.Tensor], strict: bool = True) -> None:
        """Take whole tensors, each rank its part. Buffers that the model does not save may be given too; of tied names
        one is enough, as files of safetensors have it.

        Raises:
            MeshwrightError: missing or unknown keys (with `strict`), or a shape that differs; nothing is changed then.
        """
        state = self._have_state()
        own = {**{n: p for n, p in self.model.named_parameters()}, **dict(self.model.named_buffers())}
        kept = {k for k in self.model.state_dict() if state.aliases.get(k, k) in own}
        given = {state.aliases.get(k, k) for k in values}
        problems = [f"missing {k}" for k in sorted(kept) if state.aliases.get(k, k) not in given] if strict else []
        kept |= {k for k in values if k in state.buffers}
        problems += [f"unknown {k}" for k in sorted(values.keys() - kept)] if strict else []
        for key in sorted(kept & values.keys()):
            want, got = own[state.aliases.get(key, key)].shape, getattr(values[key], "shape", None)
            if got != want:
                is_ = tuple(got) if got is not None else f"a {type(values[key]).__name__}"
                problems.append(f"{key} is {is_}, should be {tuple(want)}")
        if problems:
            raise MeshwrightError(f"the state dict does not fit: {'; '.join(problems[:8])}")
        for key in kept & values.keys():
            name = state.aliases.get(key, key)
            state.set_param(name, values[key]) if name in state.params else state.set_buffer(name, values[key])

    def initialize(self, init: Callable[[nn.Module], Any] | None = None) -> None:
        """Give the tensors of a model made on the meta device their first values, equal on every mesh.

        Args:
            init: called with each module that holds such tensors; by default its `reset_parameters()`.

        Raises:
            MeshwrightError: some tensors got no value; names them.
        """
        initialise(self._have_state(), self.settings.seed, init)

    def sampler(self, dataset: Any, shuffle: bool = True) -> torch.utils.data.DistributedSampler:
        """The sampler for a DataLoader of this process: its data rank's part with inputs="local", else everything."""
        data = [a for a in self.mesh.names if self.mesh.role(a) == "data"] if self.settings.local_inputs else []
        rank = self.comm.ranks[0]
        index = self.mesh.group(tuple(data), rank).index(rank) if data else 0
        return torch.utils.data.DistributedSampler(
            dataset, self.mesh.group_size(tuple(data)), rank=index, shuffle=shuffle, seed=self.settings.seed
        )

    def scheduler(self, make: Callable[[torch.optim.Optimizer], Any]) -> Schedulers:
        """A learning-rate scheduler for each rank's optimizer, from a function of one optimizer.

        Raises:
            MeshwrightError: compile was given no optimizer.
        """
        if self.optimizer is None:
            raise MeshwrightError("a scheduler needs an optimizer: pass optimizer=lambda m: ... to compile")
        return Schedulers(make, self.optimizer)

    @property
    def offload_report(self) -> OffloadReport:
        """Bytes on the host and on the device, and what steps have copied between them.

        Raises:
            MeshwrightError: there is no optimizer, or nothing is placed yet.
        """
        self._have_state()
        if self.optimizer is None:
            raise MeshwrightError("offload_report is of the optimizer's state: pass optimizer=lambda m: ... to compile")
        return self.optimizer.report()


def _known(key: str, found: dict[str, Any], state: State) -> bool:
    return state.aliases.get(key, key) in found
