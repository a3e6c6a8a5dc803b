"""Attention, norms and experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import SmallBlock, sgd, sq
from .registry import CP, DP, EP, PP, TP, Built, registry

CASES, case = registry()


class MoE(nn.Module):
    def __init__(self, d=8, e=4, k=2, bias=None):
        super().__init__()
        self.k, self.gate = k, nn.Linear(d, e, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(e)
        )
        self.register_buffer("tilt", torch.zeros(e) if bias is None else torch.tensor(bias))

    def forward(self, x):
        p = torch.softmax(self.gate(x), -1)
        w, idx = torch.topk(p + self.tilt, self.k, -1)
        w = p.gather(-1, idx)
        out = torch.zeros_like(x)
        for e, f in enumerate(self.experts):
            tok, slot = torch.where(idx == e)
            out = out.index_add(0, tok, f(x[tok]) * w[tok, slot, None])
        return out


class Experts(nn.Module):
    def __init__(self, d=6, e=3):
        super().__init__()
        self.gate = nn.Linear(d, e)
        self.f = nn.ModuleList(nn.Linear(d, d) for _ in range(e))


# -- experts
@case(
    "expert-without-tokens",
    "experts",
    "NVIDIA/Megatron-LM#4851; NVIDIA-NeMo/Automodel#935; pytorch/torchtitan#1166",
    "Routing sends nothing to some experts, all of one rank here; that rank skips layers and the next collective "
    "hangs, or empty matmuls fail.",
    [EP, {"ep": 4}, {"dp": 2, "ep": 2}],
)
def expert_without_tokens() -> Built:
    torch.manual_seed(55)
    return MoE(bias=[9.0, 9.0, -9.0, -9.0]), (torch.randn(12, 8),), {}, sq


@case(
    "router-gradient",
    "experts",
    "huggingface/transformers#48687; huggingface/transformers#48205; NVIDIA-NeMo/Automodel#2995",
    "Loss is right but the router's gradient lacks the experts of other ranks; everything upstream is trained on "
    "a part of its gradient.",
    [EP, {"ep": 4}, {"dp": 2, "ep": 2}, TP],
)
def router_gradient() -> Built:
    torch.manual_seed(56)
    m = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), MoE(k=2), nn.Linear(8, 3))
    return m, (torch.randn(16, 8),), {}, sq


@case(
    "router-under-recompute",
    "experts",
    "pytorch/torchtitan#1117",
    "Recomputed routing picks other experts than forward did, so saved shapes no longer fit.",
    [{"dp": 1}, DP, EP],
    recompute=True,
)
def router_under_recompute() -> Built:
    torch.manual_seed(57)
    m = nn.Sequential(SmallBlock(), MoE(e=3, k=1), SmallBlock(), MoE(e=3, k=1))
    x = torch.randn(6, 8).repeat(2, 1)  # exact ties between samples
    return m, (x,), {}, sq


@case(
    "three-experts-two-ranks",
    "experts",
    "vllm-project/vllm-gaudi#1796; radixark/Megatron-LM#66",
    "Three experts over two ranks: global expert numbers used as local ones drop the tokens of every rank but the "
    "first.",
    [EP, {"ep": 4}, {"dp": 2, "ep": 2}, TP],
)
def three_experts_two_ranks() -> Built:
    torch.manual_seed(153)

    class M(Experts):
        def forward(self, x):
            p, i = torch.softmax(self.gate(x), -1).topk(2, -1)
            y = torch.stack([f(x) for f in self.f], 1)  # (T, E, d), dense form
            pick = y.gather(1, i.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            return x + (pick * p.unsqueeze(-1)).sum(1)

    return M(), (torch.randn(8, 6),), {}, sq


# -- attention and norms
@case(
    "einsum-heads",
    "attention and norms",
    "pytorch/pytorch#166598; pytorch/PiPPy#402",
    "Attention in einsum with 3-d weights; contraction over two dims that may be split over two mesh axes in "
    "different order.",
    [TP, {"tp": 4}, {"dp": 2, "tp": 2}, CP],
)
def einsum_heads() -> Built:
    torch.manual_seed(75)

    class M(nn.Module):
        def __init__(self, d=8, h=4, k=3):
            super().__init__()
            self.q, self.k, self.v = (nn.Parameter(torch.randn(h, d, k) / 3) for _ in range(3))
            self.o = nn.Parameter(torch.randn(h, k, d) / 3)

        def forward(self, x):
            q, k, v = (torch.einsum("bsd,hdk->bhsk", x, w) for w in (self.q, self.k, self.v))
            a = torch.softmax(torch.einsum("bhsk,bhtk->bhst", q, k), -1)
            return torch.einsum("bhst,bhtk,hkd->bsd", a, v, self.o)

    return M(), (torch.randn(2, 4, 8),), {}, sq


@case(
    "transformer-encoder-layer",
    "attention and norms",
    "pytorch/PiPPy#477; microsoft/nnscaler#10",
    "The stock encoder layer: packed in_proj weight, key padding mask, need_weights paths, a fast path in eval.",
    [DP, TP, PP, {"dp": 2, "tp": 2}],
    microbatches=2,
)
def transformer_encoder_layer() -> Built:
    torch.manual_seed(80)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.ModuleList(
                nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
            )

        def forward(self, x, pad):
            for layer in self.enc:
                x = layer(x, src_key_padding_mask=pad)
            return x.masked_fill(pad.unsqueeze(-1), 0.0)

    pad = torch.arange(5) >= torch.tensor([5, 3, 4, 2])[:, None]
    return M(), (torch.randn(4, 5, 8), pad), {}, sq


@case(
    "alibi-slopes",
    "attention and norms",
    "bigscience-workshop/Megatron-DeepSpeed#227; flashinfer-ai/flashinfer#1606",
    "A per-head constant is made from the head's number; with heads split, every rank numbers its heads from 0.",
    [TP, {"tp": 4}, CP, {"dp": 2, "tp": 2}],
)
def alibi_slopes() -> Built:
    torch.manual_seed(81)

    class M(nn.Module):
        def __init__(self, d=16, h=4):
            super().__init__()
            self.h, self.qkv, self.o = h, nn.Linear(d, 3 * d), nn.Linear(d, d)

        def forward(self, x):
            b, s, d = x.shape
            q, k, v = (t.view(b, s, self.h, -1).transpose(1, 2) for t in self.qkv(x).split(d, -1))
            slope = 2.0 ** (-2.0 * torch.arange(1, self.h + 1))
            pos = torch.arange(s)
            bias = slope.view(-1, 1, 1) * (pos.view(1, 1, -1) - pos.view(1, -1, 1)).clamp(max=0)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
            return self.o(y.transpose(1, 2).flatten(2))

    return M(), (torch.randn(2, 6, 16),), {}, sq


@case(
    "norm-weights-under-sequence-split",
    "attention and norms",
    "NVIDIA/Megatron-LM#1446; NVIDIA-NeMo/RL#3716; EleutherAI/gpt-neox#1257",
    "LayerNorm and per-head norm weights are replicated, but each rank's gradient covers only its tokens or heads; "
    "without a sum the replicas drift, with no error.",
    [TP, CP, {"tp": 2, "cp": 2}, {"tp": 4}],
    steps=3,
    optim=sgd(0.5),
)
def norm_weights_under_sequence_split() -> Built:
    torch.manual_seed(82)

    class M(nn.Module):
        def __init__(self, d=8, h=4):
            super().__init__()
            self.h, self.ln, self.qn = h, nn.LayerNorm(d), nn.RMSNorm(d // h)
            self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

        def forward(self, x):
            b, s, d = x.shape
            q, k, v = (t.view(b, s, self.h, -1).transpose(1, 2) for t in self.qkv(self.ln(x)).split(d, -1))
            y = F.scaled_dot_product_attention(self.qn(q), self.qn(k), v)
            return x + self.o(y.transpose(1, 2).flatten(2))

    return nn.Sequential(M(), M()), (torch.randn(2, 6, 8),), {}, sq
