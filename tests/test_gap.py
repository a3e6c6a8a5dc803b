"""Groups lose next to nothing: plans of models with realistic sizes against the bound with one variable a call."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.capture import capture
from meshwright.partitioner.certify import certify
from meshwright.partitioner.factors import factor_graph
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.planner import Case, Options, decided, make_plan
from torch import nn

BAR = 1.01e-3


class Loss(nn.Module):
    """A transformers model that returns only its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


def transformer(name: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    with torch.device("meta"):
        made = getattr(transformers, name)(getattr(transformers, config)(vocab_size=32768, use_cache=False, **settings))
    return Loss(made.bfloat16().train())


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Learned positions, whose gradient is a sum of the stream's; a head tied to the embedding, read twice."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model = transformer("GPT2LMHeadModel", "GPT2Config", n_positions=4096, n_embd=4096, n_layer=1, n_head=32, **none)
    return model, dict.fromkeys(("input_ids", "labels"), torch.empty(16, 4096, dtype=torch.long, device="meta"))


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """A bias looked up by the distance of query and key: positions alone make it, its gradient is a partial sum."""
    sizes: dict[str, Any] = {"d_model": 4096, "d_kv": 128, "d_ff": 16384, "num_heads": 32, "dropout_rate": 0.0}
    sizes |= {"num_layers": 1, "decoder_start_token_id": 0, "pad_token_id": 0}
    ids = torch.empty(16, 4096, dtype=torch.long, device="meta")
    return transformer("T5ForConditionalGeneration", "T5Config", **sizes), {
        "input_ids": ids,
        "labels": ids[:, :1024].clone(),
    }


class Norms(nn.Module):
    """Batch norms over a batch that pays to split: small sums that several read."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        return torch.relu(x + self.nb(self.b(torch.relu(self.na(self.a(x)))))).square().mean()


def norms() -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        return Norms(), {"x": torch.empty(128, 3, 224, 224)}


def captured(name: str) -> Graph:
    model, batch = {"gpt2": gpt2, "t5": t5, "norms": norms}[name]()
    return capture(model, (), batch, loss=lambda out, target: out)


@pytest.mark.parametrize("name", ["gpt2", "t5", "norms"])
def test_the_plan_is_next_to_the_bound(name: str):
    mesh, options = mw.Mesh(gpu=8, device="h100"), Options()
    graph, plan = make_plan(captured(name), mesh, options)
    found = certify(graph, mesh, options, plan)
    assert found.gap <= BAR, found


def test_a_tied_weight_is_not_promised_what_is_not_emitted():
    """On two axes two readers of one weight shared a gather in the objective that each of them then made for itself."""
    mesh, options = mw.Mesh(node=8, gpu=8, device="h100", links={"node": "ib-ndr"}), Options()
    graph = captured("gpt2")
    plan = make_plan(graph, mesh, options)[1]
    case = Case(graph, factor_graph(graph), {}, shares=False)
    apart = decided(case, mesh, options).solution
    assert apart is not None and sum(plan.seconds) <= apart.cost * (1 + 1e-6)
