"""Every kernel on this machine's GPU: right, and how fast beside a copy, a matrix product, and peers.

    python benchmarks/kernels_gpu.py                 # on CUDA (or ROCm): bf16, all sizes; writes a line an op and pass
    python benchmarks/kernels_gpu.py --quick         # small sizes, few turns
    python benchmarks/kernels_gpu.py --only rms_norm swiglu

First each op is checked: its error against float64 beside that of PyTorch's own form in the same dtype; a ratio above 2
ends the run with status 1. Then each pass is timed: the least of several turns, in which ours and the peers take turns
(eager, torch.compile, liger-kernel where it is installed). `share` is of what this GPU reaches: for what moves bytes of
the speed of a copy measured here, for matrix products of that of a bf16 product of 8192 x 8192. Without a GPU the
checks run on the CPU's form of each op at small sizes, and CPU-milliseconds of that form are printed, not of a kernel.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from meshwright.kernels import add_norm, gated, linear_cross_entropy, random, rms_norm, rope  # noqa: F401
from meshwright.kernels.philox import whole_pieces

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ops = torch.ops.meshwright


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        ours, eager: of the leaves, to a tensor or a tuple of tensors whose first has the gradient.
        leaves: what has gradients. fixed: what has none, given after them.
        nbytes: read and written in forward, and in backward.
        flops: of forward, where it is a matrix product; backward's are twice that.
        liger: (module, class, further arguments) of liger-kernel's function of leaves and fixed.
        exact: whether ours and eager are compared with float64; draws are not.
        backward: whether there is one to time.
    """

    name: str
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    leaves: Sequence[torch.Tensor]
    nbytes: tuple[float, float]
    fixed: Sequence[Any] = ()
    flops: float = 0.0
    liger: tuple[str, str, tuple] | None = None
    exact: bool = True
    backward: bool = True


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def cases(m: int, h: int, ffn: int, vocabulary: int) -> list[Case]:
    """m tokens of size h."""
    row, wide = 2.0 * m * h, 2.0 * m * ffn  # bytes
    x, r, w, bias = tensor(m, h), tensor(m, h), tensor(h), tensor(h)
    heads, d = h // 128 or 1, min(128, h)
    q, cos, sin = tensor(1, m, heads, d).transpose(1, 2), tensor(1, 1, m, d), tensor(1, 1, m, d)
    gate, up = tensor(m, 2 * ffn).chunk(2, -1)
    pieces, word = whole_pieces((m, h)), torch.randint(0, vocabulary, (m,), device=DEVICE)

    def dropped(t: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return random.dropout(t, 0.1, 7, 0, 0, pieces, residual=residual)[0]

    return [
        Case(
            "rms_norm", lambda x, w: rms_norm.functional(x, [h], w, 1e-6), lambda x, w: F.rms_norm(x, [h], w, 1e-6),
            (x, w), (row * 2, row * 3), liger=("rms_norm", "LigerRMSNormFunction", (1e-6,)),
        ),
        Case(
            "add_rms_norm", lambda x, r, w: ops.add_rms_norm(x, r, [h], w, 1e-6)[:2],
            lambda x, r, w: (F.rms_norm(x + r, [h], w, 1e-6), x + r), (x, r, w), (row * 4, row * 4),
        ),
        Case(
            "add_layer_norm", lambda x, r, w, c: ops.add_layer_norm(x, r, [h], w, c, 1e-6)[:2],
            lambda x, r, w, c: (F.layer_norm(x + r, [h], w, c, 1e-6), x + r), (x, r, w, bias), (row * 4, row * 4),
        ),
        *(
            Case(
                name, lambda g, u, a=act: ops.gated(g, u, a), lambda g, u, f=plain: f(g) * u, (gate, up),
                (wide * 3, wide * 5), liger=("swiglu", "LigerSiLUMulFunction", ()) if act == "silu" else None,
            )
            for name, act, plain in (
                ("swiglu", "silu", F.silu),
                ("geglu", "gelu_tanh", lambda g: F.gelu(g, approximate="tanh")),
            )
        ),
        Case("rope", ops.rope, rotated, (q,), (row * 2, row * 2), fixed=(cos, sin)),
        Case(
            "dropout + residual", dropped, lambda t, residual: F.dropout(t, 0.1) + residual, (x, r), (row * 3.5, 0),
            exact=False, backward=False,
        ),
        Case(
            "linear + cross entropy", lambda x, w: linear_cross_entropy.functional(x, w, word),
            lambda x, w: F.cross_entropy(F.linear(x, w), word), (tensor(m, h) * h**-0.5, tensor(vocabulary, h)), (0, 0),
            flops=2.0 * m * h * vocabulary,
        ),
    ]  # fmt: skip


def first(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def results(case: Case, call: Callable[..., Any], wide: bool = False) -> list[torch.Tensor]:
    """Outputs and gradients, of one combination of the outputs."""
    to = torch.float64 if wide else None
    leaves = [t.detach().to(to or t.dtype).requires_grad_() for t in case.leaves]
    fixed = [t.to(to) if to and isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in case.fixed]
    out = first(call(*leaves, *fixed))
    torch.manual_seed(1)
    grads = [torch.randn(o.shape, device=o.device, dtype=case.leaves[0].dtype).to(o.dtype) for o in out]
    return [*(o.detach() for o in out), *torch.autograd.grad(out, leaves, grads)]


def worst(case: Case) -> float:
    """The largest error against float64, of outputs and gradients, over that of PyTorch's form in the same dtype (or
    over half a rounding, where that is more)."""
    exact = results(case, case.eager, wide=True)
    ours, theirs = results(case, case.ours), results(case, case.eager)
    found = 0.0
    for mine, eager, e in zip(ours, theirs, exact, strict=True):
        far, near = (mine.double() - e).norm(), (eager.double() - e).norm()
        found = max(found, float(far / (torch.maximum(near, 1e-3 * e.norm()) + 1e-30)))
    return found


def seconds(run: Callable[[], Any], turns: int) -> list[float]:
    """Of each turn: by events on a GPU, with a cache flushed before each; CPU seconds else."""
    found = []
    flush = torch.empty(64 << 20, dtype=torch.int32, device=DEVICE) if CUDA else None
    for _ in range(turns):
        if flush is None:
            start = time.process_time()
            run()
            found.append(time.process_time() - start)
            continue
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found


def passes(case: Case, call: Callable[..., Any]) -> list[Callable[[], Any]]:
    """Forward alone and, where it has one, backward alone."""
    leaves = [t.detach().clone().requires_grad_() for t in case.leaves]
    forward = torch.no_grad()(lambda: call(*leaves, *case.fixed))
    if not case.backward:
        return [forward]
    out = first(call(*leaves, *case.fixed))
    grads = [torch.randn_like(o) for o in out]
    return [forward, lambda: torch.autograd.grad(out, leaves, grads, retain_graph=True)]


def peers(case: Case) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"ours": case.ours, "eager": case.eager}
    if CUDA:
        found["compile"] = torch.compile(case.eager)
    if CUDA and case.liger:
        module, name, more = case.liger
        try:
            function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
        except ImportError:
            return found
        found["liger"] = lambda *args: function.apply(*args, *more)
    return found


def ceilings(turns: int) -> tuple[float, float]:
    """Bytes a second of a copy, read and written; flops a second of a product in bf16."""
    n = 1 << (28 if CUDA else 22)
    source = torch.empty(n, dtype=torch.bfloat16, device=DEVICE)
    target, side = torch.empty_like(source), 8192 if CUDA else 256
    a, b = tensor(side, side), tensor(side, side)
    copy = 4.0 * n / min(seconds(lambda: target.copy_(source), turns))
    return copy, 2.0 * side**3 / min(seconds(lambda: a @ b, turns))


def timed(case: Case, turns: int, copy: float, product: float) -> list[str]:
    """A line a pass."""
    runs = {name: passes(case, call) for name, call in peers(case).items()}
    lines = []
    for i, kind in enumerate(("forward", "backward")[: len(runs["ours"])]):
        for each in runs.values():
            seconds(each[i], 3)  # compiled and warm
        found = {name: [t for _ in range(4) for t in seconds(each[i], turns // 4)] for name, each in runs.items()}
        least = {name: min(times) for name, times in found.items()}
        work = case.flops * (i + 1)
        rate = work / least["ours"] if work else case.nbytes[i] / least["ours"]
        said = f"{rate / 1e12:7.1f} TFLOP/s" if work else f"{rate / 1e9:7.0f} GB/s   "
        share = rate / (product if work else copy)
        ratios = "  ".join(f"{n} {t / least['ours']:5.2f}x" for n, t in least.items() if n != "ours")
        lines.append(f"{case.name:24}{kind:9}{least['ours'] * 1e3:9.3f} ms {said} {share:6.1%}  {ratios}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few turns")
    parser.add_argument("--only", nargs="*", default=[], help="names of ops")
    args = parser.parse_args()
    torch.manual_seed(0)
    small = args.quick or not CUDA
    sizes = [(257, 256, 688, 1003)] if small else [(8192, 4096, 14336, 128256), (8192, 8192, 28672, 32000)]
    turns = 8 if small else 40
    copy, product = ceilings(turns)
    where = torch.cuda.get_device_name() if CUDA else "CPU, not a kernel's speed"
    print(f"{where}: copy {copy / 1e9:.0f} GB/s, bf16 product {product / 1e12:.2f} TFLOP/s; peers: their time / ours")
    failed = 0
    for size in sizes:
        print("m {} h {} ffn {} v {}".format(*size))
        for case in cases(*size):
            if args.only and case.name not in args.only:
                continue
            error = worst(case) if case.exact else 0.0
            failed += error > 2
            print("\n".join(timed(case, turns, copy, product)), f"  error {error:.2f} of PyTorch's", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
