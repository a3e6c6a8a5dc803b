"""Ops that need another dtype than the rest of a program in bfloat16 or float16, found by the function called.

    losses     all operands in float32; one with a linear layer in it has that in the low dtype
    products   operands of several dtypes go to that of the weight (one that is kept in float32 makes the product so),
               or to the low one where there is no weight: a mask or a table of positions in float32 may have widened
               one side
    norms      weights go to the dtype of the input; with an input in the low dtype and weights that are kept in float32
               the norm is computed in float32 and its result is in the low dtype again
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

Rule = Callable[[torch.dtype, Callable, tuple, dict[str, Any]], Any]


def _loss(low: torch.dtype, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    args, kwargs = _cast((args, kwargs), low, torch.float32)
    return func(*args, **kwargs)


def _product(low: torch.dtype, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if _dtypes((args, kwargs)) >= {low, torch.float32}:
        args, kwargs = _cast((args, kwargs), torch.float32, low)
    return func(*args, **kwargs)


def _weighted(low: torch.dtype, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if _dtypes((args, kwargs)) >= {low, torch.float32} and isinstance(weight, torch.Tensor):
        before = torch.float32 if weight.dtype == low else low
        args, kwargs = _cast((args, kwargs), before, weight.dtype)
    return func(*args, **kwargs)


def _norm(low: torch.dtype, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    if not _dtypes((args, kwargs)) >= {low, torch.float32}:
        return func(*args, **kwargs)
    args, kwargs = _cast((args, kwargs), low, torch.float32)
    return func(*args, **kwargs).to(x.dtype)


def _linear_loss(low: torch.dtype, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """As under autocast: products in the low dtype, the loss in float32."""
    x = args[0] if args else kwargs["input"]
    with torch.autocast(x.device.type, dtype=low):
        return func(*args, **kwargs)


def _batch_norm(low: torch.dtype, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Its input may be narrower than its statistics and weights, which are of one dtype."""
    if args:
        args = (args[0], *_cast(args[1:], low, torch.float32))
        return func(*args, **_cast(kwargs, low, torch.float32))
    rest = {k: x for k, x in kwargs.items() if k != "input"}
    return func(input=kwargs["input"], **_cast(rest, low, torch.float32))


def _dtypes(tree: Any) -> set[torch.dtype]:
    return {t.dtype for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)}


def _cast(tree: Any, before: torch.dtype, after: torch.dtype) -> Any:
    def cast(t: Any) -> Any:
        return t.to(after) if isinstance(t, torch.Tensor) and t.dtype == before else t

    return pytree.tree_map(cast, tree)


_LOSSES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "ctc_loss",
    "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
)  # fmt: skip
_WEIGHTED = (
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
)  # fmt: skip
_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "mv", "tensordot", "dot")
_NORMS = ("layer_norm", "group_norm", "rms_norm")


def _table() -> dict[Any, Rule]:
    found: dict[Any, Rule] = {getattr(F, name): _loss for name in _LOSSES}
    found |= {getattr(F, name): _weighted for name in _WEIGHTED}
    found |= {getattr(torch, name): _weighted for name in _WEIGHTED if hasattr(torch, name)}
    found |= {getattr(F, name): _norm for name in _NORMS} | {torch.layer_norm: _norm, torch.group_norm: _norm}
    found |= {getattr(torch, name): _product for name in _PRODUCTS}
    found |= {getattr(torch.Tensor, name): _product for name in _PRODUCTS if hasattr(torch.Tensor, name)}
    found |= {torch.Tensor.__matmul__: _product, torch.Tensor.__rmatmul__: _product}
    found |= {F.linear_cross_entropy: _linear_loss}
    return found | {F.scaled_dot_product_attention: _product, F.bilinear: _product, F.batch_norm: _batch_norm}


RULES = _table()
"""Function -> what is done with its operands."""

_PATCHED = ("cross_entropy", "linear_cross_entropy", "rms_norm", "scaled_dot_product_attention")
"""Functions that capture replaces by its own, which no mode sees."""

_ORIGINAL = {name: getattr(F, name) for name in _PATCHED}


class _Islands(TorchFunctionMode):
    def __init__(self, low: torch.dtype):
        super().__init__()
        self.low = low

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        rule = RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self.low, func, args, kwargs or {})


@contextlib.contextmanager
def islands(low: torch.dtype) -> Iterator[None]:
    """While it lasts, calls of functions of torch have their operands in the dtypes that they need."""
    saved = {name: getattr(F, name) for name in _PATCHED}
    try:
        for name, inner in saved.items():
            setattr(F, name, _wrapped(low, inner, RULES[_ORIGINAL[name]]))
        with _Islands(low):
            yield
    finally:
        for name, inner in saved.items():
            setattr(F, name, inner)


def _wrapped(low: torch.dtype, inner: Callable, rule: Rule) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        return rule(low, inner, args, kwargs)

    return call
