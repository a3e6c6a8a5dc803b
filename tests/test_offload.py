"""State in host memory: the same bits as without, what is copied, and what is left on the device."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
from small import CE, X, Y, adamw, mesh, mlp, sgd
from torch import nn


def groups(m: Any) -> torch.optim.Optimizer:
    named = list(m.named_parameters())
    decayed, rest = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": rest}])


def trained(offload: Any, axes: dict[str, int], make: Any = adamw, steps: int = 3, **options: Any) -> mw.Compiled:
    model = mlp()
    if options.pop("frozen", False):
        model[0].bias.requires_grad_(False)
    compiled = mw.compile(model, mesh(axes), loss=CE, optimizer=make, offload=offload, **options)
    rate = compiled.scheduler(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    for _ in range(steps):
        compiled.step(X, target=Y)
        rate.step()
    return compiled


def same_bits(one: mw.Compiled, other: mw.Compiled) -> None:
    for what in ("params", "grads", "buffers"):
        left, right = one.gather(what), other.gather(what)
        assert [n for n, x in left.items() if x is not None and not torch.equal(x, right[n])] == []


WAYS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"zero": 0}),
    ({"dp": 2}, {"zero": 1, "make": sgd(momentum=0.9)}),
    ({"dp": 2}, {"zero": 3, "make": groups, "clip_grad_norm": 0.1}),
    ({"tp": 2}, {"frozen": True}),
    ({"dp": 2}, {"zero": 1, "micro_batches": 2}),
    ({"pp": 2}, {"micro_batches": 4}),
]


def named(options: dict[str, Any]) -> str:
    """Of a test; the same in every process."""
    return " ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items())


@pytest.mark.parametrize("axes,options", WAYS, ids=named)
def test_the_bits_are_those_without_offload(axes: dict[str, int], options: dict[str, Any]):
    same_bits(trained("none", axes, **options), trained("full", axes, **options))


def test_a_step_copies_gradients_down_and_parameters_up_once():
    steps, world, kinds = 3, 2, 4
    report = trained("full", {"dp": 2}, zero=1, steps=steps).offload_report
    nbytes = sum(p.nbytes for p in mlp().parameters())
    assert report.steps == steps
    assert report.down == report.up == (steps * world * kinds, steps * nbytes)  # a ZeRO shard is on one rank alone
    counts = 4 * world * kinds  # Adam's count of steps, a parameter and rank
    assert report.host_nbytes == 4 * nbytes + counts
    assert report.device_nbytes == 2 * nbytes
    assert trained("none", {"dp": 2}, zero=1).offload_report.device_nbytes == 4 * nbytes + counts


def test_a_ratio_leaves_the_last_parameters_on_the_device():
    half = trained(mw.Offload("cpu", ratio=0.5), {"dp": 2}, zero=0)
    same_bits(trained("none", {"dp": 2}, zero=0), half)
    whole = trained("full", {"dp": 2}, zero=0).offload_report
    assert 0 < half.offload_report.host_nbytes < whole.host_nbytes


def written_by_others(offload: Any) -> mw.Compiled:
    """A state dict, and a write of the user's own, each between two steps."""
    compiled = trained(offload, {"dp": 2}, zero=1)
    compiled.load_state_dict(mlp().state_dict())
    compiled.step(X, target=Y)
    with torch.no_grad():
        for p in compiled.parameters():
            p.mul_(0.5)
    compiled.step(X, target=Y)
    return compiled


def test_what_others_write_is_stepped_from():
    same_bits(written_by_others("none"), written_by_others("full"))


def test_a_meta_model_with_offload():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    options: dict[str, Any] = {"loss": CE, "optimizer": adamw}
    compiled = mw.compile(model, mesh({"dp": 2}), args=(X,), kwargs={"target": Y}, offload="full", **options)
    compiled.load_state_dict(mlp().state_dict())
    plain = mw.compile(mlp(), mesh({"dp": 2}), **options)
    for each in (compiled, plain):
        each.step(X, target=Y)
    same_bits(compiled, plain)
