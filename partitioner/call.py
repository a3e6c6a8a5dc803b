"""What is traced: one call of a program on given parameters, buffers and tensors, as a function of tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree

from .errors import CaptureError
from .graph import Role
from .outputs import TENSOR, Traced, as_trees, unaliased
from .precision import Precision, call, lowered
from .with_tensors import Changes, bound_buffers, call_with, unchanged


@dataclass(frozen=True)
class Joint:
    """A traced call: its graph in the form of `Graph.fx`, what its inputs and outputs are, the tensors it holds."""

    graph: fx.Graph
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    constants: dict[str, torch.Tensor]


class Call:
    """A program with an example call and a loss.

    Attributes:
        program: the module.
        held: every distinct parameter, then every distinct buffer, by its first name: what is tied is one input with
            one gradient. Of a parameter with a working copy (`precision.py`) a tensor like that, without values.
        masters: of those parameters the dtypes in which they rest.
        params: how many of them are parameters.
        tensors: the tensors of the call, in the order of `pytree.tree_leaves((args, kwargs, target))`.
        traced: what the last trace found of the output's form.
        changes: what the last trace found that the program sets in its modules.
    """

    def __init__(
        self,
        program: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        target: Any,
        loss: Callable | None,
        precision: Precision | None = None,
    ):
        self.program, self.loss, self.precision = program, loss, precision
        copies, params = lowered(precision, program), dict(program.named_parameters())
        self.masters = {n: params[n].dtype for n in copies}
        self.held = {n: _copy(p, copies.get(n, p.dtype)) for n, p in params.items()} | dict(program.named_buffers())
        self.params = len(params)
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs, target))
        self.places = [i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self.leaves[i] for i in self.places]
        self.traced, self.changes = Traced(), Changes()

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The inputs of the graph: parameters, buffers, tensors of the call."""
        return [*self.held.values(), *self.tensors]

    @property
    def roles(self) -> list[Role]:
        """What each of `inputs` is."""
        kinds = ["param"] * self.params + ["buffer"] * (len(self.held) - self.params)
        held = [Role(kind, name) for kind, name in zip(kinds, self.held, strict=True)]
        return [*held, *(Role("input", i) for i in range(len(self.tensors)))]

    def __call__(self, held: list[torch.Tensor], tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The tensors that the program, or its loss, returns when it has `held` and is given `tensors`."""
        filled = list(self.leaves)
        for i, t in zip(self.places, tensors, strict=True):
            filled[i] = t
        args, kwargs, target = pytree.tree_unflatten(filled, self.spec)
        tied: Any = dict(zip(self.held, held, strict=True))
        program: Any = self.program
        changes = self.changes = Changes()

        def run(*args: Any, **kwargs: Any) -> Any:
            return call_with(program, tied, args, kwargs, changes)

        with unchanged(program, changes):
            out = call(self.precision, run, args, kwargs, target, self.loss)
        leaves, self.traced.spec = pytree.tree_flatten(as_trees(out))
        leaves = unaliased(leaves, tensors)
        self.traced.leaves = tuple(TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
        self._check_buffers()
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))

    def _check_buffers(self) -> None:
        """What a buffer is bound to must be able to take its place in the next step."""
        every = bound_buffers(self.program)
        for name, t in list(self.changes.buffers.items()):
            old = every.get(name)
            if old is None:
                self.changes.values.append(name)
                del self.changes.buffers[name]
                continue
            if len(tied := [n for n, b in every.items() if b is old]) > 1:
                raise CaptureError(
                    f"forward binds buffer {name} to another tensor, and {', '.join(tied)} are one: they would "
                    f"no longer be. Write into it in place, or give each its own"
                )
            if t.shape != old.shape or t.dtype != old.dtype:
                raise CaptureError(
                    f"forward binds buffer {name}, {_form(old)}, to {_form(t)}: in the compiled program it keeps its "
                    f"shape and dtype. Make it of its final size, and write into it"
                )


def _form(t: torch.Tensor) -> str:
    return f"{t.dtype} {list(t.shape)}"


def _copy(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The form of a parameter's working copy."""
    return p if p.dtype == dtype else torch.empty_like(p, dtype=dtype, device="meta", requires_grad=p.requires_grad)


def grad_role(of: Role) -> Role:
    """The output that is the gradient of an input."""
    return Role("grad" if of.kind == "param" else "input_grad", of.name)


def update_role(of: Role) -> Role:
    """The output that is the value of an input after the call changed it in place, or bound a buffer to it."""
    return Role("new_buffer" if of.kind == "buffer" else "new_input", of.name)
