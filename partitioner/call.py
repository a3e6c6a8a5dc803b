"""What is traced: one call of a program on given parameters, buffers and tensors, as a function of tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree

from .graph import Role
from .outputs import TENSOR, Traced, as_trees, unaliased
from .precision import Precision, call, lowered
from .with_tensors import call_with


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
        self.traced = Traced()

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

        def run(*args: Any, **kwargs: Any) -> Any:
            return call_with(program, tied, args, kwargs)

        out = call(self.precision, run, args, kwargs, target, self.loss)
        leaves, self.traced.spec = pytree.tree_flatten(as_trees(out))
        leaves = unaliased(leaves, tensors)
        self.traced.leaves = tuple(TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))


def _copy(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The form of a parameter's working copy."""
    return p if p.dtype == dtype else torch.empty_like(p, dtype=dtype, device="meta", requires_grad=p.requires_grad)


def grad_role(of: Role) -> Role:
    """The output that is the gradient of an input."""
    return Role("grad" if of.kind == "param" else "input_grad", of.name)


def update_role(of: Role) -> Role:
    """The output that is the value of an input after the call changed it in place."""
    return Role("new_buffer" if of.kind == "buffer" else "new_input", of.name)
