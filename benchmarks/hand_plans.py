"""The planner against plans made by hand: their price over the price of the plan that is free.

    OMP_NUM_THREADS=1 python benchmarks/hand_plans.py                              # all, the table of docs/planner.md
    OMP_NUM_THREADS=1 python benchmarks/hand_plans.py --model llama --mesh gpu --each

A hand plan is a set of pins: how every parameter rests, and how the residual stream, the norms, the products, attention
and the head are split. What no pin speaks of the planner chooses, so a hand plan's price is the least that it can have.
Axes have free names. *price*: seconds of every call, of the optimizer and of every reshard that the plan emits
(`partitioner/untied.py`), for both plans alike. A ratio below 1 is a defect of the planner.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import meshwright as mw
from hand_models import ARCHITECTURES, Architecture
from meshwright.partitioner.capture import capture
from meshwright.partitioner.factors import Factored, factor_graph
from meshwright.partitioner.given import named_calls
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.layout import Layout
from meshwright.partitioner.planner import Options, make_plan
from meshwright.partitioner.untied import Untied

MESHES: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": 8, "links": {"gpu": "nvlink4"}},
    "ib": {"node": 4, "gpu": 8, "links": {"node": "ib-ndr", "gpu": "nvlink4"}},
    "eth": {"node": 2, "gpu": 4, "links": {"node": "eth-100", "gpu": "nvlink4"}},
}
Axes = tuple[str, ...]
Pins = dict[str, str]


class Case:
    """A captured model on a mesh."""

    def __init__(self, name: str, load: tuple[int, int], mesh_name: str):
        self.made: Architecture = ARCHITECTURES[name]
        self.load = load
        self.mesh = mw.Mesh(**MESHES[mesh_name], device="h100")
        model, inputs = self.made.build(*self.load)
        self.graph: Graph = capture(model, (), inputs, loss=lambda out, target: out)
        self.factored: Factored = factor_graph(self.graph)

    @property
    def outer(self) -> Axes:
        return tuple(a for a in self.mesh.names if a != "gpu")

    def params(self) -> dict[str, Layout]:
        inputs = zip(self.graph.placeholders, self.graph.inputs, strict=True)
        return {str(r.name): self.factored.whole(n) for n, r in inputs if r.kind == "param"}

    def ranks(self, axes: Axes) -> int:
        total = 1
        for a in axes:
            total *= self.mesh.sizes[a]
        return total

    def cut(self, layout: Layout, axes: Axes, dim: int | None = None) -> Layout:
        """Split over axes the first factor (of a dim) that divides evenly and that nothing splits; else nothing."""
        for i, factors in enumerate(layout.dims):
            for j, f in enumerate(factors):
                if axes and dim in (None, i) and not f.axes and f.size % self.ranks(axes) == 0:
                    return layout.with_axes((i, j), axes)
        return layout

    def forward(self, name: str) -> bool:
        return any(not n.meta.get("backward") for n in named_calls(self.graph, name))


def lay(text: str, **axes: Axes) -> str:
    """A layout text with letters after colons put as mesh axes: `lay("[b:d, h]", d=("node", "gpu"))`."""
    return re.sub(r":(\w)\b", lambda m: ":" + "+".join(axes[m[1]]) if axes.get(m[1]) else "", text)


def activations(case: Case, d: Axes, t: Axes = (), s: Axes = ()) -> Pins:
    """The batch over `d`; the sequence of the stream and the norms over `s`; heads and hidden dims of products `t`."""
    pins = dict.fromkeys((*case.made.stream, *case.made.norms), lay("[b:d, s:s, h]", d=d, s=s))
    pins |= {p: lay("[b:d, s, h:t]", d=d, t=t) for p in case.made.wide if not s or t}
    return pins | {"op:*attention*": lay("[b:d, h:t, s, e]", d=d, t=t or s)}


def data_parallel(case: Case, d: Axes) -> Pins:
    pins = activations(case, d)
    for op in ("op:mm", "op:addmm"):
        if case.forward(op):
            pins[op] = lay("[t:d, h]", d=d)
    return pins


def dp(case: Case) -> Pins:
    return {n: str(x) for n, x in case.params().items()} | data_parallel(case, case.mesh.names)


def fsdp(case: Case) -> Pins:
    every = case.mesh.names
    return {n: str(case.cut(x, every)) for n, x in case.params().items()} | data_parallel(case, every)


def hsdp(case: Case) -> Pins | None:
    """Replicas over nodes, shards inside."""
    rest = {n: str(case.cut(x, ("gpu",))) for n, x in case.params().items()}
    return rest | data_parallel(case, case.mesh.names) if case.outer else None


def tensor_split(case: Case) -> dict[str, Layout]:
    """Megatron: rows or columns of the products inside the node; embedding and head by vocabulary."""
    found = {}
    for name, layout in case.params().items():
        dims = [dim for pattern, dim in case.made.split.items() if fnmatchcase(name, pattern)]
        dims += [0] if name == case.made.head[1] else []
        found[name] = case.cut(layout, ("gpu",), dims[0]) if dims else layout
    return found


def megatron(case: Case) -> Pins:
    t: Axes = ("gpu",)
    return {n: str(x) for n, x in tensor_split(case).items()} | activations(case, case.outer, t, t)


def tp_fsdp(case: Case) -> Pins | None:
    t: Axes = ("gpu",)
    rest = {n: str(case.cut(x, case.outer)) for n, x in tensor_split(case).items()}
    return rest | activations(case, case.outer, t, t) if case.outer else None


def ulysses(case: Case) -> Pins:
    """The sequence inside the node, heads in attention, weights as in FSDP."""
    rest = {n: str(case.cut(x, case.mesh.names)) for n, x in case.params().items()}
    return rest | activations(case, case.outer, s=("gpu",))


def vocabulary(case: Case) -> Pins:
    """Data parallel over every axis but for the head, whose vocabulary is split inside the node."""
    module, weight = case.made.head
    pins = {n: str(x) for n, x in case.params().items()} | activations(case, case.mesh.names)
    pins[weight] = str(case.cut(case.params()[weight], ("gpu",), 0))
    val = named_calls(case.graph, module)[0].meta["val"]
    return pins | {module: lay("[b:d, s, v:t]" if val.dim() == 3 else "[b:d, v:t]", d=case.outer, t=("gpu",))}


HAND = {
    "DP": dp, "FSDP": fsdp, "HSDP": hsdp, "Megatron": megatron, "TP+FSDP": tp_fsdp, "Ulysses": ulysses,
    "vocabulary-split head": vocabulary,
}  # fmt: skip


@dataclass(frozen=True)
class Price:
    """Of a plan: calls, optimizer and every emitted reshard; the summary's seconds; the gap."""

    emitted: float
    seconds: float
    gap: float


def price(case: Case, pins: Pins) -> Price:
    options = Options(pin=pins)
    graph, plan = make_plan(case.graph, case.mesh, options)
    emitted = Untied(graph, case.mesh, Options(), plan).cost()
    return Price(emitted, sum(plan.seconds), plan.gap or 0.0)


def ratios(case: Case, free: Price, each: bool) -> dict[str, float]:
    """Per hand plan that the mesh has room for its price over that of the free plan."""
    found = {}
    for label, make in HAND.items():
        pins = make(case)
        if pins is None:
            continue
        try:
            hand = price(case, pins)
        except mw.PlanError as fault:
            print(f"{label}: {fault}", flush=True)
            continue
        found[label] = hand.emitted / free.emitted
        if each or found[label] < 1 - 1e-6:
            print(f"{label}: free {free} hand {hand}", flush=True)
    return found


def rows(name: str, load: tuple[int, int], meshes: list[str], each: bool) -> dict[str, list[float]]:
    """Prints a line a mesh; per hand plan the ratios."""
    found = defaultdict(list)
    for mesh_name in meshes:
        start = time.process_time()
        case = Case(name, load, mesh_name)
        free = price(case, {})
        some = ratios(case, free, each)
        for label, ratio in some.items():
            found[label].append(ratio)
        took = time.process_time() - start
        head = f"| {name} | {load[0]} x {load[1]} | {mesh_name} | {1e3 * free.emitted:.1f} | {100 * free.gap:.2f}% | "
        cells = [f"{some[label]:.4f}" if label in some else "-" for label in HAND]
        print(head + " | ".join(cells) + f" | {took:.0f} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--mesh", nargs="*", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--load", type=int, nargs="*", default=[0, 1, 2], help="0 many short, 1 middling, 2 few long")
    parser.add_argument("--each", action="store_true", help="print every price")
    options = parser.parse_args()
    print("| model | batch x length | mesh | free ms | gap | " + " | ".join(HAND) + " | CPU s |")
    print("|---" * (6 + len(HAND)) + "|")
    found: dict[str, list[float]] = defaultdict(list)
    for name in options.model:
        for load in options.load:
            for label, some in rows(name, ARCHITECTURES[name].loads[load], options.mesh, options.each).items():
                found[label] += some
    print("\n| hand plan | plans | least | median | most |\n|---|---|---|---|---|")
    for label, some in found.items():
        cells = f"{min(some):.4f} | {statistics.median(some):.3f} | {max(some):.2f}"
        print(f"| {label} | {len(some)} | {cells} |")


if __name__ == "__main__":
    main()
