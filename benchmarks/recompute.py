"""Recompute beside torch's own partitioner (`activation_memory_budget`): flops made again at an equal peak.

    python benchmarks/recompute.py [GPT] [Llama] [ViT] [--write]

Both get the same model of four blocks on one device, on fake tensors: torch by AOTAutograd,
`min_cut_rematerialization_partition` and budgets from 0 to 1; here what `memory=` chooses from
(`partitioner/least_again.py`), and the ladder that it falls back to.

    peak     most bytes alive between begin and end of forward and backward, parameters and inputs not counted; node by
             node, a tensor until its last reader, views with what they look at; the same count for both
    flops    of matrix products (2mnk) and attention (4bas^2d, causal half of it) made again, of those of forward

`--write` puts the table into docs/memory.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as config
import torch.fx as fx
from functorch.compile import (
    aot_function,
    make_boxed_func,  # type: ignore[attr-defined]
    min_cut_rematerialization_partition,
)
from meshwright.partitioner.capture import capture
from meshwright.partitioner.fit import _ladder, _local
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.least_again import LeastAgain
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.micro import make_plan_in_time
from meshwright.partitioner.planner import Options
from meshwright.partitioner.recompute import made_again
from recompute_models import MODELS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import flop_registry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- recompute -->\n", "<!-- end of recompute -->\n"
HALVINGS = 7

BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def flops(node: fx.Node) -> float:
    """Of a call of forward's kind; backward's own are the same however much is made again."""
    name, val = str(node.target), node.meta.get("val")
    if node.op != "call_function" or "backward" in name:
        return 0.0
    if "attention" in name:
        q, k = (node.args[i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]
        return 4.0 * q.numel() * k.shape[-2] / (2 if _causal(node) else 1)
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry or val is None:
        return 0.0
    args = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    return float(flop_registry[packet](*args, out_val=val))


def _causal(node: fx.Node) -> bool:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: x for a, x in zip(schema, node.args, strict=False)} | node.kwargs
    return bool(given.get("is_causal") or given.get("causal"))


def _view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def peak(nodes: list[fx.Node], given: set[fx.Node], leaves: set[fx.Node], sources: dict[fx.Node, fx.Node]) -> int:
    """The most bytes alive. `given`: not counted; `leaves`: alive to the end; `sources`: a node that is another one."""
    base: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for i, given_as in enumerate(nodes):
        node = sources.get(given_as, given_as)
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        looks = node.op == "call_function" and first is not None and _view(node)
        base.setdefault(node, base[sources.get(first, first)] if looks else node)  # type: ignore[index,arg-type]
        for x in (given_as, *given_as.all_input_nodes):
            last[base[sources.get(x, x)]] = i
    for x in leaves:
        last[base[sources.get(x, x)]] = len(nodes)
    held = most = 0
    for i, node in enumerate(nodes):
        if node not in sources and base[node] is node and node not in given:
            held += _bytes(node)
        most = max(most, held)
        for b in {base[sources.get(x, x)] for x in (node, *node.all_input_nodes)}:
            if last[b] == i and b not in given:
                held -= _bytes(b)
    return most


def _bytes(node: fx.Node) -> int:
    val = node.meta.get("val")
    return val.numel() * val.element_size() if isinstance(val, torch.Tensor) and node.op == "call_function" else 0


def theirs(model: Any, batch: dict[str, torch.Tensor], budget: float) -> tuple[int, float]:
    """(peak, flops of forward and backward's own kind) under a budget."""
    graphs: list[fx.GraphModule] = []

    def keep(made: fx.GraphModule, _: Any) -> Any:
        graphs.append(made)
        return make_boxed_func(made.forward)

    with config.patch(activation_memory_budget=budget):
        split = {"fw_compiler": keep, "bw_compiler": keep, "partition_fn": min_cut_rematerialization_partition}
        params = dict(model.named_parameters()) | dict(model.named_buffers())
        aot_function(lambda p, given: functional_call(model, p, (), given), **split)(params, batch).backward()
    forward, backward = (g.graph for g in graphs)
    given_out: Any = forward.output_node().args[0]
    left: Any = backward.output_node().args[0]
    out, saved = given_out[0], [x for x in given_out if isinstance(x, fx.Node)]
    by_name = {x.name: x for x in saved}
    sources = {n: by_name[n.name] for n in backward.nodes if n.op == "placeholder" and n.name in by_name}
    nodes = [n for g in (forward, backward) for n in g.nodes if n.op != "output"]
    given = {n for n in nodes if n.op == "placeholder" and n not in sources}
    grads = {x for x in left if isinstance(x, fx.Node)}
    return peak(nodes, given, grads | {out}, sources), sum(map(flops, nodes))


def ours(graph: Graph, plan: Any, names: frozenset[str]) -> tuple[int, float]:
    made = made_again(graph, plan, names)[0] if names else graph
    nodes = [n for n in made.fx.nodes if n.op != "output"]
    given = {n for n in nodes if n.op != "call_function"}
    leaves = {v for v in made.output_values if v is not None}
    return peak(nodes, given, leaves, {}), sum(map(flops, nodes))


Point = tuple[int, float]
"""Peak, flops of forward's kind."""


class Ours:
    """What can be chosen here, as points."""

    def __init__(self, model: Any, batch: dict[str, torch.Tensor]):
        graph = capture(model, (), batch, loss=lambda out, _: out)
        self.graph, self.plan = make_plan_in_time(graph, Mesh(dp=1, device="h100"), Options(zero=0), 1)
        self.of = sum(flops(n) for n in self.graph.fx.nodes if not n.meta.get("backward"))
        self.choice = LeastAgain(self.graph, self.plan, {}, _local(self.graph, self.plan), 1.0)
        self.ladder = [ours(self.graph, self.plan, names) for names in _ladder(self.graph, {})]
        self.free = self.ladder[0]
        self.found: dict[frozenset[str], Point] = {frozenset(): self.free}

    def at(self, limit: float) -> Point | None:
        names = self.choice.within(limit)
        if names is not None and names not in self.found:
            self.found[names] = ours(self.graph, self.plan, names)
        return None if names is None else self.found[names]

    def least(self, peak: int) -> float | None:
        """The least flops of all choices found whose peak is within this one, which is looked for by halving."""
        low, high = 0.0, self.choice.kept
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            one = self.at(middle)
            low, high = (middle, high) if one is None or one[0] <= peak else (low, middle)
        return least_of(list(self.found.values()), peak)


def least_of(points: list[Point], peak: int) -> float | None:
    return min((made for held, made in points if held <= peak), default=None)


def compare(name: str) -> list[str]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, batch = MODELS[name]()
    free = theirs(model, batch, 1.0)
    them = {theirs(model, batch, b) for b in BUDGETS}
    us = Ours(model, batch)

    def share(made: float | None) -> str:
        return "-" if made is None else f"{(made - us.free[1]) / us.of:.1%}"

    rows = []
    for held, made in sorted(p for p in them if not any(q[0] <= p[0] and q[1] < p[1] for q in them)):
        best = (share(us.least(held)), share(least_of(us.ladder, held)))
        rows.append(f"| {name} | {held / 1e6:.0f} MB | {(made - free[1]) / us.of:.1%} | {best[0]} | {best[1]} |")
        print(rows[-1], flush=True)
    print(f"{name}: nothing made again {us.free[0] / 1e6:.0f} MB, torch at budget 1 {free[0] / 1e6:.0f}", flush=True)
    return rows


def main(args: list[str]) -> None:
    rows = [row for name in [a for a in args if a in MODELS] or MODELS for row in compare(name)]
    if "--write" in args:
        head = "| | peak | torch | here | the ladder |\n|---|---|---|---|---|\n"
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + head + "\n".join(rows) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main(sys.argv[1:])
