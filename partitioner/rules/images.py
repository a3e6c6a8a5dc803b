"""Adaptive pooling, resizing, padding and sampling: batch and channels free, space whole."""

from __future__ import annotations

import math
from typing import Any

import torch

from .dims import additive, bound, names, rebound, whole_rule
from .lead import guarded, lead_rule, own_whole
from .notation import Local, Rule
from .split import Call
from .table import RuleOf, Table, on
from .upsample import nearest

aten = torch.ops.aten
TABLE: Table = {}


def _ops(*texts: str) -> list[Any]:
    """The overloads that this build of torch has; `name` alone is its default one."""
    found = []
    for text in texts:
        packet, _, overload = text.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None:
            found.append(op)
    return found


def _over(space: int, *linear: set[int]) -> RuleOf:
    """Rules of ops on the last `space` dims; a size that names the leading ones is made local."""

    def made(call: Call) -> Rule:
        rule = lead_rule(call, space, *linear)
        if not any(a.name == "input_size" for a in call.target._schema.arguments):
            return rule
        return guarded(rule.but(localize=lambda local: rebound(local, input_size=list(local.out_shape()))), call)

    return made


for _n in (1, 2, 3):
    on(TABLE, *_ops(f"adaptive_max_pool{_n}d"))(_over(_n))
    on(TABLE, *_ops(f"adaptive_max_pool{_n}d_backward"))(_over(_n, {0}))
    on(TABLE, *_ops(f"_adaptive_avg_pool{_n}d", f"adaptive_avg_pool{_n}d"))(_over(_n, {0}))
    on(TABLE, *_ops(f"_adaptive_avg_pool{_n}d_backward"))(_over(_n, {0}))
    on(TABLE, *_ops(f"reflection_pad{_n}d", f"replication_pad{_n}d"))(_over(_n, {0}))
    on(TABLE, *_ops(f"reflection_pad{_n}d_backward", f"replication_pad{_n}d_backward"))(_over(_n, {0}))
    on(TABLE, *_ops(f"max_unpool{_n}d"))(_over(_n, {0}))
    for _kind in ("nearest", "_nearest_exact"):
        _name = f"upsample_{_kind}{_n}d" if _kind == "nearest" else f"_upsample_nearest_exact{_n}d"
        on(TABLE, *_ops(_name, f"{_name}.vec", f"{_name}_backward"))(nearest(_n, _over(_n, {0})))
for _name, _n in (("linear1d", 1), ("bilinear2d", 2), ("bicubic2d", 2), ("trilinear3d", 3)):
    on(TABLE, *_ops(f"upsample_{_name}", f"upsample_{_name}.vec", f"upsample_{_name}_backward"))(_over(_n, {0}))
for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    on(TABLE, *_ops(_name, f"{_name}.vec", f"{_name}_backward"))(_over(2, {0}))


on(TABLE, aten.avg_pool1d.default)(_over(1, {0}))


@on(TABLE, aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: Call) -> Rule:
    """`a (c r!) h w -> a c (h p!) (w q!)`, r = p q, and back."""
    out = call.target is aten.pixel_shuffle.default
    x, r = call.operands[0], call.args[1]
    lead = names(x.shape)[: x.dim() - 3]
    packed = (*lead, ("c", "p", "q"), ("h",), ("w",))
    spread = (*lead, ("c",), ("h", "p"), ("w", "q"))
    sides = (packed, spread) if out else (spread, packed)
    small = x if out else call.output
    sizes = {"p": r, "q": r, "h": small.shape[-2], "w": small.shape[-1]}
    rule = Rule((sides[0],), (sides[1],), whole=frozenset({"p", "q"}), linear=additive(call, {0}), sizes=sizes)
    return guarded(rule, call)


@on(TABLE, aten.native_channel_shuffle.default, aten.channel_shuffle.default)
def channel_shuffle(call: Call) -> Rule:
    """`n (g c) s -> n (c g) s`."""
    x, groups = call.operands[0], call.args[1]
    space = names(x.shape, "s")[2:]
    sizes = {"g": groups, "c": x.shape[1] // groups}

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local, groups=local.size("g") if groups > 1 else 1)

    rule = Rule(
        ((("n",), ("g", "c"), *space),),
        ((("n",), ("c", "g"), *space),),
        linear=additive(call, {0}),
        sizes=sizes,
        localize=localize,
    )
    return guarded(rule, call)


@on(TABLE, aten.im2col.default, aten.col2im.default)
def columns(call: Call) -> Rule:
    """`n c h! w! -> n (c k!) l!`, and back."""
    x = call.operands[0]
    if x.dim() != (4 if call.target is aten.im2col.default else 3):
        return whole_rule(call, note="im2col without a batch dim")
    image, columns_ = (x, call.output) if x.dim() == 4 else (call.output, x)
    k = math.prod(bound(call)["kernel_size"])
    space, whole = own_whole(image.shape[2:], "s")
    last, more = own_whole(columns_.shape[2:], "l")
    sides = [(("n",), ("c",), *space), (("n",), ("c", "k"), *last)]
    if x.dim() == 3:
        sides.reverse()
    rule = Rule((sides[0],), (sides[1],), whole=whole | more | {"k"}, linear=additive(call, {0}), sizes={"k": k})
    return guarded(rule, call)


def _grid(call: Call) -> tuple[Any, Any, Any, frozenset[str]]:
    """Dims of the image, the grid and the samples."""
    a = bound(call)
    image, grid = a["input"], a["grid"]
    space, whole = own_whole(image.shape[2:], "s")
    at = names(grid.shape, "p")[1:-1]
    return (("n",), ("c",), *space), (("n",), *at, ("xy",)), (("n",), ("c",), *at), whole | {"xy"}


@on(TABLE, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: Call) -> Rule:
    """`n c h! w!, n p q xy! -> n c p q`."""
    image, grid, out, whole = _grid(call)
    return guarded(Rule((image, grid), (out,), whole=whole, linear=additive(call, {0})), call)


@on(TABLE, aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: Call) -> Rule:
    """`n c p q, n c h! w!, n p q xy! -> n c h! w! {p q}, n p q xy! {c}`."""
    image, grid, out, whole = _grid(call)
    outs = tuple(d if isinstance(o, torch.Tensor) else None for d, o in zip((image, grid), call.outputs, strict=True))
    points = {f: "sum" for d in grid[1:-1] for f in d}
    rule = Rule((out, image, grid), outs, (points, {"c": "sum"}), whole=whole, linear=additive(call, {0}))
    return guarded(rule, call)
