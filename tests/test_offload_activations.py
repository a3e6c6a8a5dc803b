"""Saved activations on the host: the same bits as without, fewer bytes on the device, as predicted; laws, pins."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.kernels.offload import RELOAD, reloaded
from meshwright.partitioner.capture import capture
from meshwright.partitioner.errors import LawError
from meshwright.partitioner.memory import Model
from meshwright.partitioner.micro import make_plan_in_time
from meshwright.partitioner.planner import Options
from meshwright.passes import laws
from meshwright.passes.draft import start
from meshwright.passes.offload import write_offload
from meshwright.passes.reshard import insert_reshards
from meshwright.runtime.tracked import WatchedComm, track
from random_plans import GPT
from small import adamw, mesh
from test_offload import named, same_bits

IDS, Y = torch.arange(64).reshape(8, 8) % 13, torch.arange(64).reshape(8, 8) % 11
AWAY = mw.Offload(offload_activations="cpu")
WAYS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"zero": 3, "micro_batches": 2}),
    ({"tp": 2}, {"recompute": "full", "pin": {"blocks.1": "save"}}),
    ({"pp": 2}, {"micro_batches": 4, "schedule": "1f1b"}),
    ({"dp": 2, "pp": 2}, {"micro_batches": 4, "schedule": "zb-h1", "zero": 1}),
]


def gpt(axes: dict[str, int], layers: int = 2, **options: Any) -> mw.Compiled:
    torch.manual_seed(0)
    return mw.compile(GPT(layers=layers, drop=0.2).train(), mesh(axes), optimizer=adamw, **options)


BOTH = mw.Offload(offload_optimizer="cpu", offload_activations="cpu")


def stepped(compiled: mw.Compiled, steps: int = 2) -> mw.Compiled:
    for _ in range(steps):
        compiled.step(ids=IDS, y=Y)
    return compiled


@pytest.mark.parametrize("axes,options", WAYS, ids=named)
def test_the_bits_are_those_without_offload(axes: dict[str, int], options: dict[str, Any]):
    one, other = stepped(gpt(axes, **options)), stepped(gpt(axes, offload=BOTH, **options))
    same_bits(one, other)
    assert other.plan.offload and not other.plan.offload & other.plan.recompute
    assert "on the host until backward reads them" in other.plan.summary()


def test_calling_and_backward():
    """An "autograd" program offloads before its outputs leave."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU()) for _ in range(3)))
    x, found = torch.randn(4, 6), []
    for offload in ("none", AWAY):
        compiled = mw.compile(model, mesh({"dp": 2}), offload=offload)
        compiled(x).square().sum().backward()
        found.append(compiled)
    assert found[1].plan.offload
    same_bits(*found)


@pytest.mark.parametrize("axes,options", [({"dp": 2}, {}), WAYS[2]], ids=named)
def test_the_device_holds_less_and_as_much_as_predicted(axes: dict[str, int], options: dict[str, Any]):
    peaks = []
    for offload in ("none", AWAY):
        compiled = gpt(axes, layers=4, offload=offload, **options)
        compiled._comm = WatchedComm(compiled.mesh)
        stepped(compiled, 1)
        peaks.append(max(one.peak for one in track(compiled, ids=IDS, y=Y)))
        assert abs(Model(compiled.program).peak().peak - peaks[-1]) <= 0.05 * peaks[-1], offload
    kept, away = peaks
    assert away < 0.85 * kept


def test_pins_name_what_is_offloaded():
    pinned = gpt({"dp": 2}, pin={"blocks.*": "offload", "blocks.*.attention": "save", "blocks.1.down": "recompute"})
    plan = stepped(pinned, 1).plan
    where = {name: plan.modules[name][0] for name in plan.offload if name in plan.modules}
    assert where and all(module.startswith("blocks.") for module in where.values())
    assert not any("attention" in module for module in where.values())
    assert pinned.explain(min(where)).count("on the host from its last use in forward")
    one = min(where)
    assert "comes back from the host" in pinned.explain(f"{one}_again")
    with pytest.raises(mw.PlanError, match="'bloks' names no module and no call"):
        stepped(gpt({"dp": 2}, pin={"bloks": "offload"}))


def test_a_saved_plan_offloads_the_same():
    one = stepped(gpt({"tp": 2}, offload=AWAY, pin={"blocks.0.up": "recompute"}), 1)
    text = one.plan.to_text()
    other = stepped(gpt({"tp": 2}, plan=text), 1)
    assert other.plan.to_text() == text and other.plan.offload == one.plan.offload
    same_bits(one, other)


def test_every_value_equals_one_device():
    gpt({"dp": 2, "tp": 2}, offload=AWAY).verify(ids=IDS, y=Y)


def test_what_comes_back_went_away():
    """The law, and what it says of programs that break it."""
    graph = capture(GPT(layers=1), (), {"ids": IDS, "y": Y}, loss=lambda output, target: output)
    made, plan = make_plan_in_time(graph, mesh({"dp": 2}), Options(offload=True), 1)
    assert plan.offload

    def broken(spoil: Any, said: str) -> None:
        draft = write_offload(insert_reshards(start(made.copy(), plan, "step", False)))
        laws.check(draft, "write_offload")
        spoil(draft.graph.fx)
        with pytest.raises(LawError, match=f"law reload-has-offload broken.*{said}"):
            laws.check(draft, "spoil")

    def first(fx: Any, target: Any) -> Any:
        return next(n for n in fx.nodes if n.target is target)

    def read_what_is_away(fx: Any) -> None:
        node = first(fx, reloaded)
        node.replace_all_uses_with(node.args[0].args[0].args[0])

    def without_waiting(fx: Any) -> None:
        node = first(fx, RELOAD)
        list(node.users)[0].replace_all_uses_with(node)

    def never_away(fx: Any) -> None:
        node = first(fx, RELOAD)
        node.args = (node.args[0].args[0],)

    broken(read_what_is_away, "is on the host")
    broken(without_waiting, "without waiting")
    broken(never_away, "is on the host")


def test_the_host_is_counted_apart():
    """Bytes that went down are the host's from then until they have come up."""
    compiled = gpt({"dp": 1}, offload=AWAY)
    compiled._comm = WatchedComm(compiled.mesh)
    stepped(compiled, 1)
    nodes = {n.name: n.meta.get("val") for n in compiled.program.captured.fx.nodes}
    away = sum(nodes[name].nbytes for name in compiled.plan.offload)
    (one,) = track(compiled, ids=IDS, y=Y)
    assert one.host == away > 0
