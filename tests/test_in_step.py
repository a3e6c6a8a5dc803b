"""A rank that is out of step (batch, step, program, values, a NaN of its own) is named on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import meshwright as mw
import pytest
import torch
from launch import run_ranks
from meshwright.runtime.faults import DivergedError
from meshwright.runtime.in_step import word
from meshwright.runtime.roll_call import odd
from torch import nn

X = torch.linspace(-1, 1, 36).view(6, 6).sin() + 2


class Logs(nn.Module):
    """Its output is NaN for rows below 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x.log())))


def net(seed: int = 0, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), act(), nn.Linear(5, 2))


def made(model: nn.Module, mesh: mw.Mesh, **options: Any) -> mw.Compiled:
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    return mw.compile(model, mesh, loss=lambda out: out.square().mean(), optimizer=sgd, **options)


def below_zero(rows: slice) -> torch.Tensor:
    x = X.clone()
    x[rows] = -1
    return x


# -- one rank of three does something else
def another_program(rank: int, mesh: mw.Mesh) -> None:
    made(net(act=nn.ReLU if rank == 1 else nn.Tanh), mesh).step(X)


def another_shape(rank: int, mesh: mw.Mesh) -> None:
    made(net(), mesh).step(X if rank else X[:3])


def other_options(rank: int, mesh: mw.Mesh) -> None:
    made(net(), mesh, collectives="ring" if rank == 2 else "torch").step(X)


def another_sync(rank: int, mesh: mw.Mesh) -> None:
    made(net(), mesh, sync=mw.Sync("k-async", 1 if rank == 1 else 2)).step(X)


def one_in_lock_step(rank: int, mesh: mw.Mesh) -> None:
    made(net(), mesh, sync="sync" if rank == 0 else "async").step(X)


def other_values(rank: int, mesh: mw.Mesh) -> None:
    made(net(seed=rank // 2), mesh, zero=3).step(X)


def another_batch(rank: int, mesh: mw.Mesh) -> None:
    made(net(), mesh).step(X + (rank == 1) * 1e-6)


def another_step(rank: int, mesh: mw.Mesh) -> None:
    compiled = made(net(), mesh)
    compiled.step(X)
    compiled.steps += rank == 2
    compiled(X)


def a_changed_copy(rank: int, mesh: mw.Mesh) -> None:
    compiled = made(net(), mesh, zero=0, check_every=2)
    compiled.step(X)
    if rank == 1:
        dict(compiled.named_parameters())["2.bias"].data[1] += 1e-7
    compiled.step(X)  # not looked at
    compiled.step(X)


def a_nan_in_the_batch(rank: int, mesh: mw.Mesh) -> None:
    compiled = made(net(), mesh, inputs="local", check_every=1)
    compiled.step(X[2 * rank : 2 * rank + 2])
    compiled.step(X[:2] * torch.nan if rank == 2 else X[:2])


def a_nan_that_it_makes(rank: int, mesh: mw.Mesh) -> None:
    made(Logs(), mesh, zero=0, check_every=1).step(below_zero(slice(2, 4)))


def different_calls(rank: int, mesh: mw.Mesh) -> None:
    compiled = made(net(), mesh, check_every=1)
    compiled.step(X)
    compiled.step(X) if rank else compiled.step(X[:3])


SAYS: list[tuple[Callable[[int, mw.Mesh], None], tuple[int, ...], str]] = [
    (another_program, (1,), "rank 1 captured another program than rank 0"),
    (another_shape, (0,), "rank 0 captured another program ([3, 6] beside [6, 6] of rank 1)"),
    (other_options, (2,), "rank 2 was given other options (collectives='ring' beside collectives='torch' of rank 0)"),
    (another_sync, (1,), "rank 1 was given other options (sync=Sync(name='k-async', k=1,"),
    (one_in_lock_step, (0,), "rank 0 was given other options (sync='sync' beside sync=Sync(name='async',"),
    (other_values, (2,), "rank 2 built the model with other values: 4 of its 4 tensors, such as 0.weight"),
    (another_batch, (1,), "rank 1 passed another batch in step 0: the tensors 0 of the call differ from"),
    (another_step, (2,), "not at the same step: rank 2 at 2, rank 0 at 1"),
    (a_changed_copy, (1,), "before step 2 rank 1 had other values than rank 0 in 1 parameters or buffers"),
    (a_nan_in_the_batch, (2,), "the first value that is not a number was that of rank 2, in its part of input 0"),
    (a_nan_that_it_makes, (1,), "the first value that is not a number was that of rank 1, in all_reduce(sum)"),
    (different_calls, (0,), "rank 0 is comparing programs and plans; rank 1 is comparing batch and step"),
]


def out_of_step(rank: int, world: int) -> list[tuple[str, tuple[int, ...]]]:
    found = []
    for act, _, _ in SAYS:
        try:
            act(rank, mw.Mesh(dp=world, device="cpu"))
            found.append(("no error", ()))
        except DivergedError as error:
            found.append((str(error), error.ranks))
    return found


@pytest.mark.gloo
def test_a_rank_out_of_step_is_named_on_all_ranks():
    for found in run_ranks(out_of_step, 3, timeout=200):
        for (text, ranks), (act, want, says) in zip(found, SAYS, strict=True):
            assert says in text and ranks == want, (act.__name__, text)


# -- in one process
@pytest.mark.parametrize("axes,options", [({"dp": 2, "tp": 2}, {}), ({"dp": 2, "pp": 2}, {"micro_batches": 2})])
def test_copies_are_compared_in_one_process_too(axes: dict[str, int], options: dict[str, Any]):
    compiled = made(net(), mw.Mesh(**axes, device="cpu"), zero=0, check_every=1, **options)  # type: ignore[arg-type]
    compiled.step(X)
    assert compiled._state is not None
    shards = [p for p in compiled._state.params["2.weight"] if p is not None]
    shards[-1].data[0, 0] += 1e-6
    said = "before step 1 rank [23] had other values than rank [01] in 1 param.*2.weight"  # by where stages are cut
    with pytest.raises(DivergedError, match=said):
        compiled.step(X)


def test_a_nan_of_all_ranks_is_no_fault_of_one(caplog: pytest.LogCaptureFixture):
    compiled = made(Logs(), mw.Mesh(dp=2, device="cpu"), check_every=1)
    with caplog.at_level(logging.WARNING, "meshwright"):
        assert compiled.step(below_zero(slice(1, 5))).isnan()
    assert "training diverges on all ranks" in caplog.text
    with pytest.raises(DivergedError, match="rank 0, in all_reduce.*test_in_step.py:"):
        made(Logs(), mw.Mesh(dp=2, device="cpu"), check_every=1).step(below_zero(slice(1, 2)))


class Masked(nn.Module):
    """A NaN that is taken out again."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sum(0)
        return self.f(torch.where(y.isnan(), 0, x))


def test_a_nan_that_reaches_nothing_is_none():
    x = X.clone()
    x[1, 3] = torch.nan
    made(Masked(), mw.Mesh(dp=2, device="cpu"), check_every=1).step(x)


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_changed_element_changes_the_word(dtype: torch.dtype):
    x = torch.arange(29).remainder(2).to(dtype)
    seen = {word(x)}
    for i in range(29):
        y = x.clone()
        y[i] = 1 if y[i] == 0 else 0
        seen.add(word(y))
    assert len(seen) == 30
    assert word(x) == word(x.clone()) != word(x.view(1, 29))
    assert word(torch.arange(8)) != word(torch.arange(8).flip(0))


def test_words_of_large_tensors_are_of_all_pieces():
    x = torch.zeros(300_001)
    words = {word(x)}
    for at in (0, 262_144, 300_000):
        y = x.clone()
        y[at] = 1
        words.add(word(y))
    assert len(words) == 4
    assert word(x, most=1 << 10) == word(x.clone(), most=1 << 10)


def test_who_is_odd():
    assert odd([1, 1, 2]) == (2,)
    assert odd([2, 1, 1, 3]) == (0, 3)
    assert odd([1, 2]) == (1,)
    assert odd([4, 4]) == ()
