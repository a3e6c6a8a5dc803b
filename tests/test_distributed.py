"""The same programs over gloo processes and in one process: equal results, equal counts, errors instead of hangs."""

from __future__ import annotations

import functools
import os
import time

import pytest
import torch
import torch.distributed as dist
from launch import run_outcomes, run_ranks
from meshwright.partitioner.collective import Step
from meshwright.partitioner.layout import Factor, Layout, take_local
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.transfer import sent_bytes, transfer_of
from meshwright.runtime.comm import Expect, Pause, Post, Start, Wait
from meshwright.runtime.distributed import DistributedComm
from meshwright.runtime.faults import MeshwrightError, PeerError, RankError
from meshwright.runtime.inprocess import InProcessComm

pytestmark = pytest.mark.timeout(300)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.bool, torch.complex64)
BIG = 40000
"""Elements of tensors that are beyond the sizes which gloo sends as small."""


TOGETHER = {
    2: ["run_kinds", "run_consume", "run_pause", "run_wrong_mesh"],
    4: ["run_kinds", "run_orders", "run_unprepared"],
}
"""Functions that one launch of so many processes runs one after the other."""


def run_together(rank, world):
    return {name: globals()[name](rank, world) for name in TOGETHER[world]}


@pytest.fixture(scope="module")
def ran():
    """(name of a function, world) -> what it returned on each rank."""
    launched = functools.cache(lambda world: run_ranks(run_together, world))
    return lambda name, world: [out[name] for out in launched(world)]


def mesh_of(world):
    return Mesh(p=2, device="cpu") if world == 2 else Mesh(p=2, q=2, device="cpu")


def kinds(mesh, rows, columns):
    """Every kind, along dim 0 and dim 1, over each axis and over both in either order."""
    whole = Layout(((Factor(rows),), (Factor(columns),)))
    for axes in dict.fromkeys([("p",), mesh.names, tuple(reversed(mesh.names)), mesh.names[-1:]]):
        part = whole
        for a in axes:
            part = part.with_partial(a, "sum")
        yield Step("all_reduce", axes, part, whole)
        yield Step("all_reduce", axes, part, whole, op="max")
        for spot, other in (((0, 0), (1, 0)), ((1, 0), (0, 0))):
            split = whole.with_axes(spot, axes)
            yield Step("all_gather", axes, split, whole, source=spot)
            yield Step("reduce_scatter", axes, part, split, target=spot)
            yield Step("reduce_scatter", axes, part, split, target=spot, op="min")
            yield Step("all_to_all", axes, split, whole.with_axes(other, axes), source=spot, target=other)
    if len(mesh.names) == 2:
        before = whole.with_axes((0, 0), ("p",)).with_axes((1, 0), ("q",))
        yield Step("permute", ("p", "q"), before, whole.with_axes((0, 0), ("q",)).with_axes((1, 0), ("p",)))
        yield Step("permute", ("p", "q"), whole.with_axes((0, 0), ("p", "q")), whole.with_axes((0, 0), ("q", "p")))


def local_value(step, mesh, rank, dtype):
    shape = step.before.shape
    generator = torch.Generator().manual_seed(rank if step.before.partial else 99)
    value = torch.randint(-9, 9, shape, generator=generator).to(torch.float64) / 2
    return take_local(value.to(dtype), step.before, mesh, rank).clone()


def program(mesh, rank, buckets):
    """Starts everything before it waits for anything, in buckets of (step, dtype)."""
    handles = []
    for bucket in buckets:
        transfers = tuple(transfer_of(step, mesh, rank) for step, _ in bucket)
        tensors = tuple(local_value(step, mesh, rank, dtype) for step, dtype in bucket)
        handles.append((yield Start(transfers, tensors, where=str(bucket[0][0]))))
    out = []
    for handle in handles:
        out.append((yield Wait(handle)))
    return out


def buckets_for(mesh):
    buckets = []
    for rows, columns in SIZES:
        for step in kinds(mesh, rows, columns):
            dtypes = [d for d in DTYPES if not (d.is_complex and step.op != "sum")]
            buckets += [[(step, d)] for d in (dtypes if rows < 100 else dtypes[:2])]
            buckets.append([(step, d) for d in (torch.float32, torch.int64, torch.float32, torch.bool)])
    return buckets


SIZES = [(4, 8), (5, 3), (1, 1), (BIG // 8, 8), (BIG // 8 + 1, 7)]


def run_kinds(rank, world):
    mesh = mesh_of(world)
    comm = DistributedComm(mesh)
    (out,) = comm.run([program(mesh, rank, buckets_for(mesh))])
    return out, comm.counted


@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_equals_the_one_process_comm(world, ran):
    mesh = mesh_of(world)
    comm = InProcessComm(mesh)
    buckets = buckets_for(mesh)
    want = comm.run([program(mesh, r, buckets) for r in range(world)])
    for rank, (got, counted) in enumerate(ran("run_kinds", world)):
        for bucket, mine, theirs in zip(buckets, got, want[rank], strict=True):
            for (step, dtype), a, b in zip(bucket, mine, theirs, strict=True):
                assert a.dtype == b.dtype == dtype and a.is_contiguous()
                torch.testing.assert_close(a, b, msg=f"rank {rank}, {step}, {dtype}:\n{a}\n{b}")
        assert counted == comm.sent[rank]
        assert counted == expected_counts(mesh, rank, buckets)


def expected_counts(mesh, rank, buckets):
    counts = {}
    for bucket in buckets:
        axes, kind = bucket[0][0].axes, bucket[0][0].kind
        group = mesh.group(axes, rank)
        calls, total = counts.get(kind, (0, 0))
        for step, dtype in bucket:
            total += sent_bytes(transfer_of(step, mesh, rank), group.index(rank), len(group), dtype.itemsize)
        counts[kind] = (calls + 1, total)
    return counts


def run_consume(rank, world):
    mesh = Mesh(p=world, device="cpu")
    step = Step("all_reduce", ("p",), *_partial_and_whole(BIG))
    transfer, comm = transfer_of(step, mesh, rank), DistributedComm(mesh)

    def one(x, consume):
        (total,) = yield Wait((yield Start((transfer,), (x,), consume=consume)))
        return total

    kept, given = torch.ones(BIG), torch.ones(BIG)
    (first,), (second,) = comm.run([one(kept, False)]), comm.run([one(given, True)])
    return kept.sum().item(), first.sum().item(), second.data_ptr() == given.data_ptr(), second.sum().item()


def _partial_and_whole(size):
    whole = Layout(((Factor(size),),))
    return whole.with_partial("p", "sum"), whole


def test_an_input_is_overwritten_only_when_it_may_be(ran):
    assert ran("run_consume", 2) == [(BIG, 2 * BIG, True, 2 * BIG)] * 2


def _sum_over(mesh, axis, rank):
    whole = Layout(((Factor(4),),))
    return transfer_of(Step("all_reduce", (axis,), whole.with_partial(axis, "sum"), whole), mesh, rank)


def run_pause(rank, world):
    mesh = Mesh(p=world, device="cpu")
    comm = DistributedComm(mesh)

    def one():
        handle = yield Start((_sum_over(mesh, "p", rank),), (torch.ones(4),))
        grad = yield Pause("forward")
        (total,) = yield Wait(handle)
        return total[0].item() * grad

    running = [one()]
    return comm.run_until_pause(running), comm.resume(running, [3.0])


def test_programs_pause_and_resume(ran):
    assert ran("run_pause", 2) == [(["forward"], [6.0])] * 2


def run_fault(rank, world, how):
    mesh = Mesh(p=world, device="cpu")
    comm = DistributedComm(mesh, timeout=3 if how == "stall" else 30)

    def one():
        handle = yield Start((_sum_over(mesh, "p", rank),), (torch.ones(4),), where="model.py:5")
        yield Wait(handle)
        if rank == 1 and how == "raise":
            raise ArithmeticError("bad")
        if rank == 1 and how == "kill":
            os._exit(9)
        if rank == 1 and how == "stall":
            time.sleep(8)
        handle = yield Start((_sum_over(mesh, "p", rank),), (torch.ones(4),), where="model.py:6")
        yield Wait(handle)

    begin = time.monotonic()
    try:
        comm.run([one()])
    except MeshwrightError as error:
        took = time.monotonic() - begin
        time.sleep(15 if rank == 1 and how == "raise" else 0)  # the others must not wait for this process to end
        return type(error).__name__, str(error), took
    return None


@pytest.mark.parametrize("how", ["raise", "kill", "stall"])
def test_a_fault_of_one_rank_is_an_error_on_the_other_that_names_the_line(how):
    zero, one = run_outcomes(run_fault, 2, how)
    name, text, took = zero.value
    assert name == "PeerError" and took < 25
    assert "rank 0: all_reduce(sum) over p of float32[4] at model.py:6 failed" in text
    if how == "raise":
        assert one.value[:2] == ("RankError", "rank 1: ArithmeticError: bad")
    if how == "kill":
        assert one.exit_code == 9


def run_no_message(rank, world, how):
    """Rank 1 waits for a message that rank 0 never sends, or sends otherwise than is expected."""
    comm = DistributedComm(Mesh(p=world, device="cpu"), timeout=3)

    def sends():
        yield Post(1, (torch.arange(3.0),), where="model.py:7")
        if how == "never":
            time.sleep(8)
        return None

    def waits():
        (x,) = yield Wait((yield Expect(0, (((3,), torch.float32),), where="model.py:7")))
        if how == "never":
            yield Wait((yield Expect(0, (((3,), torch.float32),), where="model.py:8")))
        return x.tolist()

    begin = time.monotonic()
    try:
        return comm.run([waits() if rank else sends()])
    except MeshwrightError as error:
        return type(error).__name__, str(error), time.monotonic() - begin


def test_messages_arrive_and_one_that_does_not_ends_in_time():
    assert run_outcomes(run_no_message, 2, "once")[1].value == [[0.0, 1.0, 2.0]]
    name, text, took = run_outcomes(run_no_message, 2, "never")[1].value
    assert name == "PeerError" and took < 25
    assert "rank 1: receive of float32[3] from rank 0 at model.py:8 failed" in text


def run_wrong_mesh(rank, world):
    with pytest.raises(ValueError, match="mesh p=3 has 3 ranks, but 2 processes run.*nproc-per-node 3"):
        DistributedComm(Mesh(p=world + 1, device="cpu"))
    return True


def test_a_mesh_that_is_not_the_world_says_how_to_launch(ran):
    assert all(ran("run_wrong_mesh", 2))


def run_orders(rank, world):
    """Ranks start collectives of different groups in different orders."""
    mesh = Mesh(p=2, q=2, device="cpu")
    comm = DistributedComm(mesh)

    def one():
        axes = ("p", "q") if rank in (0, 3) else ("q", "p")
        handles = []
        for axis in axes:
            handles.append((axis, (yield Start((_sum_over(mesh, axis, rank),), (torch.full((4,), rank + 1.0),)))))
        out = {}
        for axis, handle in handles:
            out[axis] = (yield Wait(handle))[0][0].item()
        return out["p"], out["q"]

    return comm.run([one()])[0]


def test_groups_may_be_started_in_different_orders(ran):
    assert ran("run_orders", 4) == [(4.0, 3.0), (6.0, 3.0), (4.0, 7.0), (6.0, 7.0)]


def run_joined_by_torchrun_environment(rank, world):
    comm = DistributedComm(Mesh(p=world, device="cpu"), timeout=60)
    joined = comm.rank, dist.get_backend()
    dist.destroy_process_group()
    comm.close()  # as at the end of a script that has destroyed the process groups
    return joined


def test_a_launched_process_joins_by_itself_and_ends_by_itself():
    assert run_ranks(run_joined_by_torchrun_environment, 2, join=False) == [(0, "gloo"), (1, "gloo")]


def run_unprepared(rank, world):
    mesh = Mesh(a=2, b=2, device="cpu")
    comm = DistributedComm(mesh)
    comm.close()

    def one():
        yield Start((_sum_over(mesh, "a", rank),), (torch.ones(4),))

    with pytest.raises(MeshwrightError, match="call prepare"):
        comm.run([one()])
    return True


def test_a_group_that_was_not_prepared_is_named(ran):
    assert all(ran("run_unprepared", 4))


def test_error_types_are_of_one_family():
    assert issubclass(PeerError, MeshwrightError) and issubclass(RankError, MeshwrightError)
