"""Indices of a dim of which a rank holds a part: what lies outside the whole dim is an error on every rank.

Without the check such an index would be held by no rank, and its row silently zeros.
"""

from __future__ import annotations

import torch


def in_bounds(ids: torch.Tensor, size: int, low: int = 0) -> None:
    """Refuse indices outside [low, size): at once, or on a GPU when the kernel runs.

    Raises:
        IndexError: the message names the first of them and the bounds.
    """
    if ids.untyped_storage().device.type == "meta" or not ids.numel():
        return
    wrong = (ids < low) | (ids >= size)
    if ids.device.type != "cpu":
        torch.ops.aten._assert_async.msg(wrong.any().logical_not(), f"an index is outside [{low}, {size})")
    elif bool(wrong.any()):
        raise IndexError(f"index {int(ids[wrong][0])} is out of bounds: there are rows {low} to {size - 1}")
