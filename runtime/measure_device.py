"""Measures one device: matrix products at three sizes, and a copy.

    flop/s   2 n^3 / seconds, the best of the sizes         bytes/s   2 * size of the copy / seconds

The best of a few runs counts: what else the machine did in the others is no property of it. A CPU's copy is timed
in pieces, of each the best: on a busy machine something breaks into all that takes longer than a turn of the processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
_COPY = {"cpu": 2**26, "cuda": 2**30}
_PIECES = {"cpu": 16, "cuda": 1}
_RUNS, _LONGEST = 6, 0.2
"""Runs of a size, and the seconds of one run after which no larger size is tried."""


@dataclass(frozen=True)
class DeviceRates:
    """`flops`: {dtype name: flop/s}, as pairs; `copy`: bytes a second, read and written; `memory`: bytes, or 0."""

    flops: tuple[tuple[str, float], ...]
    copy: float
    memory: float


def measure_device(device: torch.device) -> DeviceRates:
    """The rates of this process's device, with the threads that torch has now."""
    names = (
        ("bfloat16", "float16", "float32", "float64") if device.type == "cuda" else ("float32", "float64", "bfloat16")
    )
    flops = [(name, _matmul(getattr(torch, name), device)) for name in names]
    if device.type == "cuda":
        flops.append(("tf32", _tf32(device)))
    memory = float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0.0
    return DeviceRates(tuple(flops), _copy(device), memory)


def _matmul(dtype: torch.dtype, device: torch.device) -> float:
    best = 0.0
    for n in _SIZES[device.type]:
        a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty(n, n, dtype=dtype, device=device)
        taken = best_of(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)
        best = max(best, 2.0 * n**3 / taken)
        if taken > _LONGEST:
            break
    return best


def _tf32(device: torch.device) -> float:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return _matmul(torch.float32, device)
    finally:
        torch.set_float32_matmul_precision(before)


def _copy(device: torch.device) -> float:
    source = torch.zeros(_COPY[device.type], dtype=torch.uint8, device=device)
    pieces = _PIECES[device.type]
    target, best = torch.empty_like(source), [float("inf")] * pieces
    for _ in range(_RUNS + 1):
        for i, (to, of) in enumerate(zip(target.chunk(pieces), source.chunk(pieces), strict=True)):
            finish(device)
            start = time.perf_counter()
            to.copy_(of)
            finish(device)
            best[i] = min(best[i], time.perf_counter() - start)
    return 2.0 * source.numel() / sum(best)


def best_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs, after one that warms up."""
    best = float("inf")
    for i in range(_RUNS + 1):
        finish(device)
        start = time.perf_counter()
        run()
        finish(device)
        if i:
            best = min(best, time.perf_counter() - start)
    return best


def finish(device: torch.device) -> None:
    """Wait for what the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
