"""Single ops along a split dim."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import TokenLM, sgd, sq
from .registry import CP, DP, PP, TP, Built, registry

CASES, case = registry()


# -- complex numbers
@case(
    "complex-rope",
    "complex numbers",
    "pytorch/torchtitan#180; pytorch/torchtitan#3458; pytorch/torchtitan#792",
    "Rotary embedding with complex buffers and view_as_complex; complex ops break under sharding, worst in backward.",
    [TP, {"tp": 4}, CP, {"dp": 2, "tp": 2}, PP],
)
def complex_rope() -> Built:
    torch.manual_seed(39)

    class M(nn.Module):
        def __init__(self, d=16, h=4):
            super().__init__()
            self.h, self.qk, self.o = h, nn.Linear(d, 2 * d), nn.Linear(d, d)
            f = torch.outer(torch.arange(12.0), 1.0 / 100 ** (torch.arange(0, d // h, 2) / (d // h)))
            self.register_buffer("rot", torch.polar(torch.ones_like(f), f), persistent=False)

        def forward(self, x):
            b, s, _ = x.shape
            q, k = self.qk(x).view(b, s, 2, self.h, -1).unbind(2)
            r = self.rot[:s].view(1, s, 1, -1)
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * r).flatten(3)
                for t in (q, k)
            )
            a = torch.softmax(torch.einsum("bshd,bthd->bhst", q, k), -1)
            return self.o(torch.einsum("bhst,bthd->bshd", a, k).reshape(b, s, -1))

    return M(), (torch.randn(2, 6, 16),), {}, sq


@case(
    "fourier-mixing",
    "complex numbers",
    "tenstorrent/tt-xla#3060; pytorch/torchtitan#180",
    "FFT over a split dim with complex parameters; abs of complex in the loss.",
    [CP, TP, DP, PP],
)
def fourier_mixing() -> Built:
    torch.manual_seed(135)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64) / 3)
            self.f = nn.Linear(6, 6)

        def forward(self, x):
            z = torch.fft.rfft(x, dim=1) * self.w
            return self.f(torch.fft.irfft(z, n=x.shape[1], dim=1)) + z.abs().mean(1, keepdim=True)

    return M(), (torch.randn(2, 8, 6),), {}, sq


# -- indexing
@case(
    "index-put-on-split-dim",
    "indexing",
    "pytorch/pytorch#170934; pytorch/pytorch#172350",
    "Global positions are written into a tensor split on that very dim; local shards are indexed with global numbers.",
    [TP, {"tp": 4}, DP],
    expect="match|error: index_put along the sharded dimension",
    batch_dims={1: None, 2: None},
)
def index_put_on_split_dim() -> Built:
    torch.manual_seed(40)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(6, 16)
            self.val = nn.Parameter(torch.randn(4))

        def forward(self, x, rows, cols):
            h = self.f(x)
            h = h.index_put((rows, cols), self.val * 2)
            return torch.tanh(h)

    i = torch.tensor([0, 1, 2, 3])
    return M(), (torch.randn(4, 6), i, torch.tensor([15, 3, 8, 0])), {}, sq


@case(
    "gather-label-logit",
    "indexing",
    "pytorch/pytorch#118461; pytorch/pytorch#179136",
    "Per-token log probability by gather along the vocabulary, which the head keeps split.",
    [TP, {"tp": 4}, {"dp": 2, "tp": 2}, CP],
)
def gather_label_logit() -> Built:
    torch.manual_seed(41)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(18, 10), nn.Linear(10, 18)

        def forward(self, ids, labels):
            lp = torch.log_softmax(self.head(self.emb(ids)), -1)
            return -lp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    return M(), (torch.randint(0, 18, (4, 5)), torch.randint(0, 18, (4, 5))), {}, lambda y: y.pow(1.5).mean()


@case(
    "topk-on-split-dim",
    "indexing",
    "jax-ml/jax#19271; pytorch/pytorch#178582; pytorch/torchtitan#2801",
    "Top-k along a split dim picks per-shard winners; its backward mixes local and global indices.",
    [TP, {"tp": 4}, DP, PP],
)
def topk_on_split_dim() -> Built:
    torch.manual_seed(42)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 16), nn.Linear(3, 2)

        def forward(self, x):
            v, i = torch.topk(self.f(x), 3, dim=-1)
            return self.g(v) + i.float().mean(-1, keepdim=True) * 0.01

    return M(), (torch.randn(4, 6),), {}, sq


@case(
    "cumsum-on-split-dim",
    "indexing",
    "jax-ml/jax#21403; pytorch/pytorch#151071",
    "Running sum along the split sequence restarts at zero on every rank.",
    [CP, {"cp": 4}, TP, {"dp": 2, "cp": 2}],
)
def cumsum_on_split_dim() -> Built:
    torch.manual_seed(43)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = torch.cumsum(F.softplus(self.f(x)), dim=1)
            return self.g(h / torch.arange(1, x.shape[1] + 1).view(1, -1, 1))

    return M(), (torch.randn(2, 8, 4),), {}, sq


@case(
    "roll-pad-concat",
    "indexing",
    "jax-ml/jax#39301; jax-ml/jax#24576; jax-ml/jax#19106",
    "Token shift: roll, pad, reverse and concatenate along the split sequence, down to one element per rank.",
    [CP, {"cp": 4}, TP, DP],
)
def roll_pad_concat() -> Built:
    torch.manual_seed(139)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.f = nn.Parameter(torch.rand(6)), nn.Linear(6, 6)

        def forward(self, x):
            prev = F.pad(x, (0, 0, 1, -1))
            nxt = torch.cat([x[:, 2:], x[:, :2]], 1)
            y = x * self.mix + prev * (1 - self.mix) + nxt.roll(-1, 1) * 0.3 + x.flip(1) * 0.1
            return torch.cat([self.f(y), y[:, ::2]], 1)

    return M(), (torch.randn(2, 4, 6),), {}, sq


# -- partial sums
@case(
    "bias-after-row-split",
    "partial sums",
    "huggingface/text-generation-inference#1036; pytorch/torchtitan#2106",
    "Bias of a row-split linear is added on every rank before the sum, so it enters tp times (or its gradient does).",
    [TP, {"tp": 4}, {"dp": 2, "tp": 2}],
)
def bias_after_row_split() -> Built:
    torch.manual_seed(46)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
            nn.init.constant_(self.down.bias, 3.0)

        def forward(self, x):
            return torch.sigmoid(self.down(torch.relu(self.up(x))))

    return M(), (torch.randn(4, 6),), {}, sq


@case(
    "number-added-to-partial",
    "partial sums",
    "pytorch/pytorch#163193; pytorch/pytorch#147910",
    "A plain number is added to a not-yet-reduced sum and gets counted once per rank.",
    [TP, DP, {"dp": 4}],
    expect="match|error: the output mixes the samples of the batch",
)
def number_added_to_partial() -> Built:
    torch.manual_seed(47)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(10, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            s = (x @ self.w).sum(0) + 10  # sum over the batch, then a constant
            return (s * self.v).sum() + 1.0, s

    return M(), (torch.randn(4, 10),), {}, lambda o: o[0] + (1 / (1 + o[1].pow(2))).sum()


@case(
    "softmax-on-split-dim",
    "partial sums",
    "pytorch/pytorch#165962; pytorch/pytorch#174536",
    "Softmax and logsumexp over a split dim need the global maximum and sum.",
    [TP, {"tp": 4}, {"tp": 3}],
)
def softmax_on_split_dim() -> Built:
    torch.manual_seed(48)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x):
            z = self.f(x) * 20
            return self.g(torch.softmax(z, -1)) + torch.logsumexp(z, -1, keepdim=True) * 0.01

    return M(), (torch.randn(4, 6),), {}, sq


@case(
    "group-norm",
    "partial sums",
    "NVIDIA/physicsnemo#1421; pytorch/pytorch#115250",
    "Group norm with channels or pixels split: group borders do not follow shard borders.",
    [TP, {"tp": 4}, DP, CP],
)
def group_norm() -> Built:
    torch.manual_seed(49)
    m = nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(3, 6), nn.SiLU(), nn.Conv2d(6, 3, 1))
    return m, (torch.randn(2, 3, 4, 4) + 2,), {}, sq


# -- split vocabulary
@case(
    "masked-cross-entropy-odd-vocab",
    "split vocabulary",
    "hpcaitech/ColossalAI#5176; EleutherAI/oslo#85",
    "Cross entropy over a split odd vocabulary with ignored labels: targets fall outside the local range, ignored "
    "ones hit row 0.",
    [TP, {"tp": 4}, {"dp": 2, "tp": 2}, CP],
)
def masked_cross_entropy_odd_vocab() -> Built:
    torch.manual_seed(50)
    lab = torch.randint(0, 23, (4, 6))
    lab[0, :4], lab[3] = -100, 0
    return TokenLM(v=23), (torch.randint(0, 23, (4, 6)), lab), {}, None


@case(
    "padding-idx-row-split",
    "split vocabulary",
    "pytorch/torchtitan#4637; NVIDIA-NeMo/Automodel#1675",
    "Embedding rows are split and padding_idx is taken as a local row: the wrong token loses its gradient, or a "
    "range error follows.",
    [TP, {"tp": 4}, DP],
)
def padding_idx_row_split() -> Built:
    torch.manual_seed(51)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.f = nn.Embedding(12, 6, padding_idx=9), nn.Linear(6, 4)

        def forward(self, ids):
            return self.f(self.emb(ids))

    return M(), (torch.tensor([[9, 3, 1, 9], [3, 3, 0, 11]]),), {}, sq


@case(
    "sparse-embedding-gradient",
    "split vocabulary",
    "pytorch/pytorch#80496; deepspeedai/DeepSpeed#208",
    "Embedding with sparse=True: the gradient is a sparse tensor that collectives, sharders and clippers do not take.",
    [DP, TP, PP],
    expect="match|error: sparse gradient of 'emb.weight'",
    optim=sgd(0.1),
    steps=2,
)
def sparse_embedding_gradient() -> Built:
    torch.manual_seed(52)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.f = nn.Embedding(30, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, ids):
            return self.f(self.emb(ids).mean(1))

    return M(), (torch.randint(0, 30, (4, 3)),), {}, sq


# -- convolution
@case(
    "strided-conv-with-padding",
    "convolution",
    "pytorch/pytorch#176446; jax-ml/jax#16894",
    "7x7 stride 2 padding 3 convolution, as in every image net: spatial or batch split rejects it or is off at the "
    "borders.",
    [DP, TP, CP, {"dp": 2, "tp": 2}],
)
def strided_conv_with_padding() -> Built:
    torch.manual_seed(53)
    m = nn.Sequential(
        nn.Conv2d(3, 4, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(36, 2)
    )
    return m, (torch.randn(4, 3, 12, 12),), {}, sq


@case(
    "causal-conv-over-sequence",
    "convolution",
    "PrimeIntellect-ai/prime-rl#2392",
    "Causal 1-d convolution (kernel 4) along a split sequence needs the last tokens of the rank before.",
    [CP, {"cp": 4}, TP, DP],
)
def causal_conv_over_sequence() -> Built:
    torch.manual_seed(54)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.f = nn.Conv1d(6, 6, 4, groups=6), nn.Linear(6, 6)

        def forward(self, x):
            y = self.c(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
            return x + self.f(F.silu(y))

    return M(), (torch.randn(2, 8, 6),), {}, sq
