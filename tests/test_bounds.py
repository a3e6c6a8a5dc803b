"""Memory and compile time stay bounded."""

from __future__ import annotations

import gc
import time
import tracemalloc

import meshwright as mw
import pytest
import torch
from small import CE, X, Y, adamw, mesh, mlp, tied
from torch import nn


def live() -> int:
    """Tensors that the collector knows; by `type`, as `isinstance` wakes torch's deprecated lazy objects."""
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["step", "autograd"])
def test_memory_stays_flat(form: str):
    compiled = mw.compile(mlp(), mesh({"dp": 2, "tp": 2}), loss=CE, optimizer=adamw)

    def run(times: int) -> None:
        for _ in range(times):
            if form == "step":
                compiled.step(X, target=Y)
            else:
                CE(compiled(X), Y).backward()
                assert compiled.optimizer is not None
                compiled.optimizer.step()
                compiled.optimizer.zero_grad()

    run(10)
    tensors = live()
    tracemalloc.start()
    run(100)  # what was made before the tracing is replaced by what is counted
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    run(200)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert abs(live() - tensors) <= 60
    assert grown < 50_000


@pytest.mark.slow
def test_a_forward_whose_backward_never_comes_is_freed():
    compiled = mw.compile(mlp(), mesh({"dp": 2}))
    compiled(X)
    before = live()
    for _ in range(50):
        compiled(X)
    assert live() <= before + 5


@pytest.mark.slow
def test_a_hundred_layers_compile_in_bounded_time():
    model, batch = tied(layers=100)
    begun = time.process_time()
    compiled = mw.compile(model, mesh({"dp": 2, "tp": 2}), kwargs=batch)
    assert time.process_time() - begun < 240
    assert "blocks.*.up.weight" in str(compiled.plan)
    with torch.no_grad():
        want = model(**batch)
    torch.testing.assert_close(compiled.step(**batch), want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_three_thousand_parameters_compile_in_bounded_time():
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(1500) for m in (nn.LayerNorm(4), nn.Tanh())))
    x = torch.randn(4, 4)
    begun = time.process_time()
    compiled = mw.compile(model, mesh({"dp": 2}), args=(x,), loss=torch.Tensor.sum)
    assert time.process_time() - begun < 240
    torch.testing.assert_close(compiled.step(x), model(x).sum().detach(), rtol=1e-3, atol=1e-4)
    assert len(compiled.gather("grads")) == 3000
