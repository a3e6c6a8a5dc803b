"""Functions of others that turn queries and keys by rotary position embedding, known by what they compute.

    apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1) -> (q, k)        of most models in transformers

The function of that name in the file of a module's class is tried on small tensors; where it agrees with the formula of
`kernels/rope.py`, it runs as that op while a program is traced. Calls it does not know (a part of the dims turned,
other dtypes, angles with a gradient) go to the function itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from ..kernels import rope as _registers_the_ops  # noqa: F401

NAME = "apply_rotary_pos_emb"
Function = Callable[..., Any]


@contextlib.contextmanager
def known_rope(program: nn.Module, found: Counter[str]) -> Iterator[None]:
    """While it lasts, such functions run as one op a tensor; `found` counts the calls as "rotary embedding"."""
    files = sorted({type(m).__module__ for m in program.modules()} - {"__main__"})
    spaces = [vars(sys.modules[f]) for f in files if NAME in vars(sys.modules.get(f, object()))]
    saved = [(space, space[NAME]) for space in spaces if _agrees(space[NAME])]
    try:
        for space, original in saved:
            space[NAME] = _turned(original, found)
        yield
    finally:
        for space, original in saved:
            space[NAME] = original


def _turned(original: Function, found: Counter[str]) -> Function:
    def turned(*args: Any, **kwargs: Any) -> Any:
        more = set(kwargs) - {"unsqueeze_dim"}
        if len(args) not in (4, 5) or more or not _takes(*args[:4]):
            return original(*args, **kwargs)
        q, k, cos, sin = args[:4]
        at = args[4] if len(args) == 5 else kwargs.get("unsqueeze_dim", 1)
        if not isinstance(at, int):
            return original(*args, **kwargs)
        found["rotary embedding"] += 1
        cos, sin = cos.unsqueeze(at), sin.unsqueeze(at)
        return tuple(torch.ops.meshwright.rope(x, cos, sin) for x in (q, k))

    return turned


def _takes(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    tensors = (q, k, cos, sin)
    if not all(isinstance(t, torch.Tensor) for t in tensors) or cos.requires_grad or sin.requires_grad:
        return False
    same = len({(t.dtype, t.shape[-1]) for t in tensors}) == 1
    return same and q.dim() == k.dim() == cos.dim() + 1 and q.shape[-1] % 2 == 0 and cos.shape == sin.shape


def _agrees(function: Any) -> bool:
    """Whether it equals the formula, its gradients too, on small tensors in float32."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        q, k = (torch.randn(2, heads, 3, 8, requires_grad=True) for heads in (4, 2))
        cos, sin = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        try:
            got = function(q, k, cos, sin)
            turned = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
            grads = torch.autograd.grad([x.sum() for x in got], (q, k))
        except Exception:
            return False  # a function of another kind: it takes other things than these
        want = [torch.ops.meshwright.rope(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]
        pairs = [*zip(got, want, strict=False), *((t.transpose(1, 2), w) for t, w in zip(turned, want, strict=False))]
        pairs += zip(grads, torch.autograd.grad([x.sum() for x in want], (q, k)), strict=True)
        return len(pairs) == 6 and all(a.shape == b.shape and torch.allclose(a, b, 1e-5, 1e-6) for a, b in pairs)
