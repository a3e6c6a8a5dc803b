"""What goes into a model and comes out of it, and in which dtype."""

from __future__ import annotations

import torch
from torch import nn

from .parts import SmallBlock, randn, sgd, sq
from .registry import CP, DP, PP, TP, Built, registry

CASES, case = registry()


# -- inputs and outputs
@case(
    "kwargs-none-bool-int",
    "inputs and outputs",
    "microsoft/nnscaler#42",
    "Optional, keyword, boolean and integer arguments; a tensor that arrives only by keyword is not seen as a "
    "dependency.",
    [DP, PP, TP, {"dp": 2, "pp": 2}],
    microbatches=2,
)
def kwargs_none_bool_int() -> Built:
    torch.manual_seed(28)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x, bias=None, *, residual=True, power: int = 1, gate=None, mode="tanh"):
            h = getattr(torch, mode)(self.f(x)) ** power
            if bias is not None:
                h = h + bias
            if gate is not None:
                h = h * gate
            return self.g(h + x if residual else h)

    return M(), (torch.randn(4, 6), None), {"gate": torch.rand(4, 6), "power": 2, "residual": False}, sq


@case(
    "nested-dict-output",
    "inputs and outputs",
    "pytorch/pytorch#129732",
    "Output is a dict holding tensors, a tuple, None and a plain number; gathering microbatches fails on what is "
    "not a tensor.",
    [PP, DP, TP],
    microbatches=2,
)
def nested_dict_output() -> Built:
    torch.manual_seed(29)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = torch.relu(self.f(x))
            return {"logits": self.g(h), "hidden": (h, h.mean(-1)), "cache": None, "layers": 2}

    return M(), (torch.randn(4, 6),), {}, lambda o: sq(o["logits"]) + o["hidden"][1].mean()


@case(
    "int-mask-crosses-stages",
    "inputs and outputs",
    "pytorch/pytorch#183582; deepspeedai/DeepSpeed#3895; pytorch/torchtitan#3584",
    "Integer positions and an int mask are needed by every stage; stages ask for gradients of integers or miss "
    "the input.",
    [PP, {"pp": 4}, {"dp": 2, "pp": 2}, CP],
    microbatches=2,
)
def int_mask_crosses_stages() -> Built:
    torch.manual_seed(30)

    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.pos = nn.Linear(8, 8), nn.Embedding(16, 8)

        def forward(self, x, mask, position_ids):
            return x + torch.tanh(self.f(x) + self.pos(position_ids)) * mask.unsqueeze(-1)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.layers = nn.Embedding(13, 8), nn.ModuleList(L() for _ in range(4))

        def forward(self, input_ids, attention_mask, position_ids):
            x = self.emb(input_ids)
            for layer in self.layers:
                x = layer(x, attention_mask, position_ids)
            return x

    ids = torch.randint(0, 13, (4, 6))
    mask = (torch.arange(6) < torch.tensor([6, 3, 5, 1])[:, None]).long()
    return M(), (), {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(6).repeat(4, 1).flip(1)}, sq


@case(
    "python-int-changes",
    "inputs and outputs",
    "deepspeedai/DeepSpeed#7998; pytorch/pytorch#173915",
    "A plain integer argument changes every call; it is baked into the trace, or every value compiles anew.",
    [DP, PP, TP],
    batches=lambda: [((randn(4, 6, i), i), {}) for i in (1, 2, 3, 1)],
    optim=sgd(0.1),
)
def python_int_changes() -> Built:
    torch.manual_seed(31)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x, k):
            for _ in range(k):
                x = x + torch.sin(self.f(x))
            return self.g(x) * (1.0 / k)

    return M(), (randn(4, 6, 1), 1), {}, sq


@case(
    "input-returned-untouched",
    "inputs and outputs",
    "pytorch/pytorch#198097",
    "Forward hands one input back as it is, and a view of another; outputs alias inputs.",
    [PP, DP, TP],
    microbatches=2,
)
def input_returned_untouched() -> Built:
    torch.manual_seed(32)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x, ids):
            h = self.g(torch.tanh(self.f(x)))
            return h, ids, x[:, :3], h[:, 0]

    return M(), (torch.randn(4, 6), torch.arange(4)), {}, lambda o: sq(o[0]) + sq(o[3])


@case(
    "gradient-of-the-input",
    "inputs and outputs",
    "pytorch/pytorch#139404",
    "The caller needs the gradient of an input tensor; pipelines and input sharding drop it or return one shard.",
    [PP, DP, TP, {"dp": 2, "tp": 2}],
    microbatches=2,
    static="compare args[0].grad too",
)
def gradient_of_the_input() -> Built:
    torch.manual_seed(33)
    m = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 1))
    return m, (torch.randn(4, 6).requires_grad_(),), {}, sq


@case(
    "scalar-tensor-input",
    "inputs and outputs",
    "pytorch/pytorch#181761; microsoft/nnscaler#42",
    "A 0-d tensor (temperature, step) and a plain float come in with the batch; they cannot be split and must reach "
    "every rank.",
    [PP, DP, TP, {"dp": 2, "pp": 2}],
    microbatches=2,
    batch_dims={"tau": None},
)
def scalar_tensor_input() -> Built:
    torch.manual_seed(128)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.g = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x, tau, eps=1e-3):
            h = torch.relu(self.f(x)) / (tau + eps)
            return torch.log_softmax(self.g(h) * tau, -1)

    return M(), (torch.randn(4, 6),), {"tau": torch.tensor(0.7), "eps": 0.25}, sq


# -- mixed precision
@case(
    "overflow-skips-everywhere",
    "mixed precision",
    "facebookresearch/fairscale#181; pytorch/pytorch#115710",
    "Only one rank's gradient overflows; it skips the step, the others take it, replicas part or hang.",
    [DP, PP, TP, {"dp": 2, "tp": 2}],
    scaler=2.0**14,
    steps=4,
    optim=sgd(0.1),
    fault={"kind": "inf", "where": "sample 0 only, step 1", "then": "every rank skips step 1 and halves the scale"},
    batches=lambda: [
        ((randn(4, 6, i) * (torch.tensor([[float("inf")], [1.0], [1.0], [1.0]]) if i == 1 else 1),), {})
        for i in range(4)
    ],
    check=lambda r: [] if all(torch.isfinite(p).all() for p in r.params.values()) else ["a non-finite step was taken"],
)
def overflow_skips_everywhere() -> Built:
    torch.manual_seed(58)
    m = nn.Sequential(nn.Linear(6, 6), nn.Hardtanh(-1e30, 1e30), nn.Linear(6, 2))
    return m, (randn(4, 6, 0),), {}, sq


@case(
    "bf16-weights-fp32-norms",
    "mixed precision",
    "pytorch/pytorch#183363",
    "Weights in bfloat16, norms in float32: flat buffers want one dtype; the sum of shards is made in the narrow one.",
    [DP, TP, PP, {"dp": 2, "tp": 2}],
    tol=(3e-2, 3e-3),
    zero=3,
)
def bf16_weights_fp32_norms() -> Built:
    torch.manual_seed(59)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16).bfloat16(), nn.Linear(16, 8).bfloat16()
            self.ln = nn.LayerNorm(8)

        def forward(self, x):
            return x + self.b(torch.relu(self.a(self.ln(x).bfloat16()))).float()

    return nn.Sequential(M(), M()), (torch.randn(4, 8),), {}, sq


@case(
    "float64-model",
    "mixed precision",
    "pytorch/pytorch#129732",
    "A float64 model silently passes through float32 somewhere on the way.",
    [DP, TP, PP, CP],
    tol=(1e-11, 1e-12),
    microbatches=2,
)
def float64_model() -> Built:
    torch.manual_seed(60)
    m = nn.Sequential(SmallBlock(), SmallBlock(), nn.Linear(8, 3)).double()
    return m, (torch.randn(4, 8, dtype=torch.float64),), {}, sq


@case(
    "int64-and-bool-outputs",
    "mixed precision",
    "pytorch/pytorch#89197; pytorch/pytorch#90245",
    "Outputs include int64 ids beyond float precision and a bool mask; some backends have no such collectives.",
    [DP, TP, PP, {"dp": 2, "tp": 2}],
)
def int64_and_bool_outputs() -> Built:
    torch.manual_seed(61)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(6, 5)

        def forward(self, x, ids):
            y = self.f(x)
            return y, ids * 3 + 1, y > 0, y.argmax(-1)

    ids = torch.tensor([2**53 + 1, 7, -5, 2**60 + 3])
    return M(), (torch.randn(4, 6), ids), {}, lambda o: sq(o[0])
