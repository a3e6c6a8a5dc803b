"""Random ops of `kernels/random.py`: every dim free, since an element's numbers follow from its place in the whole."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...kernels import random
from .dims import names, unit, whole_rule
from .notation import Dims, Local, Rule
from .split import Call
from .table import Table, on

TABLE: Table = {}


def _with_pieces(local: Local) -> tuple[Any, tuple, dict]:
    """The call with the pieces of the whole tensor replaced by this rank's."""
    args, kwargs = list(local.args), dict(local.kwargs)
    place = list(inspect.signature(local.target).parameters).index("pieces")
    if place < len(args):
        args[place] = local.out_pieces()
    else:
        kwargs["pieces"] = local.out_pieces()
    return local.target, tuple(args), kwargs


@on(TABLE, random.dropout, random.uniform, random.normal, random.bernoulli, random.randint, random.exponential)
def by_element(call: Call) -> Rule:
    """`a b -> a b`; tensors of parameters broadcast."""
    out = call.outputs[0]
    dims = names(out.shape)
    inputs = tuple(_broadcast(t, out, dims) for t in call.operands)
    return Rule(inputs, (dims,) * len(call.outputs), localize=_with_pieces)


def _broadcast(t: torch.Tensor, out: torch.Tensor, dims: Dims) -> Dims:
    tail = dims[out.dim() - t.dim() :]
    return tuple(() if unit(n) else d for n, d in zip(t.shape, tail, strict=True))


@on(TABLE, random.randperm)
def permutation(call: Call) -> Rule:
    return whole_rule(call, note="a permutation is drawn whole")
