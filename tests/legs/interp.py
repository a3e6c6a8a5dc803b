"""The kernels in Triton's interpreter: numbers on the CPU. Run by `test_kernel_legs.py` in a process of its own, or

KERNELS=interp python -m pytest tests/legs/interp.py
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("KERNELS") != "interp":
    pytest.skip("runs with KERNELS=interp", allow_module_level=True)

from legs import interpreter

interpreter.start()

import torch  # noqa: E402
from meshwright.kernels import rms_norm  # noqa: E402

from legs.error import within  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_the_interpreter_rounds_bf16_as_torch():
    x = torch.randn(4096)
    x[:3] = torch.tensor([float("inf"), float("nan"), 3.3895e38])
    bits = torch.from_numpy(interpreter.narrow(x.numpy()).astype("int32"))
    want = x.bfloat16().view(torch.int16).int() & 0xFFFF
    assert (bits == want)[x == x].all()


def strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape[:-1], shape[-1] * 2).to(dtype)[..., ::2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(dtype, weighted):
    for rows, n in ((7, 1003), (1, 5), (0, 8), (3, 64), (2, 4100)):
        x, g = strided(rows, n, dtype=dtype), torch.randn(n).to(dtype).expand(rows, n)
        w = torch.randn(n).to(dtype) if weighted else None
        y, rstd = rms_norm.triton_forward(x, [n], w, 1e-6)
        dx, dw = rms_norm.triton_backward(g, x, [n], rstd, w)
        want, r64 = rms_norm._forward(x.double(), [n], None if w is None else w.double(), 1e-6)
        wdx, wdw = rms_norm._backward(g.double(), x.double(), [n], r64, None if w is None else w.double())
        within((y, want), (rstd, r64), (dx, wdx), (dw, wdw))
