"""What a transformer layer keeps for backward, in the graph, against the published counts (arXiv 2205.05198, table 2).

    2-byte values, GELU, dropout, s tokens, b sequences, width h, a heads, t tensor ranks

    form                         the paper, a rank             here
    one device                   sbh (34 + 5as/h)              34sbh + 4asb + 8sb
    tensor parallel              sbh (10 + 24/t + 5as/(ht))    sbh (10 + 24/t) + 4asb/t + 8sb
    sequence-sharded norms       sbh (34/t + 5as/(ht))         (34sbh + 4asb + 8sb) / t
    selective recompute          34sbh                         as without: there are no scores to make again
    full recompute               2sbh                          2sbh

Where they differ: attention keeps its log-sum-exp, 4 bytes a head and token, in the place of softmax, mask and dropout
of [s, s] (5as^2b): that is the paper's selective recompute, without recompute. A layer norm keeps mean and 1/std of
each token, 2 bytes each here. The paper leaves both small terms out. All else is equal, masks of dropout among it.
Which of the two forms of tensor parallelism a plan has follows from the layout of the norms, here pinned.
"""

from __future__ import annotations

from functools import cache

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from meshwright.partitioner.capture import capture
from meshwright.partitioner.collective import largest_local
from meshwright.partitioner.micro import make_plan_in_time
from meshwright.partitioner.placement import place
from meshwright.partitioner.planner import Options
from meshwright.partitioner.saved import saved_values
from torch import nn

S, B, H, A = 1024, 4, 2048, 16
WHOLE, SPLIT = (tuple((f"*.{norm}", text) for norm in ("first", "second")) for text in ("[b, s, h]", "[b, s:tp, h]"))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(B, S, A, H // A).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, H)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


class Net(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@cache
def kept(layers: int, recompute: str = "none", ranks: int = 1, pins: tuple = ()) -> tuple[int, ...]:
    """Bytes of what backward reads, of a tensor rank: of wide values (a multiple of h), and of the others."""
    with torch.device("meta"):
        net, x = Net(layers).bfloat16().train(), torch.empty(B, S, H, dtype=torch.bfloat16)
    graph = capture(net, (x,), {}, loss=lambda out, _: out)
    mesh = mw.Mesh(tp=ranks, device="h100") if ranks > 1 else mw.Mesh(dp=1, device="h100")
    graph, plan = make_plan_in_time(graph, mesh, Options(recompute=recompute, zero=0, pin=dict(pins)), 1)
    layouts = place(graph, graph.factored, plan).layouts
    found = [0, 0]
    for v in saved_values(graph, graph.factored):
        wide = v.meta["val"].shape[-1] not in (1, S)
        found[not wide] += largest_local(layouts[v], plan.grid) * v.meta["val"].element_size()
    return tuple(found)


def a_layer(recompute: str = "none", ranks: int = 1, pins: tuple = ()) -> tuple[int, ...]:
    """Of one layer more."""
    few, more = (kept(n, recompute, ranks, pins) for n in (2, 3))
    return tuple(b - a for a, b in zip(few, more, strict=True))


def test_a_layer_keeps_what_the_paper_says():
    wide, narrow = a_layer()
    assert wide == 34 * S * B * H
    assert narrow == 4 * A * S * B + 8 * S * B


@pytest.mark.parametrize("t", [2, 4])
def test_a_layer_on_tensor_ranks(t: int):
    wide, narrow = a_layer("none", t, WHOLE)
    assert wide == (10 + 24 // t) * S * B * H
    assert narrow == 4 * A * S * B // t + 8 * S * B


@pytest.mark.parametrize("t", [2, 4])
def test_a_layer_with_sequence_sharded_norms(t: int):
    wide, narrow = a_layer("none", t, SPLIT)
    assert wide == 34 * S * B * H // t
    assert narrow == (4 * A * S * B + 8 * S * B) // t


def test_full_recompute_keeps_the_input_of_a_layer():
    assert a_layer("full") == (2 * S * B * H, 0)
