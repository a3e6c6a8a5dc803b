"""Embedding rows of a vocabulary of which a rank holds the rows [start, start + len(weight)).

Forward: the rows of the ids held, zeros for the others, so the ranks' results sum to the whole lookup (Shoeybi et al.,
arXiv 1909.08053, section 3). Backward: grad summed into the rows held.
"""

from __future__ import annotations

import torch

from .bounds import in_bounds


def _held(ids: torch.Tensor, start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    there = (ids >= start) & (ids < start + rows)
    return torch.where(there, ids - start, 0), there


def embedding_rows(weight: torch.Tensor, ids: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """weight[ids - start] where that row is held, zeros elsewhere; the whole has `size` rows."""
    in_bounds(ids, size)
    if weight.shape[0] == 0:
        return weight.new_zeros(*ids.shape, *weight.shape[1:])
    row, there = _held(ids, start, weight.shape[0])
    return weight[row].masked_fill_(there.logical_not().reshape(*ids.shape, *[1] * (weight.dim() - 1)), 0.0)


def embedding_rows_backward(
    grad: torch.Tensor, ids: torch.Tensor, num_rows: int, padding_idx: int, scale_grad_by_freq: bool, start: int
) -> torch.Tensor:
    """The gradient of the rows held: Σ over the ids equal to a row (over their count, if scaled); none for padding."""
    flat, rows = ids.reshape(-1), grad.reshape(ids.numel(), grad.shape[-1])
    there = (flat >= start) & (flat < start + num_rows) & (flat != padding_idx)
    local = torch.where(there, flat - start, num_rows)  # one row more takes what is not held
    if scale_grad_by_freq:
        rows = rows / torch.bincount(local, minlength=num_rows + 1)[local].unsqueeze(1)
    out = rows.new_zeros(num_rows + 1, rows.shape[1])
    return out.index_add_(0, local, rows)[:num_rows].contiguous()
