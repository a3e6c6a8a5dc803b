"""Checkpoints that are moved or damaged, ranks that fail or stall."""

from __future__ import annotations

import torch
from torch import nn

from .parts import SmallBlock, adamw, sq
from .registry import DP, PP, TP, Built, registry

CASES, case = registry()


# -- checkpoints
@case(
    "resume-on-another-mesh",
    "checkpoints",
    "pytorch/torchtitan#811; pytorch/pytorch#91205; huggingface/transformers#48569",
    "Saved on one mesh, resumed on another: optimizer state lands on the wrong slice or does not load.",
    [{"dp": 2, "tp": 2}, PP, {"dp": 4}, {"dp": 1}],
    save_resume={"after": 2, "from": {"dp": 2, "tp": 2}, "to": {"pp": 2}},
    steps=4,
    zero=1,
    optim=adamw(0.05),
)
def resume_on_another_mesh() -> Built:
    torch.manual_seed(62)
    m = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 7), nn.Linear(7, 2))
    return m, (torch.randn(4, 6),), {}, sq


@case(
    "truncated-shard",
    "checkpoints",
    "Lightning-AI/pytorch-lightning#688; vllm-project/speculators#739",
    "A crash cut one shard file short; loading fails with a parser error, or worse, half loads.",
    [DP, TP],
    expect="error: the checkpoint is damaged: rank-00000.safetensors; nothing in memory was changed",
    save_resume={"after": 1, "from": DP, "to": DP},
    damage="cut the last 64 bytes off one shard file",
    steps=2,
    optim=adamw(0.05),
)
def truncated_shard() -> Built:
    torch.manual_seed(63)
    m = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    return m, (torch.randn(4, 6),), {}, sq


@case(
    "scalar-parameter-everywhere",
    "checkpoints",
    "pytorch/pytorch#132934; komikndr/raylight#5",
    "0-d parameters (a learnt temperature) cannot be split and break sharded save and load.",
    [DP, TP, PP],
    save_resume={"after": 1, "from": DP, "to": {"dp": 1}},
    steps=2,
    zero=3,
    optim=lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
)
def scalar_parameter_everywhere() -> Built:
    torch.manual_seed(64)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.t = nn.Linear(5, 5), nn.Parameter(torch.tensor(0.7))

        def forward(self, x):
            return torch.softmax(self.f(x) / self.t, -1) * self.t

    return M(), (torch.randn(4, 5),), {}, sq


@case(
    "missing-shard",
    "checkpoints",
    "NVIDIA/Megatron-LM#4378; pytorch/pytorch#102821",
    "One shard file is gone (a node's disk was lost): a part of the state silently keeps its random start.",
    [{"dp": 2, "tp": 2}, TP],
    expect="error: the checkpoint is damaged: rank-00003.safetensors is missing, params; nothing in memory was changed",
    save_resume={"after": 1, "from": {"dp": 2, "tp": 2}, "to": TP},
    damage="delete one shard file",
    steps=2,
    zero=3,
    optim=adamw(0.05),
)
def missing_shard() -> Built:
    torch.manual_seed(159)
    return nn.Sequential(SmallBlock(), SmallBlock(), nn.Linear(8, 2)), (torch.randn(4, 8),), {}, sq


# -- hangs and failures
@case(
    "one-rank-raises",
    "hangs and failures",
    "ray-project/ray#64928; pytorch/pytorch#22907; dmlc/xgboost#11217",
    "Forward raises on one rank only (bad sample); the others wait in a collective until the timeout and the real "
    "error is lost.",
    [DP, PP, {"dp": 2, "tp": 2}],
    expect="match|error: data-dependent branch in forward",
    fault={
        "kind": "raise",
        "where": "args[0][0] = -1, so only the first data shard sees it",
        "then": "every rank stops: a forward that raises by its data is refused when captured, on all ranks",
        "says": "data-dependent branch in forward",
    },
)
def one_rank_raises() -> Built:
    torch.manual_seed(65)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x):
            if bool((x < 0).any()):
                raise ValueError("negative amount")
            return self.g(torch.tanh(self.f(x)))

    return M(), (torch.rand(4, 5),), {}, sq


@case(
    "data-decides-the-branch",
    "hangs and failures",
    "deepspeedai/DeepSpeed#7998; pytorch/pytorch#173915",
    "A branch taken by the data's value makes data ranks run different layers and different collectives.",
    [DP, TP, PP],
    expect="match|error: data-dependent branch in forward",
    zero=3,
)
def data_decides_the_branch() -> Built:
    torch.manual_seed(66)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x):
            h = self.a(x)
            h = torch.tanh(self.b(h)) if x[:2].mean() > 0 else h  # one data shard says yes, the other no
            return self.c(h)

    x = torch.cat([torch.ones(2, 5), -torch.ones(2, 5)])
    return M(), (x,), {}, sq


@case(
    "rank-killed-mid-step",
    "hangs and failures",
    "pytorch/pytorch#22907; openxla/xla#44429; NVIDIA/nccl#582",
    "One process is killed (or stalls) between forward and backward; the others must stop by themselves within the "
    "timeout, say which rank went, and leave the last checkpoint whole.",
    [DP, PP, TP, {"dp": 2, "pp": 2}],
    steps=3,
    fault={
        "kind": "kill",
        "where": "rank 1 in step 1, at its first message, SIGKILL",
        "then": "all other ranks end within the timeout, naming rank 1; the checkpoint goes on as if nothing was",
        "says": "rank 1 is gone or silent",
    },
    optim=adamw(0.1),
)
def rank_killed_mid_step() -> Built:
    torch.manual_seed(162)
    return nn.Sequential(SmallBlock(), SmallBlock(), nn.Linear(8, 2)), (torch.randn(4, 8),), {}, sq
