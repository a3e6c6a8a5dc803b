"""Faults that users of other kernels reported, as far as they are of all our ops (docs/kernels.md has the table)."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshwright.kernels import attention, cross_entropy, linear_cross_entropy, rms_norm, rope, tri
from meshwright.kernels import merge as _registers_the_ops  # noqa: F401
from meshwright.runtime.distributed import own_cache
from rulecheck import check_call

mw = torch.ops.meshwright
TARGET = torch.tensor([1, -100, 3, 0])


def t(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def ops() -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Each op that has a gradient: a call of it, and its leaves."""
    torch.manual_seed(0)
    cos, sin = torch.randn(2, 4, 8)
    return {
        "rms_norm": (lambda x, w: rms_norm.functional(x, [8], w), [t(4, 8), t(8)]),
        "add_rms_norm": (lambda x, r, w: mw.add_rms_norm(x, r, [8], w, 1e-5)[0], [t(4, 8), t(4, 8), t(8)]),
        "add_layer_norm": (lambda x, r, w: mw.add_layer_norm(x, r, [8], w, None, 1e-5)[0], [t(4, 8), t(4, 8), t(8)]),
        "gated": (lambda g, u: mw.gated(g, u, "silu"), [t(4, 8), t(4, 8)]),
        "rope": (lambda x: mw.rope(x, cos, sin), [t(2, 4, 8)]),
        "merge": (lambda a, la, b, lb: mw.merge_attention(a, la, b, lb)[0], [t(4, 8), t(4), t(4, 8), t(4)]),
        "nll": (lambda z: cross_entropy.cross_entropy(z, TARGET), [t(4, 8)]),
        "linear_nll": (lambda x, w: linear_cross_entropy.linear_cross_entropy(x, w, TARGET), [t(4, 8), t(6, 8)]),
        "attention": (lambda q, k: attention.sdpa(q, k, k), [t(1, 2, 4, 8), t(1, 2, 4, 8)]),
    }


@pytest.mark.parametrize("name", ops())
def test_backward_leaves_what_it_reads(name):
    """Twice backward through one graph, another reader of each leaf, an expanded gradient: equal gradients, operands as
    they were."""
    call, leaves = ops()[name]
    before = [x.detach().clone() for x in leaves]
    out = call(*leaves)
    other = sum((x * x).sum() for x in leaves)
    first = torch.autograd.grad(out.sum() + other, leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum() + other, leaves, retain_graph=True)
    dense = torch.autograd.grad(out, leaves, torch.ones_like(out).contiguous())
    for x, was, a, b, d in zip(leaves, before, first, second, dense, strict=True):
        assert (x == was).all() and (a == b).all()
        torch.testing.assert_close(a, d + 2 * was, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ops())
def test_torch_compile_keeps_one_graph(name):
    call, leaves = ops()[name]
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves), call(*leaves))


def test_no_kernel_does_what_broke_those_of_others():
    """Autotuning runs a kernel many times and stalls ranks at different moments, block pointers are gone in triton 3.9,
    two products into one accumulator miscompile."""
    for file in Path(rope.__file__).parent.glob("*.py"):
        found = re.findall(r"autotune\(|make_block_ptr|tl\.dot\(|make_tensor_descriptor", file.read_text())
        assert found == [], (file.name, found)


def test_merge_rule_and_far_differences():
    a, la, b, lb = (x.detach() for x in ops()["merge"][1])
    g, gl = torch.randn(4, 8), torch.randn(4)
    assert check_call(mw.merge_attention.default, (a, la, b, lb))
    for more in (gl, None):
        assert check_call(mw.merge_attention_backward.default, (g, more, a, la, b, lb))
    la[:3], lb[:3] = torch.tensor([1e4, -torch.inf, -torch.inf]), torch.tensor([-1e4, 0.0, -torch.inf])
    out, lse = mw.merge_attention(a, la, b, lb)
    assert (out[0] == a[0]).all() and (out[1] == b[1]).all() and (out[2] == 0).all()
    assert lse.tolist()[:3] == [1e4, 0.0, -torch.inf]
    wide = [x.double().requires_grad_() for x in (a, la, b, lb)]
    wide[1].data[:3], wide[3].data[:3] = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([-1.0, 0.0, -4.0])
    assert torch.autograd.gradcheck(mw.merge_attention, wide)


def test_merging_parts_is_attention():
    """Of keys in three parts, merged in any order."""
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    parts = [mw.attention(q, k[:, :, i : i + 3], v[:, :, i : i + 3], None, False, 0.3, 0) for i in (0, 3, 6)]
    want = mw.attention(q, k, v, None, False, 0.3, 0)
    for order in ((0, 1, 2), (2, 0, 1)):
        first, second, third = (parts[i] for i in order)
        got = mw.merge_attention(*mw.merge_attention(*first, *second), *third)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_each_rank_has_a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    for rank in (0, 3):
        monkeypatch.setenv("TRITON_CACHE_DIR", "")
        monkeypatch.delenv("TRITON_CACHE_DIR")
        own_cache(rank)
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / ".triton" / "cache" / f"rank{rank}")
        if tri.HAVE:
            assert importlib.import_module("triton.knobs").cache.dir == os.environ["TRITON_CACHE_DIR"]
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    own_cache(1)
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
