"""The laws of a program in the making, checked after every pass.

    lint                  the fx graph is well formed
    layouts-agree         every operand has the layout its call needs; what leaves the program is whole or at rest
    backward-reads-kept   backward reads no value of forward, and no copy of one in another layout, that it makes again
    reload-has-offload    what backward reads of an offloaded value was copied down in forward and up in backward, once
    primitives-chain      every primitive starts from the layout its operand has
    one-wait              every started collective is waited for exactly once
    backward-after-pause  no forward node follows the pause
    overwritten-is-dead   what is written over is not read afterwards (`overwrite.py`)
    peak-within-budget    no rank holds more than `memory=`, by the memory model (`check_peak`)
    local-shapes          a rank's local tensors have the shapes and dtypes their layouts give (on fake tensors)

A violation is a defect of the compiler: the error names law, pass, node, neighbours and the user's source line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map

from ..kernels.offload import OFFLOAD, RELOAD, reloaded
from ..partitioner.errors import LawError
from ..partitioner.graph import is_tensor, tensor_operands, where
from ..partitioner.layout import Layout, local_shape
from ..partitioner.plan import Plan
from ..partitioner.program import primitive, reshard
from ..partitioner.transfer import pause, start, wait
from .draft import Draft, resharded


def check(draft: Draft, after: str) -> None:
    """Check every law established so far."""
    try:
        draft.graph.fx.lint()
    except RuntimeError as fault:
        why = str(fault).partition("\n")[0]
        raise LawError(f"law lint broken after pass {after}: {why}") from fault
    for law in draft.established:
        if law in _LAWS:
            _LAWS[law](draft, after)


def broken(law: str, after: str, node: fx.Node, why: str) -> LawError:
    around = [n.format_node() for n in (node.prev, node, node.next) if n.op != "root"]
    head = f"law {law} broken after pass {after} at {node.name} ({where(node)}): {why}"
    return LawError("\n  ".join([head, *map(str, around)]))


def _layouts_agree(draft: Draft, after: str) -> None:
    needs: dict[tuple[int, int], Layout] = {}  # calls that are split alike share their split
    for node, split in draft.splits.items():
        for k, operand in enumerate(tensor_operands(node)):
            need, have = needs.get((id(split), k)), draft.layouts[operand]
            if need is None:
                need = needs[id(split), k] = split.input_layout(k)
            if need is not have and need != have:
                raise broken("layouts-agree", after, node, f"operand {operand.name} is {have}, needed is {need}")
    for value, role in zip(draft.graph.output_values, draft.graph.outputs, strict=True):
        if value is None or not is_tensor(value):
            continue
        have = draft.layouts[value]
        need = draft.plan.resting[str(role.name)] if role.kind == "grad" else have.unsplit()
        if have != need:
            raise broken("layouts-agree", after, value, f"{role} leaves as {have}, should be {need}")


def _backward_reads_kept(draft: Draft, after: str) -> None:
    plan = draft.plan
    for node in draft.graph.fx.nodes if plan.recompute or plan.again else ():
        if node.op != "call_function" or not node.meta.get("backward"):
            continue
        for x in node.all_input_nodes:
            if x.op != "call_function" or x.meta.get("backward"):
                continue
            if x.name in plan.recompute:
                raise broken("backward-reads-kept", after, node, f"it reads {x.name}, which is not kept")
            if x.target in (reshard, primitive) and (value := resharded(x)).name in plan.again:
                raise broken("backward-reads-kept", after, node, f"it reads {x.name}, forward's copy of {value.name}")


def _reload_has_offload(draft: Draft, after: str) -> None:
    graph, law = draft.graph.fx, "reload-has-offload"
    for node in graph.nodes:
        if node.target is OFFLOAD and not (len(node.users) == 1 and all(u.target is RELOAD for u in node.users)):
            raise broken(law, after, node, f"it is reloaded {len(node.users)} times")
        if node.target is RELOAD:
            whence, users = node.args[0], list(node.users)
            if not isinstance(whence, fx.Node) or whence.target is not OFFLOAD or whence.meta.get("backward"):
                raise broken(law, after, node, "it reloads what forward has not offloaded")
            if len(users) != 1 or users[0].target is not reloaded:
                raise broken(law, after, node, "it is read without waiting for it")
        if node.name in draft.plan.offload:
            late = [u for u in node.users if u.meta.get("backward")]
            if late:
                raise broken(law, after, late[0], f"it reads {node.name}, which is on the host")


def _primitives_chain(draft: Draft, after: str) -> None:
    for node in draft.graph.fx.nodes:
        pairs = []
        if node.target is primitive:
            pairs = [(node.args[0], node.args[1])]
        elif node.target is start:
            pairs = list(zip(node.args[1:], node.args[0], strict=True))
        for value, step in pairs:
            if draft.layouts[value] != step.before:
                why = f"{value.name} is {draft.layouts[value]}, step from {step.before}"
                raise broken("primitives-chain", after, node, why)


def _one_wait(draft: Draft, after: str) -> None:
    for node in draft.graph.fx.nodes:
        if node.target is start:
            waits = [u for u in node.users if u.target is wait]
            if len(waits) != 1 or len(node.users) != 1:
                raise broken("one-wait", after, node, f"{len(waits)} waits")
        if node.target is primitive and node.args[1].kind not in ("slice", "zero"):
            raise broken("one-wait", after, node, "a collective that is neither started nor waited for")


def _backward_after_pause(draft: Draft, after: str) -> None:
    held = False
    for node in draft.graph.fx.nodes:
        held = held or node.target is pause
        if held and node.op == "call_function" and not node.meta.get("backward"):
            raise broken("backward-after-pause", after, node, "a forward node after the pause")


_LAWS: dict[str, Callable[[Draft, str], None]] = {
    "layouts-agree": _layouts_agree,
    "backward-reads-kept": _backward_reads_kept,
    "reload-has-offload": _reload_has_offload,
    "primitives-chain": _primitives_chain,
    "one-wait": _one_wait,
    "backward-after-pause": _backward_after_pause,
}


def check_local_shapes(draft: Draft, graph: fx.Graph, rank: int) -> None:
    """Run one rank's graph on fake tensors; every value must have the local shape and dtype of its layout."""
    mode = next((n.meta["val"].fake_mode for n in draft.graph.fx.nodes if is_tensor(n)), None)
    if mode is None:
        return
    wide = {n.name: n for n in draft.graph.fx.nodes}
    env: dict[fx.Node, Any] = {}
    known: dict[Any, Any] = {}
    with mode, torch.no_grad():
        for node in graph.nodes:
            of = wide.get(node.meta.get("of", node.name))
            env[node] = _fake_run(draft, node, of, env, rank, known)
            layout = draft.layouts.get(of) if of is not None else None
            if layout is not None and isinstance(env[node], torch.Tensor):
                _same_shape(draft, of, env[node], local_shape(layout, draft.mesh, rank), rank)


def check_peak(plan: Plan) -> None:
    """The peak of a plan made for `memory=` is within it."""
    assert plan.facts is not None
    peak, room = plan.facts.peak, plan.facts.asked["memory"]
    if peak is None or peak.nbytes > room:
        raise LawError(f"law peak-within-budget broken: a rank holds at most {peak}, memory={room} was asked for")


def _same_shape(draft: Draft, node: Any, value: torch.Tensor, want: tuple[int, ...], rank: int) -> None:
    if any(not isinstance(n, int) for n in value.shape) or any(n < 0 for n in want):
        return
    if tuple(value.shape) != want or value.dtype != node.meta["val"].dtype:
        got = f"{tuple(value.shape)} {value.dtype}"
        why = f"on rank {rank} it is {got}, by {draft.layouts[node]} it is {want}"
        raise broken("local-shapes", "localize", node, why)


def _fake_run(
    draft: Draft, node: fx.Node, of: Any, env: dict[fx.Node, Any], rank: int, known: dict[Any, Any]
) -> Any:
    """A node's value on fake tensors; `known` holds the results of equal calls, of which layers have many."""
    if node.op in ("placeholder", "get_attr"):
        val = of.meta["val"]
        if not isinstance(val, torch.Tensor) or any(not isinstance(n, int) for n in val.shape):
            return val
        return val.new_empty(local_shape(draft.layouts[of], draft.mesh, rank))
    args = tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, node.args)
    if node.op == "output" or node.target is pause:
        return [draft_like(draft, v, rank) for v in _tangents(draft)] if node.target is pause else None
    if node.target is start:
        return [t.new_empty(x.out_shape) for t, x in zip(args[1:], args[0], strict=True)]
    if node.target is wait:
        return args[0]
    if node.target is operator.getitem:
        return args[0][args[1]]
    kwargs = tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, dict(node.kwargs))
    key = (node.target, _key(args), _key(kwargs))
    if key not in known:
        known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[key]


def _key(x: Any) -> Any:
    """What the shape of a result depends on."""
    if isinstance(x, torch.Tensor):
        return (tuple(map(str, x.shape)), tuple(map(str, x.stride())), x.dtype)
    if isinstance(x, (list, tuple)):
        return tuple(map(_key, x))
    if isinstance(x, dict):
        return tuple((k, _key(v)) for k, v in x.items())
    return (type(x), str(x))


def _tangents(draft: Draft) -> list[fx.Node]:
    roles = zip(draft.graph.placeholders, draft.graph.inputs, strict=True)
    return [n for n, r in roles if r.kind == "tangent"]


def draft_like(draft: Draft, node: fx.Node, rank: int) -> torch.Tensor:
    """A fake tensor of a node's local shape."""
    return node.meta["val"].new_empty(local_shape(draft.layouts[node], draft.mesh, rank))
