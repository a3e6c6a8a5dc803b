"""Weights that are shared, computed, packed, frozen or unused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import SmallBlock, adamw, randn, sgd, sq
from .registry import CP, DP, PP, TP, Built, registry

CASES, case = registry()


# -- tied weights
@case(
    "tied-embed-head",
    "tied weights",
    "uw-syfi/piper#13; NVIDIA/Megatron-LM#6500; NVIDIA/Megatron-LM#299",
    "Input embedding and output head are one tensor; put on two pipeline stages they become two copies, "
    "each stepped with half of the gradient, and drift apart.",
    [PP, TP, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}],
    microbatches=2,
    steps=3,
    optim=adamw(1e-2),
)
def tied_embed_head() -> Built:
    torch.manual_seed(1)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(24, 16)
            self.mid = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)])
            self.head = nn.Linear(16, 24, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids, labels):
            y = self.head(self.mid(self.emb(ids)))
            return F.cross_entropy(y.flatten(0, 1), labels.flatten())

    ids, lab = torch.randint(0, 24, (4, 6)), torch.randint(0, 24, (4, 6))
    return M(), (ids, lab), {}, None


@case(
    "chained-weight-reuse",
    "tied weights",
    "pytorch/pytorch#180952",
    "One matrix used twice on the same path (layer calls itself recurrently); schedules that split weight "
    "gradient from input gradient count it twice.",
    [PP, {"pp": 3}, TP, {"dp": 2, "pp": 2}],
    microbatches=4,
    static="also under a zero-bubble style schedule if there is one",
)
def chained_weight_reuse() -> Built:
    torch.manual_seed(2)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            for _ in range(6):
                x = x + self.block(x)
            return self.out(x)

    return M(), (torch.randn(8, 8),), {}, sq


@case(
    "buffer-shared-by-stages",
    "tied weights",
    "pytorch/pytorch#127643; pytorch/torchtitan#792",
    "A buffer registered at the root is handed to every layer as an argument; splitting stages loses it on "
    "all stages but one, or each stage keeps its own stale copy.",
    [PP, {"pp": 4}, CP, {"dp": 2, "pp": 2}],
    microbatches=2,
)
def buffer_shared_by_stages() -> Built:
    torch.manual_seed(3)

    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(8, 8)

        def forward(self, x, table):
            return x + self.f(x) * table[: x.shape[1]]

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.rand(16, 8), persistent=False)
            self.layers = nn.ModuleList(L() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, self.table)
            return x

    return M(), (torch.randn(4, 5, 8),), {}, sq


@case(
    "weight-used-outside-its-module",
    "tied weights",
    "facebookresearch/fairscale#836; pytorch/pytorch#83052",
    "A parameter is read by a module that does not own it, so gather-on-entry sharding hands over an empty or "
    "flattened shard.",
    [DP, {"dp": 4}, TP, PP],
    zero=3,
)
def weight_used_outside_its_module() -> Built:
    torch.manual_seed(4)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Linear(10, 6)
            self.scale = nn.Parameter(torch.rand(6) + 0.5)

        def forward(self, x):
            h = torch.tanh(self.enc(x)) * self.scale
            return F.linear(h, self.enc.weight.t()) - self.enc.bias.sum()

    return M(), (torch.randn(4, 10),), {}, sq


# -- frozen and unused parameters
@case(
    "frozen-among-trainable",
    "frozen and unused parameters",
    "pytorch/pytorch#104690; pytorch/pytorch#91167; facebookresearch/fairscale#721",
    "A layer mixes frozen and trainable parameters; flat sharding gives all of them one requires_grad.",
    [DP, TP, PP, {"dp": 2, "tp": 2}],
    zero=3,
    steps=2,
    optim=lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1),
)
def frozen_among_trainable() -> Built:
    torch.manual_seed(25)
    m = nn.Sequential(SmallBlock(), SmallBlock(), nn.Linear(8, 3))
    for n, p in m.named_parameters():
        p.requires_grad_(not (n.startswith("0.") or n.endswith("up.weight")))
    return m, (torch.randn(4, 8),), {}, sq


@case(
    "unused-parameter-stays-put",
    "frozen and unused parameters",
    "NVIDIA-NeMo/Automodel#2995; deepspeedai/DeepSpeed#5828",
    "A parameter that takes no part has grad None on one device, so the optimizer leaves it alone; a zero gradient "
    "lets weight decay and momentum move it.",
    [DP, TP, PP, {"dp": 2, "pp": 2}],
    steps=3,
    zero=1,
    optim=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5),
    check=lambda r: [] if r.grads["spare.weight"] is None else ["unused parameter got a gradient"],
)
def unused_parameter_stays_put() -> Built:
    torch.manual_seed(26)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.spare, self.g = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.g(torch.tanh(self.f(x)))

    return M(), (torch.randn(4, 5),), {}, sq


@case(
    "branch-chosen-by-argument",
    "frozen and unused parameters",
    "deepspeedai/DeepSpeed#5828",
    "A flag decides call by call whether a layer runs; recorded parameter order or a frozen trace breaks when the "
    "flag flips.",
    [DP, TP, PP],
    zero=3,
    optim=adamw(0.1),
    batches=lambda: [((randn(4, 5, i),), {"extra": i % 2 == 0}) for i in range(4)],
)
def branch_chosen_by_argument() -> Built:
    torch.manual_seed(27)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x, extra=False):
            x = F.selu(self.a(x))
            if extra:
                x = F.selu(self.b(x))
            return self.c(x)

    return M(), (randn(4, 5, 0),), {"extra": True}, sq


@case(
    "trainable-below-frozen",
    "frozen and unused parameters",
    "NVIDIA/Megatron-LM#1164; facebookresearch/fairscale#605",
    "Only the first layer trains; gradient must cross frozen stages that own no trainable parameter.",
    [PP, {"pp": 4}, DP, TP],
    microbatches=2,
    zero=3,
)
def trainable_below_frozen() -> Built:
    torch.manual_seed(124)
    m = nn.Sequential(nn.Linear(6, 8), SmallBlock(), SmallBlock(), nn.Linear(8, 3))
    for p in m[1:].parameters():
        p.requires_grad_(False)
    return m, (torch.randn(4, 6),), {}, sq


# -- computed and packed weights
@case(
    "weight-norm",
    "computed and packed weights",
    "deepspeedai/DeepSpeed#1045; pytorch/pytorch#61470; pytorch/pytorch#7568",
    "Parametrized weight (direction and length): the weight is computed, not stored; its norm needs all shards.",
    [DP, TP, PP, {"dp": 2, "tp": 2}],
    zero=3,
    steps=2,
    optim=sgd(0.1),
)
def weight_norm() -> Built:
    torch.manual_seed(71)
    wn = torch.nn.utils.parametrizations.weight_norm
    m = nn.Sequential(wn(nn.Linear(6, 8)), nn.Tanh(), wn(nn.Linear(8, 3), dim=1))
    return m, (torch.randn(4, 6),), {}, sq


@case(
    "lora",
    "computed and packed weights",
    "axolotl-ai-cloud/axolotl#2250; pytorch/pytorch#104967",
    "Frozen base with two thin trainable matrices, one of them zero; most parameters have no gradient and ranks "
    "of size 2 do not split.",
    [DP, TP, {"tp": 4}, PP, {"dp": 2, "tp": 2}],
    zero=3,
    steps=2,
    optim=lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.05),
)
def lora() -> Built:
    torch.manual_seed(72)

    class LoRA(nn.Module):
        def __init__(self, base, r=2):
            super().__init__()
            self.base, o, i = base.requires_grad_(False), *base.weight.shape
            self.a, self.b = nn.Parameter(torch.randn(r, i) / i), nn.Parameter(torch.zeros(o, r))

        def forward(self, x):
            return self.base(x) + 2.0 * (x @ self.a.t()) @ self.b.t()

    m = nn.Sequential(LoRA(nn.Linear(6, 10)), nn.GELU(), LoRA(nn.Linear(10, 6)))
    return m, (torch.randn(4, 6),), {}, sq
