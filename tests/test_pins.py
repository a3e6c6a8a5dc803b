"""Pins by module and by op, pins in conflict, and where the planner splits weights when one axis is slow."""

from __future__ import annotations

from functools import cache

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from meshwright.partitioner.capture import capture
from meshwright.partitioner.given import named_calls, smallest
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.plan import Plan
from meshwright.partitioner.planner import Options, make_plan
from small import mlp
from torch import nn


class Block(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def mean_square(out: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    return out.square().mean()


@cache
def blocks(d: int = 32, batch: int = 4, length: int = 8, layers: int = 2) -> Graph:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block(d, 8) for _ in range(layers))), torch.empty(batch, length, d)
    return capture(model, (x,), {}, loss=mean_square)


def planned(pin: dict[str, str], graph: Graph | None = None, **axes: int) -> Plan:
    return make_plan(graph or blocks(), mw.Mesh(**axes, device="h100"), Options(pin=pin))[1]  # type: ignore[arg-type]


# -- names
def test_an_op_means_its_calls_of_forward():
    named = [n.name for n in named_calls(blocks(), "op:mm")]
    assert len(named) == 12 and not any(n.meta.get("backward") for n in named_calls(blocks(), "op:*attention*"))


def test_an_op_that_only_backward_has():
    assert len(named_calls(blocks(), "op:*attention_backward*")) == 2


@pytest.mark.parametrize("name", ["op:aten.mm.default", "op:aten.mm", "op:mm.default", "op:m[m]"])
def test_an_op_has_short_and_long_names(name: str):
    assert named_calls(blocks(), name) == named_calls(blocks(), "op:mm")


def test_a_module_means_what_it_hands_on():
    (norm,), (up,) = named_calls(blocks(), "0.norm1"), named_calls(blocks(), "0.up")
    assert "layer_norm" in str(norm.target) and "view" in str(up.target)
    assert [str(n.target) for n in named_calls(blocks(), "[01]")].count("aten.add.Tensor") == 4


def test_a_module_pin_holds_in_every_layer():
    plan = planned({"*.up": "[b, s, h:x]"}, x=2)
    calls = [n.name for i in (0, 1) for n in named_calls(blocks(), f"{i}.up")]
    assert len(calls) == 2 and all(plan.choices[c]["x"] is not None for c in calls)
    assert len({str(plan.choices[c]["x"]) for c in calls}) == 1


def test_a_pin_takes_the_calls_that_have_as_many_dims():
    plan = planned({"op:view": "[b, h, s, d:x]"}, x=2)
    assert plan.gap == 0
    with pytest.raises(mw.PlanError, match=r"2 dims"):
        planned({"op:*attention*": "[b, h:x]"}, x=2)


def test_a_data_axis_that_a_pin_leaves_out_splits_the_batch():
    plan = planned({"*.up": "[b, s, h:tp]"}, dp=2, tp=2)
    (call,) = named_calls(blocks(), "0.up")
    assert plan.choices[call.name]["dp"] is not None and plan.choices[call.name]["tp"] is not None


def test_what_reads_a_pinned_call_is_not_gathered():
    """Casts and views of a pinned tensor ran whole: they follow what they read, and that decided by itself."""
    pin = dict.fromkeys(("[01]", "*.norm1", "*.norm2"), "[b:x, s, h]")
    pin |= {"op:mm": "[t:x, h]", "op:*attention*": "[b:x, h, s, d]"}
    plan = planned(pin, graph=blocks(d=1024, batch=16, length=512), x=4)
    assert plan.facts is not None
    moved = {str(m.way) for m in plan.facts.moves if not m.is_param and not m.leaves}
    assert moved <= {"slice over x"}


# -- conflicts
def test_pins_of_one_call_in_conflict_are_named_and_no_other():
    pin = {"op:mm": "[t:x, h]", "*.down": "[b, s, h]", "mm": "[t, h:x]"}
    with pytest.raises(mw.PlanError) as caught:
        planned(pin, x=2)
    text = str(caught.value)
    assert "'op:mm': '[t:x, h]' and 'mm': '[t, h:x]' cannot hold together" in text and "down" not in text


def test_pins_of_one_parameter_in_conflict():
    with pytest.raises(mw.PlanError, match=r"'0.up.weight': .* and '\*.up.weight': .* cannot hold together"):
        planned({"0.up.weight": "[o:x, i]", "*.up.weight": "[o, i:x]"}, x=2)


def test_a_pin_that_leaves_a_rank_empty():
    with pytest.raises(mw.PlanError, match="over x.y leave some of 8 ranks empty"):
        planned({"0.up": "[b:x+y, s, h]"}, x=4, y=2)


def test_the_smallest_set_leaves_nothing_to_drop():
    pins = tuple((name, "[]") for name in "abcde")
    assert smallest(pins, lambda some: {"b", "d"} <= {n for n, _ in some}) == (pins[1], pins[3])


def test_a_name_that_is_nothing_has_near_names():
    with pytest.raises(mw.PlanError, match="names no parameter and no call; there are, for example, .*0.norm1"):
        planned({"0.nrm1": "[b, s, h]"}, x=2)


def test_pinned_modules_give_the_numbers_of_one_device():
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(4, 6)
    want = F.cross_entropy(model(x), torch.tensor([0, 1, 2, 3]))
    pin = {"0": "[b, h:x]", "op:gelu": "[b, h:x]"}
    compiled = mw.compile(model, mw.Mesh(x=2, device="cpu"), loss=F.cross_entropy, pin=pin)
    torch.testing.assert_close(compiled.step(x, target=torch.tensor([0, 1, 2, 3])), want.detach())


# -- a slow axis
def weight_axes(slow: str) -> set[str]:
    """The axes that split the weights of attention and mlp, on a mesh whose one axis is slow."""
    links = {"x": "nvlink4", "y": "nvlink4"} | {slow: "eth-100"}
    graph = blocks(d=2048, batch=4, length=4096)
    plan = make_plan(graph, mw.Mesh(x=4, y=4, device="h100", links=links), Options())[1]
    choices = [item for n in named_calls(graph, "op:mm") for item in plan.choices[n.name].items()]
    assert {axis for axis, c in choices if isinstance(c, tuple) and c[0] == "m"} == {slow}
    return {axis for axis, c in choices if isinstance(c, tuple) and c[0] in "nk"}


def test_the_slow_axis_does_not_split_weights():
    assert (weight_axes("x"), weight_axes("y")) == ({"y"}, {"x"})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids)).square().mean()


@pytest.mark.parametrize("name", ["emb.weight", "head.weight", "head.w*"])
def test_a_tied_parameter_is_pinned_by_any_of_its_names(name: str):
    ids = torch.zeros(4, 3, dtype=torch.long)
    made = mw.compile(Tied(), mw.Mesh(tp=2, device="cpu"), args=(ids,), pin={name: "[v, d:tp]"})
    assert str(made.plan.resting["emb.weight"]) == "[8, 6:tp]"


def test_two_names_of_one_tensor_pinned_apart():
    with pytest.raises(mw.PlanError, match="emb.weight, which is pinned to"):
        mw.compile(Tied(), mw.Mesh(tp=2, device="cpu"), pin={"emb.weight": "[v, d:tp]", "head.weight": "[v:tp, d]"})
