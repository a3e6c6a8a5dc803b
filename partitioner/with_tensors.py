"""A module called with other tensors for its parameters and buffers; afterwards it is as it was.

`torch.func.functional_call` puts the tensors in by name. Of a module that is registered under two names it keeps the
first tensor as the original and, at the second name, the replacement, and leaves that in the module (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn


def call_with(model: nn.Module, tensors: dict[str, torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
    """`model(*args, **kwargs)` with `tensors`, by the first name of each; what is tied to one of them is it."""
    tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers)]
    before = [dict(table) for table in tables]
    try:
        return torch.func.functional_call(model, tensors, args, kwargs, tie_weights=True)
    finally:
        for table, was in zip(tables, before, strict=True):
            table.clear()
            table.update(was)
