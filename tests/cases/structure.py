"""The shape of the graph, recompute in the model, and what autograd lets a user add."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import SmallBlock, sq
from .registry import DP, PP, TP, Built, registry

CASES, case = registry()


@torch.library.custom_op("cases::scaled_flip", mutates_args=())
def scaled_flip(x: torch.Tensor, s: float) -> torch.Tensor:
    return x.flip(-1) * s


scaled_flip.register_fake(lambda x, s: torch.empty_like(x))

scaled_flip.register_autograd(
    lambda ctx, g: (g.flip(-1) * ctx.s, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "s", inputs[1])
)


# -- stage graph
@case(
    "unet-skips",
    "stage graph",
    "pytorch/pytorch#127964; deepspeedai/DeepSpeed#2435",
    "Skip connections jump over stages; neighbour-only transport loses them.",
    [PP, {"pp": 4}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}],
    microbatches=2,
)
def unet_skips() -> Built:
    torch.manual_seed(36)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.d1, self.d2, self.mid = nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 4)
            self.u2, self.u1 = nn.Linear(8, 6), nn.Linear(12, 8)

        def forward(self, x):
            a = torch.relu(self.d1(x))
            b = torch.relu(self.d2(a))
            m = torch.relu(self.mid(b))
            u = torch.relu(self.u2(torch.cat([m, b], -1)))
            return self.u1(torch.cat([u, a], -1)) + x

    return M(), (torch.randn(4, 8),), {}, sq


@case(
    "memory-read-by-all-decoders",
    "stage graph",
    "deepspeedai/DeepSpeed#2435; pytorch/pytorch#127964",
    "One encoder output feeds every decoder layer on several stages; its gradient is the sum from all of them.",
    [PP, {"pp": 4}, TP, {"dp": 2, "pp": 2}],
    microbatches=2,
)
def memory_read_by_all_decoders() -> Built:
    torch.manual_seed(37)

    class Dec(nn.Module):
        def __init__(self, d=8):
            super().__init__()
            self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

        def forward(self, x, mem):
            k, v = self.kv(mem).chunk(2, -1)
            return x + self.o(F.scaled_dot_product_attention(self.q(x), k, v))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8))
            self.dec = nn.ModuleList(Dec() for _ in range(3))

        def forward(self, src, tgt):
            mem = self.enc(src)
            for d in self.dec:
                tgt = d(tgt, mem)
            return tgt

    return M(), (torch.randn(4, 7, 5), torch.randn(4, 3, 8)), {}, sq


@case(
    "lstm",
    "stage graph",
    "pytorch/pytorch#33238; pytorch/tutorials#2610",
    "Recurrent layer: cached flat weights go stale when parameters are replaced, packed gates do not follow a plain "
    "split, and the state is a tuple.",
    [DP, TP, PP],
    batch_dims={0: 1, 1: 1},
)
def lstm() -> Built:
    torch.manual_seed(38)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.f = nn.LSTM(5, 6, num_layers=2), nn.Linear(6, 2)

        def forward(self, x, state):
            y, (h, c) = self.rnn(x, state)
            return self.f(y), (h, c)

    st = (torch.randn(2, 4, 6), torch.randn(2, 4, 6))
    return M(), (torch.randn(3, 4, 5), st), {}, lambda o: sq(o[0]) + sq(o[1][1])


@case(
    "two-towers",
    "stage graph",
    "pytorch/pytorch#128665; pytorch/rfcs#32",
    "Two independent towers meet at the end; cut in program order, stages carry both halves and a stage may own "
    "nothing of one tower.",
    [PP, {"pp": 4}, DP, TP],
    microbatches=2,
)
def two_towers() -> Built:
    torch.manual_seed(132)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))
            self.b = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 6))
            self.out = nn.Bilinear(6, 6, 3)

        def forward(self, x, ids):
            u = self.a(x)
            v = self.b(ids)
            return self.out(u, v) + (u * v).sum(-1, keepdim=True)

    return M(), (torch.randn(4, 5), torch.randint(0, 10, (4, 3))), {}, sq


# -- autograd extensions and hooks
@case(
    "straight-through-function",
    "autograd extensions and hooks",
    "pytorch/pytorch#143134; pytorch/pytorch#128636",
    "A custom autograd function whose backward is not the derivative of its forward; decomposing or re-deriving "
    "it changes the gradient.",
    [DP, TP, PP],
    recompute=True,
)
def straight_through_function() -> Built:
    torch.manual_seed(73)

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, step):
            ctx.step = step
            return torch.round(x / step) * step

        @staticmethod
        def backward(ctx, g):
            return g.clamp(-1, 1) * (1 + ctx.step), None

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.g(Round.apply(torch.tanh(self.f(x)), 0.25))

    return M(), (torch.randn(4, 6),), {}, sq


@case(
    "custom-op-without-rule",
    "autograd extensions and hooks",
    "Lightning-AI/lightning-thunder#2589; meta-pytorch/autoparallel#417",
    "An op the planner has never heard of, not elementwise along its last dim; treating it as elementwise is "
    "silently wrong.",
    [DP, TP, PP],
    expect="match|error: no sharding rule for cases::scaled_flip",
)
def custom_op_without_rule() -> Built:
    torch.manual_seed(74)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.g(torch.ops.cases.scaled_flip(torch.tanh(self.f(x)), 0.5))

    return M(), (torch.randn(4, 6),), {}, sq


@case(
    "forward-hooks",
    "autograd extensions and hooks",
    "pytorch/pytorch#185331; huggingface/diffusers#14135",
    "Forward pre-hook and hook change what flows; capture that re-builds modules drops them.",
    [DP, TP, PP],
    microbatches=2,
)
def forward_hooks() -> Built:
    torch.manual_seed(77)
    m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    m[0].register_forward_pre_hook(lambda mod, args: (args[0] * 0.5 + 1,))
    m[2].register_forward_hook(lambda mod, args, out: out + args[0].square())
    return m, (torch.randn(4, 6),), {}, sq


# -- recompute and compile
@case(
    "checkpoint-inside-the-model",
    "recompute and compile",
    "pytorch/pytorch#153354; meta-pytorch/torchtune#2451",
    "The model already calls torch.utils.checkpoint, once on a closure; nesting our own recompute over it breaks "
    "shapes or types.",
    [{"dp": 1}, DP, TP, PP],
    recompute=True,
)
def checkpoint_inside_the_model() -> Built:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(78)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = SmallBlock(), SmallBlock()

        def forward(self, x):
            x = checkpoint(self.a, x, use_reentrant=False)
            return checkpoint(lambda t: self.b(t) * 2, x, use_reentrant=False)

    return M(), (torch.randn(4, 8),), {}, sq
