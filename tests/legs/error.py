"""How far a kernel may be from float64."""

from __future__ import annotations

import torch

_EPS = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4, torch.float64: 1e-12}


def within(*pairs: tuple[torch.Tensor, torch.Tensor], times: float = 1.0) -> None:
    """Each (kernel's, float64) pair: relative error in norm at most that of one rounding of the kernel's dtype, and
    each element within a unit in its last place."""
    for i, (got, want) in enumerate(pairs):
        assert got.shape == want.shape, (i, got.shape, want.shape)
        eps, wide = _EPS[got.dtype] * times, got.double()
        norm = want.norm()
        far = (wide - want).norm()
        assert far <= eps * norm + 1e-30 or not want.numel(), f"pair {i}: {far / norm:.2e} of {eps:.2e}"
        torch.testing.assert_close(wide, want, rtol=4 * eps, atol=4 * eps * float(want.abs().max()) if norm else 0.0)
