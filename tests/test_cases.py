"""Every case on each of its meshes: equal to one device, or the error it may stop with."""

import pytest
from cases import ALL
from cases.harness import forward, on_one_device, outcome, programs, run_fresh
from cases.registry import Axes, Case, Expect, registry

SLOW = {"six-hundred-layers"}


def marks(case: Case, axes: Axes) -> list:
    """Cases that start processes run on their first mesh when tests are to be quick."""
    processes = (case.ask.fault or {}).get("kind") == "kill"
    slow = case.id in SLOW or (processes and axes != case.meshes[0])
    return [pytest.mark.slow] * slow + [pytest.mark.gloo] * processes


def meshes() -> list:
    """One test for each case and mesh."""
    return [
        pytest.param(c, axes, id=f"{c.id}-{label(axes)}", marks=marks(c, axes)) for c in ALL for axes in c.meshes
    ]


def label(axes: Axes) -> str:
    return "x".join(f"{a}{n}" for a, n in axes.items())


@pytest.mark.parametrize("case,axes", meshes())
def test_on_a_mesh(case: Case, axes: Axes):
    result = outcome(case, axes)
    assert result in ("match", "error as expected"), result


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.id)
def test_on_one_device(case: Case):
    runs = {program.__name__: run_fresh(program, on_one_device, case) for program in programs(case)}
    complaints = case.ask.check(runs[forward.__name__]) if case.ask.check else []
    assert not complaints
    trained = [g for g in runs[forward.__name__].grads.values() if g is not None]
    assert all(g.to_dense().isfinite().all() for g in trained)
    assert trained or not runs[forward.__name__].params


def test_an_unknown_ask_is_refused():
    _, case = registry()
    with pytest.raises(TypeError, match="sharpen"):
        case("id", "kind", "owner/name#1", "what people saw", [], sharpen=3)(lambda: None)


def test_expect_reads_words():
    expect = Expect.of("match|error: batch 1 cannot be split over dp=2")
    assert expect.match
    assert expect.missing_words("Batch 1 does not split over dp=2.") == []
    assert expect.missing_words("no") == ["batch", "1", "split", "dp=2"]
