"""State across steps: random numbers, buffers, modes, optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .parts import SmallBlock, sgd, sq
from .registry import DP, PP, TP, Built, registry

CASES, case = registry()


# -- randomness
@case(
    "dropout-mask-forward-is-backward",
    "randomness",
    "allenai/OLMo-core#828; pytorch/pytorch#198333",
    "Recomputed forward draws a new dropout mask, so gradients belong to another sample than the loss.",
    [{"dp": 1}, TP, PP],
    recompute=True,
    random=True,
    check=lambda r: (
        []
        if all(torch.allclose(r.grads[n], r.output[i]) for i, n in enumerate(("a", "b")))
        else ["dropout mask in backward differs from the one in forward"]
    ),
)
def dropout_mask_forward_is_backward() -> Built:
    torch.manual_seed(20)

    class M(nn.Module):  # d(sum(dropout(1)))/d(1) is the mask itself, times 1/(1-p)
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(64, 8)), nn.Parameter(torch.ones(64, 8))

        def forward(self, x):
            return F.dropout(self.a, 0.5) + 0 * x.sum(), F.dropout(self.b, 0.25) + 0 * x.sum()

    return M(), (torch.randn(2, 1),), {}, lambda o: o[0].sum() + o[1].sum()


@case(
    "dropout-differs-between-samples",
    "randomness",
    "tenstorrent/tt-metal#55947",
    "All data ranks share one seed, so equal shards get equal dropout masks.",
    [DP, {"dp": 4}, {"dp": 2, "tp": 2}],
    random=True,
    check=lambda r: (
        []
        if len({tuple((row == 0).tolist()) for row in r.output}) == len(r.output)
        else ["two samples got the same dropout mask"]
    ),
    static="masks need not be the one-device ones; check() decides",
)
def dropout_differs_between_samples() -> Built:
    torch.manual_seed(21)
    m = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    with torch.no_grad():
        m[0].weight.zero_()
        m[0].bias.fill_(1.0)
    return m, (torch.ones(8, 4),), {}, sq


@case(
    "same-seed-same-run",
    "randomness",
    "pytorch/torchtitan#1363; NVlabs/stylegan2-ada-pytorch#127",
    "Noise drawn inside forward (randn_like, rand) makes two runs of one seed differ, or replicas diverge.",
    [DP, TP, PP, {"dp": 2, "tp": 2}],
    steps=3,
    random=True,
    optim=sgd(0.1),
    static="run twice with one seed: bitwise equal; replicas of a parameter bitwise equal after 3 steps",
)
def same_seed_same_run() -> Built:
    torch.manual_seed(22)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            h = self.f(x)
            h = h + 0.1 * torch.randn_like(h)
            return self.g(h * (torch.rand(h.shape[0], 1) > 0.2))

    return M(), (torch.randn(4, 6),), {}, sq


# -- buffers and batch statistics
@case(
    "batchnorm-data-parallel",
    "buffers and batch statistics",
    "pytorch/pytorch#1051",
    "Batch statistics of the global batch against those of a shard; running statistics of all ranks but one are lost.",
    [DP, TP, {"dp": 4}],
    expect="match|error: BatchNorm statistics under data parallel",
    steps=2,
    optim=sgd(0.1),
)
def batchnorm_data_parallel() -> Built:
    torch.manual_seed(23)
    m = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return m, (torch.randn(4, 2, 4, 4) * torch.arange(1, 5).view(4, 1, 1, 1),), {}, sq


@case(
    "counter-buffer",
    "buffers and batch statistics",
    "pytorch/pytorch#114967; meta-pytorch/autoparallel#32",
    "An integer buffer is counted up in forward and used in the result; tracing freezes it, and microbatches count "
    "several times.",
    [{"dp": 1}, DP, TP, PP],
    expect="match|error: buffer 'calls' is updated once per microbatch",
    microbatches=2,
    steps=3,
    optim=sgd(0.1),
)
def counter_buffer() -> Built:
    torch.manual_seed(24)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(5, 5), nn.Linear(5, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            return self.g(self.f(x) / (1 + self.calls))

    return M(), (torch.randn(4, 5),), {}, sq


@case(
    "spectral-norm-power-iteration",
    "buffers and batch statistics",
    "pytorch/pytorch#8160; pytorch/pytorch#13350; pytorch/pytorch#62293",
    "Spectral norm runs power iteration on buffers at every forward: not on a shard, not twice under recompute, not "
    "once per microbatch.",
    [{"dp": 1}, DP, TP, PP],
    expect="match|error: parametrization state is updated in forward",
    microbatches=2,
    recompute=True,
    steps=2,
    optim=sgd(0.1),
)
def spectral_norm_power_iteration() -> Built:
    torch.manual_seed(122)
    sn = torch.nn.utils.parametrizations.spectral_norm
    m = nn.Sequential(sn(nn.Linear(6, 8)), nn.LeakyReLU(0.2), sn(nn.Linear(8, 1)))
    return m, (torch.randn(4, 6),), {}, sq


# -- module state and modes
@case(
    "train-then-eval",
    "module state and modes",
    "pytorch/pytorch#104504; pytorch/vision#5826",
    "eval() after training must turn dropout off and use running statistics, train() must turn them on again.",
    [TP, PP, {"dp": 1}],
    expect="match|error: BatchNorm under microbatches",
    mode="train-eval-train",
    static="the eval output must equal the one-device eval output; check() covers eval",
)
def train_then_eval() -> Built:
    torch.manual_seed(79)
    m = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return m, (torch.randn(4, 6),), {}, sq


# -- optimizers
@case(
    "weight-decay-groups",
    "optimizers",
    "pytorch/pytorch#101343; verl-project/verl#5070",
    "Two parameter groups chosen by name and by number of dims; flattening or renaming puts parameters into the "
    "wrong group.",
    [DP, TP, PP, {"dp": 2, "tp": 2}],
    zero=3,
    steps=3,
    optim=lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in m.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
        ],
        lr=0.1,
    ),
    sched=lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda k: 1 / (1 + k), lambda k: 1.0]),
)
def weight_decay_groups() -> Built:
    torch.manual_seed(83)
    return nn.Sequential(SmallBlock(), nn.Linear(8, 3)), (torch.randn(4, 8),), {}, sq


@case(
    "one-group-per-parameter",
    "optimizers",
    "verl-project/verl#7215; hpcaitech/ColossalAI#6433",
    "A group per layer with its own rate, one with rate 0, one empty of gradients; Adagrad, which makes its state at "
    "construction, before anything is sharded.",
    [DP, TP, PP, {"dp": 2, "pp": 2}],
    zero=1,
    steps=3,
    optim=lambda m: torch.optim.Adagrad(
        [{"params": [p], "lr": 0.3 * 0.5**i if i != 2 else 0.0} for i, p in enumerate(m.parameters())],
        initial_accumulator_value=0.1,
    ),
)
def one_group_per_parameter() -> Built:
    torch.manual_seed(176)
    return (
        nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)),
        (torch.randn(4, 6),),
        {},
        sq,
    )
