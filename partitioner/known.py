"""Modules of others that compute an RMS norm or a tanh GELU in many ops, known by what they compute.

    rms norm     x w / sqrt(mean(x²) + eps), or with 1 + w: one parameter [n], no children, no buffers
    tanh gelu    x (1 + tanh(sqrt(2/π) (x + 0.044715 x³))) / 2: no parameters, no children, no buffers

A module of such a form is tried on small tensors, and while a program is traced what agrees with the formula runs as
one op (`kernels/rms_norm.py`, ATen's gelu) in its place. It must agree with float64 to a few units in the last place of
its own dtype, at sizes where eps is and is not seen; a module that returns another dtype than its input's stays as it
is. The module's class, its numbers and its hooks stay; only `forward` is replaced, for a while.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..kernels import rms_norm

Forward = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def known_modules(program: nn.Module, found: Counter[str]) -> Iterator[None]:
    """While it lasts, modules that are known run as one op; `found` counts them by name."""
    tried: dict[Any, tuple[str, Callable[[nn.Module], Forward]] | None] = {}
    replaced: list[nn.Module] = []
    try:
        for module in program.modules():
            key = _form(module)
            if key is None:
                continue
            if key not in tried:
                tried[key] = _tried(module)
            match = tried[key]
            if match is not None:
                found[match[0]] += 1
                module.forward = _guarded(module, match[1](module))  # type: ignore[method-assign]
                replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.forward


def _form(module: nn.Module) -> Any:
    """What such modules have in common, so that equal ones are tried once; None for a module of another form."""
    torchs = type(module).__module__.startswith("torch.")
    if torchs or "forward" in vars(module) or list(module.children()) or list(module.buffers()):
        return None
    params = list(module.parameters())
    if len(params) > 1 or any(p.dim() != 1 or not p.is_floating_point() for p in params):
        return None
    numbers = tuple((k, v) for k, v in sorted(vars(module).items()) if isinstance(v, (int, float, str, bool)))
    return type(module), tuple(len(p) for p in params), numbers


def _guarded(module: nn.Module, forward: Forward) -> Callable[..., Any]:
    """`forward` for the calls that it knows: one floating tensor of the parameter's dtype, no autocast."""
    original = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        plain = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        if not plain or torch.is_autocast_enabled(args[0].device.type):
            return original(*args, **kwargs)
        if any(p.dtype != args[0].dtype for p in module.parameters(recurse=False)):
            return original(*args, **kwargs)
        return forward(args[0])

    return run


def _tried(module: nn.Module) -> tuple[str, Callable[[nn.Module], Forward]] | None:
    """The name of what a module computes, and what makes its forward."""
    params = list(module.named_parameters())
    if not params:
        agrees = _agree(module, {}, lambda x: F.gelu(x, approximate="tanh"), 16)
        return ("tanh gelu", lambda m: lambda x: F.gelu(x, approximate="tanh")) if agrees else None
    (name, weight), n = params[0], len(params[0][1])
    weights = torch.linspace(0.5, 1.5, n, dtype=torch.float64)
    for eps in {v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 1}:
        for shift in (0.0, 1.0):
            if weight.dim() == 1 and _agree(module, {name: weights}, _norm(weights, eps, shift), n):
                return "rms norm", lambda m, e=eps, s=shift: lambda x: _norm(getattr(m, name), e, s)(x)
    return None


def _norm(weight: torch.Tensor, eps: float, shift: float) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        w = weight.to(torch.promote_types(weight.dtype, torch.float32)) + shift if shift else weight
        return rms_norm.functional(x, [x.shape[-1]], w.to(x.dtype) if w.dtype == torch.float64 else w, eps)

    return forward


def _agree(module: nn.Module, params: dict[str, torch.Tensor], formula: Forward, n: int) -> bool:
    """Whether the module equals the formula on values of several sizes, in the dtypes it is used in."""
    twin = copy.deepcopy(module).to_empty(device="cpu", recurse=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for k, p in twin.named_parameters():
            p.copy_(params[k])
        for size in (1.0, 1e-3, 30.0):
            x = (torch.randn(3, 2, n) * size).to(next((p.dtype for p in twin.parameters()), torch.float32))
            try:
                got = twin(x)
            except Exception:
                return False  # a module of another kind: it takes other things than one tensor
            if not isinstance(got, torch.Tensor) or got.shape != x.shape or got.dtype != x.dtype:
                return False
            want = formula(x.double())
            if (got.double() - want).abs().max() > 4 * torch.finfo(x.dtype).eps * want.abs().max():
                return False
    return True
