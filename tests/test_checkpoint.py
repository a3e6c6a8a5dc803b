"""Checkpoints: saved on one mesh, loaded on another, training goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from safetensors.torch import load_file, save_file
from small import mesh
from torch import nn

X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 3, 1, 2])


class Odd(nn.Module):
    """Uneven sizes, a tied weight, a 0-d and a frozen parameter, a buffer that steps change, dropout."""

    def __init__(self, drop: float = 0.25):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 6)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.mid.weight
        self.heat, self.drop = nn.Parameter(torch.tensor(0.7)), drop
        self.mid.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h = F.dropout(torch.tanh(self.up(x)), self.drop, self.training)
        return self.down(self.again(F.gelu(self.mid(h)))) / self.heat


def adamw(m: Any) -> torch.optim.Optimizer:
    named = list(m.named_parameters())
    big, small = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim < 2]
    return torch.optim.AdamW([{"params": big, "weight_decay": 0.3}, {"params": small, "betas": (0.8, 0.99)}], lr=0.01)


def momentum(m: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)


class Training:
    """A compiled model with its scheduler."""

    def __init__(self, axes: dict[str, int], make: Any = adamw, model: nn.Module | None = None, **options: Any):
        given: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": make} | options
        self.compiled = mw.compile(model or Odd(), mesh(axes), **given)
        self.rate = self.compiled.scheduler(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3], 0.5))

    def go(self, steps: int) -> Training:
        for _ in range(steps):
            self.compiled.step(X, target=Y)
            self.rate.step()
        return self

    def all(self) -> dict[str, torch.Tensor]:
        c = self.compiled
        rate = {"rate": torch.tensor(self.rate.get_last_lr())} if self.rate.each else {}
        return c.gather("params") | {f"buffer {n}": b for n, b in c.gather("buffers").items()} | rate


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], exact: bool = True) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        close = torch.equal(got[name], x) if exact else torch.allclose(got[name], x, rtol=1e-4, atol=1e-5)
        assert close, name


ZERO3, PIPE = {"zero": 3}, {"micro_batches": 2}
PAIRS: list[tuple[dict[str, int], dict[str, Any], dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, ZERO3, {"dp": 2}, ZERO3),
    ({"dp": 4}, {"zero": 1}, {"tp": 2, "pp": 2}, PIPE),
    ({"dp": 2}, ZERO3, {"dp": 1}, {}),
    ({"dp": 1}, {}, {"dp": 3}, ZERO3),
    ({"tp": 2}, {}, {"dp": 2, "tp": 2}, {"zero": 1}),
    ({"pp": 2}, PIPE, {"pp": 2}, PIPE),
    ({"pp": 2}, PIPE, {"tp": 3}, {}),
    ({"dp": 2}, {"zero": 1, "offload": "full"}, {"dp": 2}, {"zero": 1}),
    ({"dp": 2, "tp": 2}, {"zero": 3, "make": momentum}, {"pp": 2}, PIPE | {"make": momentum}),
    ({"dp_replicate": 2, "dp_shard": 2}, {"zero": 3}, {"tp": 2}, {"offload": "full"}),
]


def named(options: dict[str, Any]) -> str:
    """Of a test; the same in every process."""
    return " ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()) or "plain"


@pytest.mark.parametrize("axes,options,other,others", PAIRS, ids=named)
def test_training_goes_on(tmp_path: Path, axes: Any, options: Any, other: Any, others: Any):
    one = Training(axes, **options).go(2)
    one.compiled.save(tmp_path, data={"batch": 2})
    now = one.all()
    new = Training(other, **others)
    found = new.compiled.load(tmp_path)  # before the first step
    assert (found.step, found.data) == (2, {"batch": 2})
    same({n: x for n, x in new.all().items() if n != "rate"}, {n: x for n, x in now.items() if n != "rate"})
    new.go(1)
    one.go(1)
    same(new.all(), one.all(), exact=axes == other)
    same(new.go(1).all(), one.go(1).all(), exact=axes == other)
    assert new.compiled.steps == one.compiled.steps == 4


def test_going_back(tmp_path: Path):
    """Into a model that has gone on: also what is not saved yet, such as the state of parameters, goes back."""
    one = Training({"dp": 2}, zero=1).go(1)
    one.compiled.save(tmp_path)
    want = one.go(2).all()
    one.compiled.load(tmp_path)
    same(one.go(2).all(), want)


def test_before_the_first_step(tmp_path: Path):
    one = Training({"dp": 2})
    one.compiled.save(tmp_path)
    new = Training({"dp": 2}, model=nn.Linear(6, 4))
    with pytest.raises(mw.CheckpointError, match="does not fit: it lacks params/bias.*the model has no buffers/seen"):
        new.compiled.load(tmp_path)
    new = Training({"tp": 2})
    with torch.no_grad():
        new.compiled.model.up.weight.zero_()  # type: ignore[union-attr]
    assert new.compiled.load(tmp_path).step == 0
    same(new.go(2).all(), one.go(2).all(), exact=False)
    with pytest.raises(mw.CheckpointError, match="saved before the first step"):
        one.compiled.load(tmp_path)
    one.compiled.load(tmp_path, model_only=True)
    same(one.compiled.gather("params"), dict(Odd().named_parameters()))


def test_each_piece_is_written_once(tmp_path: Path):
    one = Training({"dp": 2, "tp": 2}, zero=3).go(1)
    folder = one.compiled.save(tmp_path).path
    whole = sum(p.nbytes for p in Odd().parameters()) + sum(2 * p.nbytes for p in Odd().parameters() if p.requires_grad)
    sizes = [p.stat().st_size for p in sorted(folder.glob("*.safetensors"))]
    assert len(sizes) == 4
    assert whole < sum(sizes) < whole + 4 * 5000  # headers
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name]


def test_keep_and_the_order_of_saves(tmp_path: Path):
    one = Training({"dp": 2}).go(1)
    folders = [one.compiled.save(tmp_path, keep=2).path.name for _ in range(3)]
    assert folders == ["step-1.save-1", "step-1.save-2", "step-1.save-3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == folders[1:]
    (tmp_path / ".saving-step-1.save-9").mkdir()  # what a killed save leaves
    assert one.compiled.save(tmp_path).path.name == "step-1.save-10"
    assert not list(tmp_path.glob(".saving*"))
    assert one.compiled.load(tmp_path / folders[1]).path.name == folders[1]


def test_a_save_beside_training_is_of_its_own_step(tmp_path: Path):
    one = Training({"dp": 2}, zero=1).go(1)
    want = one.all()
    saving = one.compiled.save(tmp_path, wait=False)
    one.go(1)
    assert saving.wait().name == "step-1.save-1"
    assert saving.done
    second = one.compiled.save(tmp_path, wait=False)  # over the memory of the first
    assert second.images == saving.images
    second.wait()
    one.compiled.load(saving.path)
    same(one.all(), want)
    assert one.compiled.save(tmp_path).images == []


def test_a_failed_save_beside_training_is_told_at_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = Training({"dp": 2}).go(1)
    good = one.compiled.save(tmp_path).path

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("meshwright.runtime.file_image.Image.write", full)
        one.compiled.save(tmp_path, wait=False)
        with pytest.raises(mw.CheckpointError, match=r"rank-00000.safetensors cannot be written.*No space left"):
            one.compiled.save(tmp_path)
    assert one.compiled.load(tmp_path).path == good
    one.compiled.save(tmp_path)


def test_a_state_dict_goes_through_one_file(tmp_path: Path):
    one, new = Training({"dp": 2}, zero=3).go(1).compiled, Training({"tp": 2}).go(1).compiled
    save_file({n: x.clone() for n, x in one.state_dict().items()}, tmp_path / "whole.safetensors")
    new.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    same(new.state_dict(), one.state_dict())


@pytest.mark.slow
def test_to_and_from_folders_of_transformers(tmp_path: Path):
    """Under its own names; of the tied embedding and head its files hold one."""
    import transformers

    config = transformers.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    first, model = transformers.GPT2LMHeadModel(config), transformers.GPT2LMHeadModel(config)
    first.save_pretrained(tmp_path / "first")
    batch: dict[str, Any] = dict.fromkeys(("input_ids", "labels"), torch.arange(32).view(4, 8) % 17)
    compiled = mw.compile(model, mesh({"dp": 2}), kwargs=batch, optimizer=momentum, zero=3)
    compiled.load_state_dict(load_file(tmp_path / "first" / "model.safetensors"))
    same(compiled.state_dict(), first.state_dict())
    compiled.step(**batch)
    model.save_pretrained(tmp_path / "trained", state_dict=compiled.state_dict())
    same(dict(type(model).from_pretrained(tmp_path / "trained").state_dict()), compiled.state_dict())


# -- processes
def half(rank: int, world: int, folder: str) -> Any:
    one = Training({"dp": 2}, zero=3).go(2)
    one.compiled.save(folder, data=[rank], wait=False).wait()
    one.go(1)
    return one.all()


def other_half(rank: int, world: int, folder: str) -> Any:
    new = Training({"pp": 2}, micro_batches=2)
    new.compiled.load(folder)
    return new.go(1).all()


def test_two_processes_write_and_one_reads(tmp_path: Path):
    found = run_ranks("test_checkpoint:half", 2, str(tmp_path), timeout=200)
    new = Training({"dp": 2}, zero=3)
    assert new.compiled.load(tmp_path).data == [0]
    new.go(1)
    for got in found:
        same(got, new.all())
    for got in run_ranks("test_checkpoint:other_half", 2, str(tmp_path), timeout=200):
        same(got, new.all(), exact=False)


# -- killed while it saves
def _saves_for_ever(one: Training, folder: Path) -> None:
    while True:
        one.compiled.steps += 1
        with torch.no_grad():
            for p in one.compiled.parameters():
                p.fill_(one.compiled.steps)
        one.compiled.save(folder, keep=2, wait=one.compiled.steps % 2 == 0)


def _killed(folder: Path, kills: int) -> None:
    """Kill a process at random moments of its saves; the last finished one is whole each time."""
    one = Training({"dp": 2}, zero=1).go(1)
    one.compiled.save(folder)
    draw, last, saved = random.Random(0), 1, 1
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                _saves_for_ever(one, folder)
            finally:
                os._exit(1)
        before = time.monotonic()
        while not any(int(p.name.rpartition("-")[2]) > saved for p in folder.glob("step-*")):
            time.sleep(0.01)
            assert time.monotonic() - before < 60
        time.sleep(0.1 * draw.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = one.compiled.load(folder)
        assert found.step >= last
        if found.step > 1:
            assert all((p == found.step).all() for p in one.compiled.parameters())
        last, saved = found.step, int(found.path.name.rpartition("-")[2])
    assert last > 1


def test_killed_while_it_saves(tmp_path: Path):
    _killed(tmp_path, 8)


@pytest.mark.slow
def test_killed_often_while_it_saves(tmp_path: Path):
    _killed(tmp_path, 50)


def test_a_loss_scale_goes_on_where_it_was(tmp_path: Path):
    scale = mw.LossScale(initial_scale_power=5, loss_scale_window=2)
    low = mw.Precision("fp16", loss_scale=scale)
    one = Training({"dp": 2}, precision=low).go(3)
    one.compiled.save(tmp_path)
    other = Training({"tp": 2}, precision=low)
    other.compiled.load(tmp_path)
    other.go(1)
    one.go(1)
    assert other.compiled.scaler and one.compiled.scaler
    assert other.compiled.scaler.state_dict() == one.compiled.scaler.state_dict()
    assert other.compiled.loss_scale == 2.0**7  # doubled twice; a fresh scale would be at 2 to the 5
