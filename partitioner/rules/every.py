"""Every rule: `rule_of(call)` finds the one of a call."""

from __future__ import annotations

from typing import Any

import torch

from . import (
    attention,
    batch_norm,
    contraction,
    conv,
    factories,
    gated,
    images,
    index,
    linear_loss,
    loss,
    norm,
    pieces,
    pointwise,
    pools,
    random,
    reductions,
    rope,
    scan,
    softmax,
    views,
)
from .dims import fitted
from .discover import discovered_rule
from .notation import Rule
from .split import Call
from .table import Table, merged

TABLE: Table = merged(
    (
        views.TABLE,
        pieces.TABLE,
        pointwise.TABLE,
        reductions.TABLE,
        contraction.TABLE,
        factories.TABLE,
        index.TABLE,
        softmax.TABLE,
        norm.TABLE,
        batch_norm.TABLE,
        conv.TABLE,
        images.TABLE,
        pools.TABLE,
        attention.TABLE,
        loss.TABLE,
        linear_loss.TABLE,
        scan.TABLE,
        random.TABLE,
        gated.TABLE,
        rope.TABLE,
    )
)
"""Every op overload with a rule of its own."""

BY_NAME: Table = contraction.BY_NAME
"""Ops of other libraries, by the text of the overload: they need not be imported here."""


def rule_of(call: Call) -> Rule:
    """The rule of a call: the op's own, else the element-wise one where torch says it is, else what trying it shows."""
    own = _own(call.target)
    if own is not None:
        return fitted(own(call), call)
    if _is_pointwise(call.target):
        return fitted(pointwise.pointwise_rule(call), call)
    return discovered_rule(call)


def has_rule(target: Any) -> bool:
    """An op that `rule_of` knows."""
    return _own(target) is not None or _is_pointwise(target)


def _own(target: Any) -> Any:
    return TABLE.get(target) or BY_NAME.get(str(target))


def _is_pointwise(target: Any) -> bool:
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
