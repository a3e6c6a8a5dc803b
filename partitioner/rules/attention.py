"""Attention: `b (g r) s d!, b g t! d!, b g t! e! -> b (g r) s e!, b (g r) s`.

Batch, heads (k and v by group g, the queries of a group by r) and the queries' sequence are free. With a causal mask a
rank must hold one range of the sequence, whose start moves `q_start`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import attention as _registers_the_ops  # noqa: F401
from ...kernels import merge as _registers_the_merge  # noqa: F401
from .dims import additive, bound, names, rebound, unit
from .lead import guarded, own_whole
from .notation import Dims, Local, Rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
mw = torch.ops.meshwright
TABLE: Table = {}

_Q: Dims = (("b",), ("g", "r"), ("s",), ("d",))
_K: Dims = (("b",), ("g",), ("t",), ("d",))
_V: Dims = (("b",), ("g",), ("t",), ("e",))
_OUT: Dims = (("b",), ("g", "r"), ("s",), ("e",))
_SCORES: Dims = (("b",), ("g", "r"), ("s",), ("t",))


def _mask(mask: torch.Tensor | None) -> tuple[Dims, ...]:
    if mask is None:
        return ()
    tail = _SCORES[4 - mask.dim() :]
    return (tuple(() if unit(n) else d for n, d in zip(mask.shape, tail, strict=True)),)


def _heads(a: dict[str, Any]) -> dict[str, int]:
    groups = a["k"].shape[1]
    return {"g": groups, "r": a["q"].shape[1] // max(1, groups)}


def _local_start(local: Local) -> tuple[Any, tuple, dict]:
    args = list(local.args)
    place = [x.name for x in local.target._schema.arguments].index("q_start")
    start = args[place] if place < len(args) else local.kwargs["q_start"]
    return rebound(local, q_start=start + local.start("s"))


def _flops(a: dict[str, Any]) -> float:
    b, h, s, d = a["q"].shape
    t, e = a["v"].shape[2:]
    whole = 2.0 * b * h * s * t * (d + e)
    return whole / 2 if a["causal"] else whole


@on(TABLE, mw.attention.default)
def attention(call: Call) -> Rule:
    a = bound(call)
    return Rule(
        (_Q, _K, _V, *_mask(a["mask"])),
        (_OUT, _OUT[:3]),
        whole=frozenset("tde"),
        ordered=frozenset("s") if a["causal"] else frozenset(),
        localize=_local_start if a["causal"] else None,
        sizes=_heads(a),
        flops=_flops(a),
    )


@on(TABLE, mw.attention_backward.default)
def attention_backward(call: Call) -> Rule:
    """dk, dv `{s r}`; dmask over the dims that the mask lacks."""
    a = bound(call)
    mask = _mask(a["mask"])
    if a["mask_grad"] and mask:
        dmask, own = mask[0], frozenset()
        lacking = {f: "sum" for dim, m in zip(_SCORES, dmask, strict=True) if not m for f in dim}
    else:
        dmask, own = own_whole(call.outputs[3].shape, "z")
        lacking = {}
    shared = {"s": "sum", "r": "sum"}
    return Rule(
        (_OUT, _Q, _K, _V, _OUT, _OUT[:3], *mask),
        (_Q, _K, _V, dmask),
        ({}, shared, shared, lacking),
        whole=frozenset("tde") | own,
        ordered=frozenset("s") if a["causal"] else frozenset(),
        linear=additive(call, {0}),
        localize=_local_start if a["causal"] else None,
        sizes=_heads(a),
        flops=2.5 * _flops(a),
    )


@on(TABLE, mw.merge_attention.default, mw.merge_attention_backward.default)
def merge(call: Call) -> Rule:
    """`a d!, a, a d!, a -> a d!, a`; backward's results are as its operands, and it is linear in the gradients."""
    forward = call.target is mw.merge_attention.default
    spare = 0 if forward else 1 if bound(call)["grad_lse"] is None else 2
    lead = names(call.operands[spare + 1].shape)
    last, whole = own_whole(call.operands[0].shape[-1:], "e")
    pair: tuple[Dims, ...] = (lead + last, lead)
    grads = () if forward else pair[:spare]
    linear = () if forward else additive(call, set(range(spare)))
    rule = Rule((*grads, *pair, *pair), pair if forward else (*pair, *pair), whole=whole, linear=linear)
    return guarded(rule, call)


@on(TABLE, aten._scaled_dot_product_flash_attention_for_cpu.default)
def fused_for_cpu(call: Call) -> Rule:
    """As above; its causal rule starts at 0, so a causal call keeps the sequence whole."""
    a = bound(call)
    heads = _heads({"q": a["query"], "k": a["key"]})
    whole = frozenset("tdes" if a["is_causal"] else "tde")
    return guarded(Rule((_Q, _K, _V, *_mask(a["attn_mask"])), (_OUT, _OUT[:3]), whole=whole, sizes=heads), call)


@on(TABLE, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def fused_for_cpu_backward(call: Call) -> Rule:
    a = bound(call)
    shared = {"s": "sum", "r": "sum"}
    return guarded(
        Rule(
            (_OUT, _Q, _K, _V, _OUT, _OUT[:3], *_mask(a["attn_mask"])),
            (_Q, _K, _V),
            ({}, shared, shared),
            whole=frozenset("tdes" if a["is_causal"] else "tde"),
            linear=additive(call, {0}),
            sizes=_heads({"q": a["query"], "k": a["key"]}),
        ),
        call,
    )
