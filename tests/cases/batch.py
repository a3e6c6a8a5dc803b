"""Dividing the batch, averaging the loss, and the norm of the gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import SmallBlock, TokenLM, randn, sgd, sq
from .registry import CP, DP, EP, PP, TP, Built, registry

CASES, case = registry()


# -- batch division
@case(
    "uneven-microbatches",
    "batch division",
    "pytorch/pytorch#126600",
    "Batch of 8 into 3 microbatches gives 3,3,2: later stages keep receive buffers of the first size.",
    [PP, {"pp": 3}, {"dp": 2, "pp": 2}],
    expect="match|error: batch 8 is not divisible by 3 microbatches",
    microbatches=3,
)
def uneven_microbatches() -> Built:
    torch.manual_seed(9)
    m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 6), nn.Linear(6, 2))
    return m, (torch.randn(8, 6),), {}, sq


@case(
    "short-last-batch",
    "batch division",
    "pytorch/pytorch#38174; Lightning-AI/pytorch-lightning#20404",
    "Last batch of the epoch is smaller (4,4,3): ranks disagree on sizes and hang, or the small shard is weighted "
    "like a full one.",
    [DP, {"dp": 4}, {"dp": 2, "pp": 2}],
    expect="match|error: a batch of 3 cannot be split over the data ranks",
    optim=sgd(0.1),
    batches=lambda: [((randn(4, 6, 1),), {}), ((randn(4, 6, 2),), {}), ((randn(3, 6, 3),), {})],
)
def short_last_batch() -> Built:
    torch.manual_seed(10)
    m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return m, (randn(4, 6, 1),), {}, sq


@case(
    "sequence-first-batch",
    "batch division",
    "pytorch/pytorch#148458",
    "Batch is dim 1 (sequence first). Splitting dim 0 silently mixes time steps into microbatches.",
    [PP, DP, {"dp": 2, "pp": 2}],
    microbatches=2,
    batch_dims={0: 1},
)
def sequence_first_batch() -> Built:
    torch.manual_seed(11)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):  # (S, B, D)
            h = torch.tanh(self.a(x))
            return self.b(h + h.mean(0, keepdim=True))

    return M(), (torch.randn(5, 4, 6),), {}, sq


@case(
    "shared-mask-same-size-as-batch",
    "batch division",
    "pytorch/torchtitan#1723; pytorch/pytorch#164111",
    "A mask of shape [S, S] shared by all samples, with S equal to the batch size: splitters cut it as if it "
    "were batched.",
    [PP, DP, {"dp": 2, "pp": 2}, CP],
    microbatches=2,
    batch_dims={"mask": None},
)
def shared_mask_same_size_as_batch() -> Built:
    torch.manual_seed(12)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

        def forward(self, x, *, mask):
            for f in self.qkv:
                q, k, v = f(x).chunk(3, -1)
                x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return x

    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return M(), (torch.randn(4, 4, 8),), {"mask": mask}, sq


@case(
    "one-sample-two-ranks",
    "batch division",
    "microsoft/PyMarlin#80; pytorch/pytorch#67253",
    "A batch of one on two data ranks: one rank has no sample, its loss is a mean over nothing.",
    [DP, {"dp": 2, "tp": 2}],
    expect="match|error: batch 1 cannot be split over dp=2",
)
def one_sample_two_ranks() -> Built:
    torch.manual_seed(107)
    m = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    return m, (torch.randn(1, 5),), {}, sq


# -- loss averaging
@case(
    "token-counts-differ",
    "loss averaging",
    "huggingface/transformers#34191; ml-explore/mlx-lm#1413; mosaicml/composer#3273",
    "Padding makes the number of counted tokens differ between microbatches and ranks; a mean of means over-weights "
    "short samples.",
    [DP, PP, {"dp": 4}, {"dp": 2, "pp": 2}, CP],
    microbatches=4,
    accumulate=4,
)
def token_counts_differ() -> Built:
    torch.manual_seed(13)
    ids, lab = torch.randint(0, 20, (4, 8)), torch.randint(0, 20, (4, 8))
    for i, n in enumerate((8, 1, 5, 2)):
        lab[i, n:] = -100
    return TokenLM(), (ids, lab), {}, None


@case(
    "sum-loss",
    "loss averaging",
    "pytorch/pytorch#37359",
    "The loss is a sum, not a mean; averaging gradients over ranks or microbatches makes them too small.",
    [DP, PP, {"dp": 2, "pp": 2}, TP],
    microbatches=2,
)
def sum_loss() -> Built:
    torch.manual_seed(14)
    m = nn.Sequential(nn.Linear(5, 7), nn.Sigmoid(), nn.Linear(7, 2))
    return m, (torch.randn(4, 5),), {}, lambda y: (y - 0.3).pow(2).sum()


@case(
    "in-batch-negatives",
    "loss averaging",
    "KevinMusgrave/pytorch-metric-learning#380; facebookresearch/simsiam#20",
    "Contrastive loss compares every sample with every other of the batch; per-rank losses see only local "
    "negatives and are a different function.",
    [DP, {"dp": 4}, PP],
    expect="match|error: loss is not a mean over independent samples",
    microbatches=2,
)
def in_batch_negatives() -> Built:
    torch.manual_seed(15)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 8)
            self.t = nn.Parameter(torch.tensor([1.5]))

        def forward(self, x, y):
            u, v = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
            s = u @ v.t() * self.t.exp()
            i = torch.arange(s.shape[0])
            return (F.cross_entropy(s, i) + F.cross_entropy(s.t(), i)) / 2

    return M(), (torch.randn(8, 6), torch.randn(8, 4)), {}, None


@case(
    "accumulated-then-stepped",
    "loss averaging",
    "NVIDIA/Megatron-LM#7186; ServiceNow/Fast-LLM#551",
    "Several backward passes before one step: with sharded gradient buffers only the last slice's gradient survives.",
    [DP, {"dp": 2, "tp": 2}, {"dp": 1}],
    accumulate=4,
    zero=2,
    steps=2,
    optim=sgd(0.2),
)
def accumulated_then_stepped() -> Built:
    torch.manual_seed(16)
    m = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    return m, (torch.randn(8, 6),), {}, sq


@case(
    "shifted-labels",
    "loss averaging",
    "huggingface/transformers#36607; NVIDIA-BioNeMo/bionemo-recipes#1449",
    "Labels are shifted by one inside the loss; on a split sequence the token at each border is lost or paired "
    "with its own shard.",
    [CP, {"cp": 4}, {"dp": 2, "cp": 2}, TP],
)
def shifted_labels() -> Built:
    torch.manual_seed(17)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

        def forward(self, ids):
            y = self.head(torch.tanh(self.emb(ids)))
            return F.cross_entropy(y[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1))

    return M(), (torch.randint(0, 11, (2, 8)),), {}, None


@case(
    "weighted-mean-loss",
    "loss averaging",
    "pytorch/pytorch#31579",
    "Samples carry weights and the loss is sum(w*l)/sum(w); class weights do the same inside cross entropy.",
    [DP, {"dp": 4}, PP, TP],
    expect="match|error: loss is not a mean over independent samples",
    microbatches=2,
)
def weighted_mean_loss() -> Built:
    torch.manual_seed(112)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 8), nn.Linear(8, 5)
            self.register_buffer("cw", torch.tensor([0.1, 3.0, 1.0, 0.5, 2.0]))

        def forward(self, x, y, w):
            z = self.g(torch.relu(self.f(x)))
            per = F.cross_entropy(z, y, reduction="none")
            return (per * w).sum() / w.sum() + F.cross_entropy(z, y, weight=self.cw, label_smoothing=0.1)

    return M(), (torch.randn(8, 6), torch.arange(8) % 5, torch.tensor([5.0, 1, 0, 2, 0.1, 0, 0, 0.3])), {}, None


# -- gradient norm
@case(
    "clip-replicated-and-sharded",
    "gradient norm",
    "ROCm/TransformerEngine#715; meta-pytorch/torchtune#2420",
    "Global norm over a mix of sharded and replicated parameters: replicated ones are counted once per tensor "
    "rank, so clipping is too strong.",
    [TP, {"tp": 4}, {"dp": 2, "tp": 2}],
    clip=(0.05, 2.0),
    steps=2,
    optim=sgd(1.0),
)
def clip_replicated_and_sharded() -> Built:
    torch.manual_seed(18)
    return nn.Sequential(SmallBlock(), SmallBlock()), (torch.randn(4, 8),), {}, sq


@case(
    "clip-across-stages",
    "gradient norm",
    "pytorch/torchtitan#596; alpa-projects/alpa#880",
    "Each pipeline stage clips by its own norm instead of the norm of the whole model.",
    [PP, {"pp": 4}, {"dp": 2, "pp": 2}],
    clip=(0.02, 2.0),
    steps=2,
    microbatches=2,
    optim=sgd(1.0),
)
def clip_across_stages() -> Built:
    torch.manual_seed(19)
    big = nn.Linear(8, 8)
    with torch.no_grad():
        big.weight.mul_(6)
    m = nn.Sequential(big, nn.Tanh(), SmallBlock(), nn.Linear(8, 8), SmallBlock())
    return m, (torch.randn(4, 8),), {}, lambda y: 10 * sq(y)


@case(
    "clip-experts-and-dense",
    "gradient norm",
    "NVIDIA-NeMo/Automodel#2995; pytorch/torchtitan#649",
    "Expert parameters live on one rank each, dense ones on all: one norm must count every one exactly once.",
    [EP, {"ep": 4}, {"dp": 2, "ep": 2}, TP],
    clip=(0.02, 2.0),
    steps=2,
    optim=sgd(1.0),
)
def clip_experts_and_dense() -> Built:
    torch.manual_seed(117)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.pre, self.gate = nn.Linear(6, 6), nn.Linear(6, 4)
            self.w1, self.w2 = nn.Parameter(torch.randn(4, 6, 9) / 3), nn.Parameter(torch.randn(4, 9, 6) / 3)

        def forward(self, x):
            x = torch.tanh(self.pre(x))
            p = torch.softmax(self.gate(x), -1)
            v, i = p.max(-1)
            return x + v.unsqueeze(-1) * torch.bmm(
                torch.relu(torch.bmm(x.unsqueeze(1), self.w1[i])), self.w2[i]
            ).squeeze(1)

    return M(), (torch.randn(8, 6),), {}, sq
