"""Which part of a stage a call is: F (forward), B (gradients that other stages wait for), or W (all other gradients).

    B    a backward call on the way to a value of another stage
    W    a backward call that no other stage waits for: gradients of weights, and all backward of the first stage

What is free (see `stages.py`) runs with the first part of its stage that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch.fx as fx

from .graph import is_getitem

Part = dict[tuple[fx.Node, int], str]
"""By (node, stage): "F", "B" or "W"."""


def parts(
    nodes: Sequence[fx.Node],
    of: Mapping[str, int],
    stages: Callable[[fx.Node], Collection[int]],
    together: Callable[[fx.Node, fx.Node], bool],
) -> Part:
    """The part of each node on each stage that makes it.

    Args:
        nodes: what runs for every micro-batch, in program order.
        of: by name its stage; what is free is not in it.
        stages: the stages that make a node.
        together: whether a reader runs in the same loop over micro-batches as what it reads.
    """
    out: Part = {}
    for node in reversed(nodes):
        near = [u for u in node.users if together(node, u)]
        for stage in stages(node):
            out[node, stage] = _part(node, stage, near, of, stages, out)
    for node in nodes:  # what a call gives is of its call's part
        if is_getitem(node):
            for stage in stages(node):
                out[node, stage] = out[node.args[0], stage]  # type: ignore[index]
    return out


def _part(
    node: fx.Node,
    stage: int,
    near: Sequence[fx.Node],
    of: Mapping[str, int],
    stages: Callable[[fx.Node], Collection[int]],
    known: Part,
) -> str:
    here = [known[u, stage] for u in near if stage in stages(u)]
    if node.name not in of:
        return min(here, key="FBW".index, default="F")
    if not node.meta.get("backward"):
        return "F"
    sent = any(stage not in stages(u) for u in near)
    return "B" if sent or "B" in here else "W"
