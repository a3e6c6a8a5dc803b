"""Every value of a program: on one device, and on every rank of a mesh, at every micro-batch.

Graphs are run node by node. A program of segments is walked as it would be (`walk.py`), so what its acts send, keep and
put together over micro-batches is what is seen.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map

from ..kernels.in_place import WRITES
from ..partitioner.layout import Layout, assemble, take_local
from ..partitioner.program import Program
from ..partitioner.transfer import start, wait
from .comm import Start, Wait
from .inprocess import InProcessComm
from .walk import Walk

Values = list[dict[str, Any]]
"""Per rank of the grid (micro-batch * world size + rank) its values by name; what is not of every micro-batch is with
micro-batch 0."""


def whole_values(graph: fx.Graph, inputs: list[Any], constants: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Every node's value on one device, by name."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = constants[str(node.target)]
        elif node.op == "call_function":
            args, kwargs = tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, (node.args, dict(node.kwargs)))
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return {n.name: v for n, v in env.items()}


def rank_values(graph: fx.Graph, inputs: list[Any], constants: dict[str, torch.Tensor]) -> Generator[Any, Any, Any]:
    """A rank's graph, run node by node; returns every node's local value by name, and what the graph gives."""
    env: dict[fx.Node, Any] = {}
    given, out = iter(inputs), ()
    for node in graph.nodes:
        args, kwargs = tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, (node.args, dict(node.kwargs)))
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = constants[str(node.target)]
        elif node.op == "output":
            out = args[0]
        elif node.target is start:
            env[node] = yield Start(args[0], args[1:], kwargs.get("where", ""))
        elif node.target is wait:
            env[node] = yield Wait(args[0])
        else:
            env[node] = node.target(*_apart(node.target, args), **kwargs)  # type: ignore[operator]
    return {n.name: v for n, v in env.items()}, out


def _apart(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call; what it writes over is a copy, for every value is looked at later."""
    at = WRITES.get(target)
    return args if at is None else (*args[:at], args[at].clone(), *args[at + 1 :])


def mesh_values(program: Program, inputs: list[Any]) -> Values:
    """Every value on the mesh, its ranks in this process. `inputs`: whole."""
    world = program.mesh.world_size
    found: Values = [{} for _ in range(program.plan.grid.world_size)]
    run = _walked if program.segments else _at_one_go
    InProcessComm(program.mesh).run([run(program, rank, _local(program, inputs, rank), found) for rank in range(world)])
    return found


def _local(program: Program, inputs: list[Any], rank: int) -> list[Any]:
    """A rank's inputs: None for a parameter that lives on other stages."""
    line = [i for a, i in program.mesh.coord(rank).items() if program.mesh.role(a) == "pipeline"]
    homes = program.plan.stages.homes if program.plan.stages is not None else {}
    local = []
    for x, role, layout in zip(inputs, program.graph.inputs, program.input_layouts, strict=True):
        if role.kind == "param" and line and line[0] not in homes.get(str(role.name), line):
            local.append(None)
        elif isinstance(x, torch.Tensor) and layout is not None:
            local.append(take_local(x, layout, program.mesh, rank))
        else:
            local.append(x)
    return local


def _at_one_go(program: Program, rank: int, inputs: list[Any], found: Values) -> Generator[Any, Any, None]:
    values, out = yield from rank_values(program.rank_graph(rank), inputs, program.constants)
    found[rank].update(values)
    _keep_outputs(program, out, found[rank])


def _walked(program: Program, rank: int, inputs: list[Any], found: Values) -> Generator[Any, Any, None]:
    walk, world = Walk(program, rank), program.mesh.world_size

    def run(segment: int, micro_batch: int | None, given: list[Any]) -> Generator[Any, Any, Any]:
        at, part = (micro_batch or 0) * world + rank, program.segments[segment]
        graph, reads = part.graph_at(micro_batch, world, rank), len(part.reads)
        sums = dict(zip([part.gives.index(c.part) for c in part.sums], given[reads:], strict=False))
        given[reads:] = map(torch.zeros_like, sums.values())  # added to nothing, a part is seen as it is
        values, out = yield from rank_values(graph, given, program.constants)
        for name, value in values.items():
            timed = name in program.timed
            if micro_batch is not None or not timed:  # one read after the loop is known from there
                found[at if timed else rank].setdefault(name, value)
        # sums may be taken in place
        return tuple(_whole(x, sums.get(i)) if isinstance(x, torch.Tensor) else x for i, x in enumerate(out))

    names = [n.name for n in program.graph.placeholders]
    results = yield from walk.run(dict(zip(names, inputs, strict=True)), run)
    _keep_outputs(program, results, found[rank])


def _whole(part: torch.Tensor, so_far: torch.Tensor | None) -> torch.Tensor:
    return part.clone() if so_far is None else so_far + part


def _keep_outputs(program: Program, results: Any, found: dict[str, Any]) -> None:
    """What leaves the program: put together over micro-batches, it may be in no graph."""
    for node, value in zip(program.graph.output_values, results, strict=True):
        if node is not None and value is not None:
            found.setdefault(node.name, value)


def put_together(program: Program, name: str, layout: Layout, values: Values) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor whole, once for every stage whose ranks have it: (" on pp=1", the tensor); "" where there are none."""
    mesh = program.plan.grid if name in program.timed else program.mesh
    axis = next((a for a in mesh.names if mesh.role(a) == "pipeline"), None)
    for i in range(mesh.sizes[axis]) if axis else (0,):
        ranks = [mesh.rank_of(mesh.coord(r) | {axis: i}) if axis else r for r in range(mesh.world_size)]
        parts = [values[r].get(name) for r in ranks]
        if all(isinstance(p, torch.Tensor) for p in parts):
            yield f" on {axis}={i}" if axis else "", assemble(parts, layout, mesh)  # type: ignore[arg-type]


__all__ = ["Values", "mesh_values", "put_together", "rank_values", "whole_values"]
