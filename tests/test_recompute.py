"""Recompute: equal numbers whatever backward makes again; what is kept is what was asked; laws, text, stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.blocks import block_names, blocks
from meshwright.partitioner.capture import capture
from meshwright.partitioner.errors import LawError
from meshwright.partitioner.graph import Graph, is_tensor
from meshwright.partitioner.micro import make_plan_in_time
from meshwright.partitioner.planner import Options
from meshwright.partitioner.saved import saved_values
from meshwright.partitioner.twins import is_twin, original
from meshwright.passes import laws
from meshwright.passes.draft import start
from meshwright.passes.lower import lower
from meshwright.passes.reshard import insert_reshards
from random_plans import GPT
from test_promise import one_step
from torch import nn
from zoo import ZOO

TOKENS, TARGETS = torch.arange(32).reshape(4, 8) % 13, torch.arange(32).reshape(4, 8) % 11
RUNS: dict[str, dict[str, Any]] = {
    "dp2": {"axes": {"dp": 2}},
    "tp2": {"axes": {"tp": 2}},
    "dp2xtp2": {"axes": {"dp": 2, "tp": 2}},
    "zero3": {"axes": {"dp": 2}, "zero": 3},
    "1f1b": {"axes": {"pp": 2}, "schedule": "1f1b", "micro_batches": 4},
}
FAST = {("gpt2", "zero3"), ("llama", "dp2xtp2"), ("mixtral", "tp2"), ("vit", "1f1b"), ("resnet", "dp2")}
MODELS = ("gpt2", "llama", "vit", "resnet", "t5", "mixtral")


def runs() -> list:
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(m, r, marks=marks[(m, r) in FAST]) for m in MODELS for r in RUNS]


@pytest.mark.parametrize("name,run", runs())
def test_full_recompute_equals_one_device(name: str, run: str):
    compiled, found = one_step(name, recompute="full", **RUNS[run])
    assert not found, "\n".join(found)
    assert compiled.plan.recompute and any(map(is_twin, compiled.plan.choices))


def gpt(drop: float = 0.0, layers: int = 2, **options: Any) -> mw.Compiled:
    torch.manual_seed(0)
    axes = options.pop("axes", {"dp": 2})
    optimizer = options.pop("optimizer", lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    return mw.compile(
        GPT(drop=drop, layers=layers).train(), mw.Mesh(**axes, device="cpu"), optimizer=optimizer, **options
    )


def after_steps(compiled: mw.Compiled, steps: int = 2) -> dict[str, torch.Tensor]:
    losses = [compiled.step(TOKENS, TARGETS) for _ in range(steps)]
    return {f"loss {i}": loss for i, loss in enumerate(losses)} | compiled.gather("params")


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2}, {"tp": 2}], ids=str)
def test_dropout_draws_the_same_bits_again(axes: dict[str, int]):
    want, got = (after_steps(gpt(0.3, axes=axes, recompute=r)) for r in ("none", "full"))
    assert all(torch.equal(want[n], got[n]) for n in want)


def test_pause_between_forward_and_backward():
    want, got = gpt(0.2, recompute="none"), gpt(0.2, recompute="full")
    for compiled in (want, got):
        (compiled(TOKENS, TARGETS) * 2).backward()
    grads = want.gather("grads"), got.gather("grads")
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])
    assert got.plan.recompute


def test_running_statistics_are_updated_once():
    torch.manual_seed(0)
    x = torch.randn(8, 6)

    def net() -> nn.Module:
        torch.manual_seed(1)
        block = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())  # noqa: E731
        return nn.Sequential(block(), block(), block())

    plain, compiled = net(), mw.compile(net(), mw.Mesh(dp=2), loss=lambda y: y.square().mean(), recompute="full")
    plain(x).square().mean().backward()
    compiled.step(x)
    assert compiled.plan.recompute
    for name, buffer in compiled.gather("buffers").items():
        torch.testing.assert_close(buffer, dict(plain.named_buffers())[name])


def test_verify_sees_the_copies_and_finds_them_equal():
    compiled = gpt(0.1, axes={"dp": 2, "tp": 2}, recompute="full", optimizer=None)
    assert compiled.verify(TOKENS, TARGETS).compared > 100
    assert any(is_twin(n.name) for n in compiled.program.captured.fx.nodes)


# -- what is kept
def captured(model: nn.Module, *args: Any) -> Graph:
    return capture(model, args, {}, loss=lambda out, target: out)


def planned(recompute: str = "auto", **keep: str) -> tuple[Graph, Any]:
    graph = captured(GPT(drop=0.1), TOKENS, TARGETS)
    mesh = mw.Mesh(dp=2, device="cpu")
    return make_plan_in_time(graph, mesh, Options(recompute=recompute, keep=keep), 1)


def kept(graph: Graph) -> set[str]:
    assert graph.factored is not None
    return {n.meta["module"] for n in saved_values(graph, graph.factored)}


def test_full_keeps_of_a_block_its_input_alone():
    graph, _ = planned("full")
    inside = [n for n in saved_values(graph, graph.factored) if n in blocks(graph)]  # type: ignore[arg-type]
    assert sorted(n.meta["module"] for n in inside) == ["blocks.0", "blocks.1"]  # what the next reads
    assert all(tuple(n.meta["val"].shape) == (4, 8, 12) for n in inside)


def test_nothing_is_made_again_without_a_limit():
    graph, plan = planned("auto")
    assert not plan.recompute and not any(is_twin(n.name) for n in graph.fx.nodes)


def test_a_pin_recomputes_a_module_and_another_saves_a_part_of_it():
    graph, _ = planned("none", **{"blocks.*": "recompute", "blocks.*.attention": "save"})
    assert {"blocks.0.attention", "blocks.1.attention"} <= kept(graph)
    assert not {"blocks.0.up", "blocks.1.n2"} & kept(graph)
    graph, plan = planned("none", **{"blocks.1": "recompute"})
    assert {plan.modules[n][0].split(".")[1] for n in plan.choices if is_twin(n)} == {"1"}


def test_a_copy_stands_with_its_block():
    """When the backward of a block begins, nothing of the block before it has been made again."""
    graph, _ = planned("full")
    module = [n.meta["module"].split(".")[1] for n in graph.calls() if is_twin(n.name)]
    assert module == sorted(module, reverse=True)


def test_ops_of_others_are_not_made_again():
    seen = []

    @torch.library.custom_op("mwtest::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x * 2

    counted.register_fake(lambda x: torch.empty_like(x))
    counted.register_autograd(lambda ctx, g: g * 2)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(counted(torch.tanh(self.f(x)))).square()

    compiled = mw.compile(
        nn.Sequential(Layer(), Layer()), mw.Mesh(dp=1), loss=lambda y: y.sum(), recompute="full"
    )
    compiled.trace(torch.randn(4, 6))
    seen.clear()
    compiled.step(torch.randn(4, 6))
    assert len(seen) == 2 and compiled.plan.recompute


# -- blocks
def test_blocks_are_found_by_what_they_do():
    assert block_names(captured(GPT(layers=3), TOKENS, TARGETS)) == {"blocks.0", "blocks.1", "blocks.2"}
    for name, want in {"t5": {"model.encoder.block.0", "model.decoder.block.1"}, "vit": {"model.vit.layers.0"}}.items():
        model, inputs = ZOO[name]()
        found = block_names(capture(model, (), inputs, loss=lambda out, target: out))
        assert {n.replace("vit.encoder.layer.", "vit.layers.") for n in found} >= want, found


def test_a_layer_that_is_run_twice_is_two_blocks():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softmax(-1)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return x.square().sum()

    assert len(set(blocks(captured(Twice(), torch.randn(2, 4))).values())) == 4


# -- the plan and the laws
def test_stages_in_one_go_make_again_when_backward_comes():
    """Nothing is made again beside forward, where it would stand until another stage's gradients are here."""
    compiled = gpt(0.1, recompute="full", axes={"pp": 2}, micro_batches=1)
    compiled.trace(TOKENS, TARGETS)
    forward, *others = [list(s.graph.calls()) for s in compiled.program.segments]
    assert not any(n.meta.get("backward") for n in forward)
    assert sum(is_twin(n.name) for calls in others for n in calls) > 10


def test_a_saved_plan_recomputes_as_the_first_did():
    first = gpt(0.1, recompute="full", axes={"pp": 2}, micro_batches=2)
    want = after_steps(first, 1)
    again = gpt(0.1, plan=first.plan.to_text(), axes={"pp": 2})
    got = after_steps(again, 1)
    assert all(torch.equal(want[n], got[n]) for n in want)
    assert again.plan.recompute == first.plan.recompute and again.plan.to_text() == first.plan.to_text()


def test_the_plan_tells():
    (_, none), (_, full) = planned("none"), planned("full")
    assert "calls of forward again" in full.summary() and "again" not in none.summary()
    assert "only the second recomputes in backward" in none.diff(full)
    call = next(c for c in full.choices if is_twin(c))
    assert f"backward makes again what {original(call)} gave" in full.explain(call)
    assert "not kept for backward" in full.explain("blocks.0.up")
    assert sum(full.seconds) > sum(none.seconds)


def test_the_law_sees_backward_read_what_is_not_kept():
    graph, plan = planned("full")
    draft = insert_reshards(start(graph, plan, "step", False))
    laws.check(draft, "insert_reshards")
    twin = next(n for n in draft.graph.fx.nodes if is_twin(n.name) and is_tensor(n))
    source = next(n for n in draft.graph.fx.nodes if n.name == original(twin.name))
    next(iter(twin.users)).replace_input_with(twin, source)
    with pytest.raises(LawError, match=f"backward-reads-kept broken.*it reads {source.name}, which is not kept"):
        laws.check(draft, "insert_reshards")


def test_a_cut_inside_a_block_that_is_made_again():
    want = after_steps(gpt(0.2, axes={"dp": 1}), 1)
    pinned = {"blocks.0.up": "stage 1"}
    got = after_steps(gpt(0.2, axes={"pp": 2}, micro_batches=2, schedule="zb-h1", recompute="full", pin=pinned), 1)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)


def test_a_plan_that_was_edited_is_lowered_as_it_says():
    graph, plan = planned("full")
    with pytest.raises(LawError, match="backward-reads-kept"):
        more = {n.name for n in saved_values(graph, graph.factored)}  # type: ignore[arg-type]
        lower(graph, replace(plan, recompute=plan.recompute | more))
