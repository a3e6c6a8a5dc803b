"""Uneven, reshaped, varying, empty, deep and aliased."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import randn, sgd, sq
from .registry import CP, DP, PP, TP, Built, registry

CASES, case = registry()


# -- uneven shards
@case(
    "prime-vocab",
    "uneven shards",
    "Lightning-AI/lightning-thunder#248",
    "Vocabulary of odd size (29 here, as 32001 or 50257 in life): head, embedding and loss do not divide by the "
    "mesh axis.",
    [TP, {"tp": 4}, {"tp": 3}, {"dp": 2, "tp": 2}],
    zero=1,
)
def prime_vocab() -> Built:
    torch.manual_seed(5)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(29, 12)
            self.ln = nn.LayerNorm(12)
            self.head = nn.Linear(12, 29)

        def forward(self, ids, labels):
            y = self.head(self.ln(self.emb(ids)))
            return F.cross_entropy(y.flatten(0, 1), labels.flatten())

    ids = torch.arange(24).reshape(4, 6) + 5
    return M(), (ids, ids.flip(0)), {}, None


@case(
    "kv-heads-below-tp",
    "uneven shards",
    "huggingface/transformers#48307; pytorch/torchtitan#2574; deepspeedai/DeepSpeed#4016",
    "Grouped-query attention with fewer key/value heads than tensor ranks: the head reshape fails deep in "
    "forward, or heads are paired with the wrong group.",
    [TP, {"tp": 4}, {"dp": 2, "tp": 2}],
)
def kv_heads_below_tp() -> Built:
    torch.manual_seed(6)

    class M(nn.Module):
        def __init__(self, d=16, h=4, kv=1):
            super().__init__()
            self.h, self.kv, self.hd = h, kv, d // h
            self.q, self.k = nn.Linear(d, d), nn.Linear(d, kv * self.hd)
            self.v, self.o = nn.Linear(d, kv * self.hd), nn.Linear(d, d)

        def forward(self, x):
            b, s, _ = x.shape
            q = self.q(x).view(b, s, -1, self.hd).transpose(1, 2)
            k = self.k(x).view(b, s, -1, self.hd).transpose(1, 2).repeat_interleave(self.h // self.kv, 1)
            v = self.v(x).view(b, s, -1, self.hd).transpose(1, 2).repeat_interleave(self.h // self.kv, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o(y.transpose(1, 2).reshape(b, s, -1))

    return M(), (torch.randn(2, 5, 16),), {}, sq


@case(
    "flatten-uneven-shard",
    "uneven shards",
    "pytorch/pytorch#143372",
    "Flattening a tensor whose leading dim (6) is split over 4 ranks leaves one rank with nothing and the rest "
    "with a shape that is not theirs.",
    [{"tp": 4}, {"dp": 4}, TP],
)
def flatten_uneven_shard() -> Built:
    torch.manual_seed(7)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 8))
            self.g = nn.Parameter(torch.randn(6, 1))
            self.f = nn.Linear(48, 5)

        def forward(self, x):
            return self.f((torch.sin(self.w) * self.g).view(-1) * x)

    return M(), (torch.randn(4, 48),), {}, sq


@case(
    "odd-sequence",
    "uneven shards",
    "PrimeIntellect-ai/prime-rl#2946",
    "Sequence length 7 split over 2 or 4 ranks; uneven pieces deadlock the exchange or drop the last token.",
    [CP, {"cp": 4}, {"dp": 2, "cp": 2}],
)
def odd_sequence() -> Built:
    torch.manual_seed(8)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln = nn.LayerNorm(8)
            self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
            return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    return M(), (torch.randn(2, 7, 8),), {}, sq


# -- dynamic shapes
@case(
    "sequence-length-varies",
    "dynamic shapes",
    "hpcaitech/ColossalAI#5940; deepspeedai/DeepSpeed#3195; pytorch/pytorch#159942",
    "Every batch has another sequence length; stages cut activations to the first length or send to a buffer of "
    "the wrong size.",
    [PP, DP, TP, CP],
    microbatches=2,
    optim=sgd(0.1),
    batches=lambda: [((randn(4, s, 8, s),), {}) for s in (5, 6, 5, 9)],
)
def sequence_length_varies() -> Built:
    torch.manual_seed(34)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

        def forward(self, x):
            for f in self.layers:
                q, k, v = f(x).chunk(3, -1)
                x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x

    return M(), (randn(4, 5, 8, 5),), {}, sq


@case(
    "boolean-select",
    "dynamic shapes",
    "pytorch/pytorch#140421; pytorch/pytorch#93579",
    "Rows are picked by a mask, so the size of what follows depends on the data and differs between ranks.",
    [DP, TP, PP],
    expect="match|error: data-dependent shape",
)
def boolean_select() -> Built:
    torch.manual_seed(35)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x, keep):
            h = torch.tanh(self.f(x))
            return self.g(h[keep]).pow(2).sum() / keep.sum()

    keep = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0], dtype=torch.bool)
    return M(), (torch.randn(8, 6), keep), {}, None


# -- view and reshape
@case(
    "view-mixes-split-dim",
    "view and reshape",
    "pytorch/pytorch#179502; pytorch/pytorch#161950",
    "x of [12, 8] split on dim 1 and viewed as [16, 6]: the result is labelled as split on dim 0 with no data "
    "moved, silently wrong.",
    [TP, {"tp": 4}],
)
def view_mixes_split_dim() -> Built:
    torch.manual_seed(44)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(5, 8), nn.Linear(6, 3)

        def forward(self, x):
            h = torch.tanh(self.f(x))  # (12, 8)
            return self.g(h.view(16, 6) * torch.linspace(0, 1, 96).view(16, 6))

    return M(), (torch.randn(12, 5),), {}, sq


@case(
    "swiglu-fused-chunk",
    "view and reshape",
    "NVIDIA/Megatron-LM#360; pytorch/pytorch#140069",
    "Gate and value live in one weight and are chunked in half after the matmul; a plain column split gives one "
    "rank all gates and the other all values.",
    [TP, {"tp": 4}, {"dp": 2, "tp": 2}, PP],
)
def swiglu_fused_chunk() -> Built:
    torch.manual_seed(45)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w13, self.w2 = nn.Linear(8, 24, bias=False), nn.Linear(12, 8, bias=False)

        def forward(self, x):
            g, v = self.w13(x).chunk(2, dim=-1)
            return x + self.w2(F.silu(g) * v)

    return nn.Sequential(M(), M()), (torch.randn(4, 8),), {}, sq


@case(
    "patchify-and-back",
    "view and reshape",
    "pytorch/pytorch#143372; pytorch/pytorch#179502",
    "Images are cut into patches with six-dim views and permutes, processed and put together with pixel shuffle.",
    [TP, CP, DP, {"dp": 2, "tp": 2}, PP],
)
def patchify_and_back() -> Built:
    torch.manual_seed(143)

    class M(nn.Module):
        def __init__(self, c=2, p=2):
            super().__init__()
            self.p, self.f = p, nn.Linear(c * p * p, c * p * p)
            self.up = nn.Conv2d(c, c * 4, 1)

        def forward(self, x):
            b, c, h, w = x.shape
            p = self.p
            t = x.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
            t = t + torch.tanh(self.f(t))
            y = t.view(b, h // p, w // p, c, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)
            return F.pixel_shuffle(self.up(y), 2)

    return M(), (torch.randn(2, 2, 6, 4),), {}, sq


# -- size, depth and memory
@case(
    "no-parameters",
    "size, depth and memory",
    "alpa-projects/alpa#560; pan-x-c/EE-LLM#12",
    "A model without parameters (a preprocessing or loss module): nothing to shard, no optimizer part.",
    [DP, TP, PP],
)
def no_parameters() -> Built:
    class M(nn.Module):
        def forward(self, x, y):
            return F.smooth_l1_loss(torch.tanh(x), y)

    torch.manual_seed(67)
    return M(), (torch.randn(4, 5).requires_grad_(), torch.randn(4, 5)), {}, None


@case(
    "six-hundred-layers",
    "size, depth and memory",
    "pytorch/pytorch#87008; pytorch/pytorch#46669; pytorch/pytorch#115506",
    "Hundreds of small layers: recursive graph walks overrun the stack, planning takes minutes.",
    [PP, DP, TP],
    microbatches=2,
)
def six_hundred_layers() -> Built:
    torch.manual_seed(68)

    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x):
            return x + 0.01 * torch.tanh(self.f(x))

    return nn.Sequential(*[L() for _ in range(600)]), (torch.randn(4, 4),), {}, sq


@case(
    "empty-tensors",
    "size, depth and memory",
    "pytorch/pytorch#65007; meta-pytorch/torchstore#177",
    "Zero-size tensors on the way: an empty optional segment is concatenated, an empty head sliced off.",
    [DP, PP, TP, CP],
    microbatches=2,
)
def empty_tensors() -> Built:
    torch.manual_seed(69)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 2)
            self.extra = nn.Parameter(torch.zeros(0, 6))

        def forward(self, x, prefix):
            x = torch.cat([prefix, self.f(x), self.extra.expand(x.shape[0], 0, 6)], dim=1)
            tail = x[:, x.shape[1] :]
            return self.g(x) + tail.sum()

    return M(), (torch.randn(4, 3, 6), torch.zeros(4, 0, 6)), {}, sq


# -- layout and aliasing
@case(
    "non-contiguous-everything",
    "layout and aliasing",
    "pytorch/pytorch#192920; pytorch/pytorch#128066; pytorch/pytorch#24836",
    "Transposed parameters, strided activations and expanded inputs reach a collective, which reads memory in the "
    "wrong order without a word.",
    [DP, TP, PP, CP, {"dp": 2, "tp": 2}],
)
def non_contiguous_everything() -> Built:
    torch.manual_seed(70)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 10).t())  # (10, 6), not contiguous
            self.v = nn.Parameter(torch.randn(8, 6)[::2])  # stride 2 rows
            self.f = nn.Linear(4, 3)

        def forward(self, x, b):
            h = (x.transpose(1, 2) @ self.w).transpose(1, 2)  # (B, 6, S)
            return self.f((self.v @ h).transpose(1, 2) + b)

    b = torch.randn(1, 1, 4).expand(4, 5, 4)
    return M(), (torch.randn(4, 10, 5), b), {}, sq


@case(
    "inplace-on-slices",
    "layout and aliasing",
    "pytorch/pytorch#164729; pytorch/pytorch#36403",
    "In-place ops on views: half of the features are added to, another part clamped, with the base used after.",
    [TP, {"tp": 4}, DP, PP],
)
def inplace_on_slices() -> Built:
    torch.manual_seed(76)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            h = self.f(x)
            h[:, :3] += x[:, 3:] * 2
            h[:, 5:].clamp_(min=-0.1)
            h.mul_(1.5)
            return self.g(F.relu(h, inplace=True))

    return M(), (torch.randn(4, 6),), {}, sq
