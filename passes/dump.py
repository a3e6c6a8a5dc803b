"""A mesh-wide graph as text: the form that dumps and golden tests share.

    %3 addmm_1: f32[8, 64] [8:dp, 64:tp] = aten.addmm.default(%bias, %x, %w)    # layers.0.up  train.py:12
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.fx as fx

from ..partitioner.graph import is_tensor
from .draft import Draft

_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64"}


def text(draft: Draft, lines: bool = True) -> str:
    """The graph of a draft; `lines=False` leaves source lines out (they differ between machines)."""
    return "\n".join(_line(draft, n, lines) for n in draft.graph.fx.nodes) + "\n"


def _line(draft: Draft, node: fx.Node, lines: bool) -> str:
    if node.op == "output":
        return f"return {_arg(node.args[0])}"
    left = node.name
    if is_tensor(node):
        val = node.meta["val"]
        dtype = _SHORT.get(val.dtype, str(val.dtype).removeprefix("torch."))
        shape = [int(n) if isinstance(n, int) else str(n) for n in val.shape]
        left += f": {dtype}{shape} {draft.layouts.get(node, '')}"
    if node.op in ("placeholder", "get_attr"):
        return f"{left} = {node.op}"
    name = getattr(node.target, "__name__", str(node.target)) if callable(node.target) else str(node.target)
    name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else name
    args = ", ".join([_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items() if k != "where"])
    comment = "  # " + node.meta["module"] if node.meta.get("module") else ""
    if lines and node.meta.get("where"):
        comment += f"  {os.path.basename(node.meta['where'].split(' in ')[0])}"
    return f"{left} = {name}({args}){comment}"


def _arg(x: Any) -> str:
    if isinstance(x, fx.Node):
        return f"%{x.name}"
    if isinstance(x, (tuple, list)):
        return "(" + ", ".join(map(_arg, x)) + ")"
    return str(x)
