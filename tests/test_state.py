"""What rests: state dicts, parameters, gradients, optimizers over shards."""

from __future__ import annotations

import copy
import math
from typing import Any

import meshwright as mw
import pytest
import torch
from random_plans import Norms
from small import CE, X, Y, adamw, close, eager_steps, grads_of, mesh, mlp, on_every_mesh, params_of, sgd, tied
from torch import nn


@on_every_mesh
def test_the_state_dict_is_the_models_own(axes: dict[str, int]):
    model, batch = tied()
    compiled = mw.compile(model, mesh(axes), kwargs=batch)
    have = compiled.state_dict()
    assert list(have) == list(model.state_dict())
    close(have, model.state_dict())
    assert torch.equal(have["head.weight"], have["tokens.weight"])


@on_every_mesh
def test_state_moves_to_another_mesh(axes: dict[str, int]):
    model, batch = tied()
    one = mw.compile(model, mesh(axes), optimizer=adamw, zero=1)
    one.step(**batch)
    other = mw.compile(tied()[0], mesh({"tp": 3}), kwargs=batch)
    other.load_state_dict(one.state_dict())
    close(other.state_dict(), one.state_dict())
    torch.testing.assert_close(other.step(**batch), one.step(**batch), rtol=1e-4, atol=1e-5)


def test_a_loaded_tied_weight_may_come_under_either_name():
    model, batch = tied()
    compiled = mw.compile(model, mesh({"tp": 2}), kwargs=batch)
    values = compiled.state_dict()
    del values["head.weight"]
    values["tokens.weight"] = torch.ones(13, 12)
    compiled.load_state_dict(values)
    assert torch.equal(compiled.state_dict()["head.weight"], torch.ones(13, 12))


@on_every_mesh
def test_buffers_follow_the_batch(axes: dict[str, int]):
    torch.manual_seed(0)
    model, x, y = Norms(), torch.randn(6, 6), torch.randint(0, 5, (6,))
    twin = copy.deepcopy(model)
    compiled = mw.compile(model, mesh(axes))
    for _ in range(2):
        compiled.step(x=x, y=y)
        twin(x=x, y=y)
    close(compiled.gather("buffers"), dict(twin.named_buffers()))
    assert int(compiled.state_dict()["net.1.num_batches_tracked"]) == 2
    compiled.load_state_dict(model.state_dict())
    assert int(compiled.gather("buffers")["net.1.num_batches_tracked"]) == 0


def test_gathered_tensors_are_copies():
    compiled = mw.compile(mlp(), mesh({"dp": 2}), loss=CE, args=(X,), kwargs={"target": Y})
    for what in ("params", "grads", "buffers"):
        compiled.step(X, target=Y)
        for t in compiled.gather(what).values():
            t.fill_(7.0)
    assert not any((t == 7).all() for t in compiled.gather("params").values())
    assert not any((t == 7).all() for t in compiled.gather("grads").values() if t is not None)


def test_a_meta_model_is_filled_before_its_first_step():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    compiled = mw.compile(model, mesh({"tp": 2}), loss=CE, args=(X,), kwargs={"target": Y})
    compiled.load_state_dict(mlp().state_dict())
    torch.testing.assert_close(compiled.step(X, target=Y), CE(mlp()(X), Y).detach())


@on_every_mesh
def test_parameters_have_the_models_names_and_dims(axes: dict[str, int]):
    model, batch = tied()
    model.norm.bias.requires_grad_(False)
    compiled = mw.compile(model, mesh(axes), kwargs=batch, zero=3 if "dp" in axes else 0)
    own = dict(model.named_parameters())
    found: dict[str, int] = {}
    for name, p in compiled.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert (p.ndim, p.dtype, p.requires_grad) == (own[name].ndim, own[name].dtype, own[name].requires_grad)
        found[name] = found.get(name, 0) + 1
    assert found == dict.fromkeys(own, math.prod(axes.values()))
    assert len(list(compiled.parameters())) == sum(found.values())


def test_the_models_own_parameters_are_not_touched():
    model = mlp()
    before = params_of(model)
    mw.compile(model, mesh({"dp": 2}), loss=CE, optimizer=sgd()).step(X, target=Y)
    close(params_of(model), before)
    assert all(p.grad is None for p in model.parameters())


# -- optimizers
@on_every_mesh
def test_a_scheduler_changes_the_rate_of_every_rank(axes: dict[str, int]):
    def decay(o: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(o, 1, 0.5)

    compiled = mw.compile(mlp(), mesh(axes), loss=CE, optimizer=sgd(momentum=0.9))
    scheduler = compiled.scheduler(decay)
    for _ in range(3):
        compiled.step(X, target=Y)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.1 * 0.5**3]
    close(compiled.gather("params"), params_of(eager_steps(mlp(), sgd(momentum=0.9), 3, decay)))


@on_every_mesh
def test_weight_decay_groups_by_ndim(axes: dict[str, int]):
    def make(m: Any) -> torch.optim.Optimizer:
        named = list(m.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.5},
                {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
            ],
            lr=0.01, eps=1e-3,
        )  # fmt: skip

    compiled = mw.compile(mlp(), mesh(axes), loss=CE, optimizer=make)
    for _ in range(2):
        compiled.step(X, target=Y)
    close(compiled.gather("params"), params_of(eager_steps(mlp(), make, 2)))
    assert compiled.optimizer is not None
    assert [g["weight_decay"] for g in compiled.optimizer.param_groups] == [0.5, 0.0] * len(compiled.comm.ranks)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@on_every_mesh
def test_clipping_is_by_the_true_global_norm(axes: dict[str, int], p: float):
    zero = 1 if "dp" in axes else 0
    compiled = mw.compile(mlp(), mesh(axes), loss=CE, zero=zero)
    compiled.step(X, target=Y)
    model = mlp()
    CE(model(X), Y).backward()
    want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, p)
    torch.testing.assert_close(mw.clip_grad_norm_(compiled, 0.1, p), want)
    close(compiled.gather("grads"), grads_of(model))
    inside = mw.compile(mlp(), mesh(axes), loss=CE, zero=zero, clip_grad_norm=(0.1, p))
    inside.step(X, target=Y)
    torch.testing.assert_close(inside.grad_norm, want)
    close(inside.gather("grads"), grads_of(model))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_every_zero_stage_is_the_same_training(axes: dict[str, int]):
    found = []
    for zero in (0, 1, 2, 3):
        compiled = mw.compile(mlp(), mesh(axes), loss=CE, optimizer=sgd(momentum=0.9), zero=zero)
        losses = [float(compiled.step(X, target=Y)) for _ in range(2)]
        assert compiled.plan.zero == zero
        split = any(a.startswith("dp") for rest in compiled.plan.resting.values() for a in rest.split_axes)
        assert split == (zero > 0)
        found.append({"losses": torch.tensor(losses)} | compiled.gather("params"))
    for other in found[1:]:
        close(other, found[0])
    close({k: v for k, v in found[0].items() if k != "losses"}, params_of(eager_steps(mlp(), sgd(momentum=0.9), 2)))


@on_every_mesh
def test_backward_calls_add_up(axes: dict[str, int]):
    compiled = mw.compile(mlp(), mesh(axes), optimizer=sgd())
    model = mlp()
    for part in (slice(0, 2), slice(2, 4)):
        (CE(compiled(X[part]), Y[part]) / 2).backward()
    CE(model(X), Y).backward()
    close(compiled.gather("grads"), grads_of(model))
    assert compiled.optimizer is not None
    compiled.optimizer.step()
    compiled.optimizer.zero_grad()
    assert set(compiled.gather("grads").values()) == {None}
