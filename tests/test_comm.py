"""Reshards, run step by step through the in-process comm, give what the target layout says, whatever mesh and layouts;
and their prices behave like distances."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.collective import LOCAL_KINDS, Step, path, path_seconds, seconds, wire_bytes
from meshwright.partitioner.layout import Factor, Layout, assemble, local_shape, take_local
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.transfer import (
    is_first,
    local_slice,
    sent_bytes,
    slice_args,
    transfer_of,
    zero_unless_first,
)
from meshwright.partitioner.transitions import transitions
from meshwright.runtime.comm import Expect, Pause, Post, Start, Wait
from meshwright.runtime.faults import DeadlockError, MeshwrightError, MismatchError, RankError
from meshwright.runtime.inprocess import InProcessComm

RUNS = settings(max_examples=150, deadline=None)


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: torch.Size(s).numel() <= 8))
    return Mesh(device="cpu", **dict(zip("pqr", sizes, strict=False)))


@st.composite
def shapes(draw):
    """Per dim its factors' sizes: uneven, small, composite."""
    factor = st.integers(1, 9)
    return draw(st.lists(st.lists(factor, min_size=1, max_size=2), min_size=1, max_size=3))


@st.composite
def layouts(draw, mesh, shape, partial_ops=("sum",)):
    spots = [(i, j) for i, d in enumerate(shape) for j in range(len(d))]
    axes: dict[tuple[int, int], tuple[str, ...]] = {}
    partial = []
    for axis in draw(st.permutations(mesh.names)):
        role = draw(st.sampled_from(["whole", "split", "split", "partial"]))
        if role == "split":
            spot = draw(st.sampled_from(spots))
            axes[spot] = (*axes.get(spot, ()), axis)
        elif role == "partial" and partial_ops:
            partial.append((axis, draw(st.sampled_from(partial_ops))))
    dims = tuple(tuple(Factor(n, axes.get((i, j), ())) for j, n in enumerate(d)) for i, d in enumerate(shape))
    return Layout(dims, tuple(sorted(partial)))


@st.composite
def cases(draw, count=2):
    mesh, shape = draw(meshes()), draw(shapes())
    op = draw(st.sampled_from(["sum", "sum", "max", "min"]))
    first = draw(layouts(mesh, shape, (op,)))
    rest = [draw(layouts(mesh, shape, ("sum",) if op == "sum" else ())) for _ in range(count - 1)]
    return mesh, [first, *rest]


def spread(value, layout, mesh, seed=0):
    """Of each rank its local tensor: shares that reduce to `value` over the partial axes."""
    generator = torch.Generator().manual_seed(seed)
    held: dict[tuple[int, ...], torch.Tensor] = {}
    ops = [op for _, op in layout.partial]
    axes = [a for a, _ in layout.partial]
    places = list(itertools.product(*(range(mesh.sizes[a]) for a in axes)))
    left = value.clone()
    for place in places[:-1]:
        noise = torch.randint(-8, 9, value.shape, generator=generator).to(value.dtype)
        held[place] = noise if "sum" in ops else value - noise.abs() if "max" in ops else value + noise.abs()
        left = left - noise
    held[places[-1]] = left if "sum" in ops else value
    return [
        take_local(held[tuple(mesh.coord(r)[a] for a in axes)], layout, mesh, r).clone() for r in range(mesh.world_size)
    ]


def program(local, steps, mesh, rank):
    x = local
    for step in steps:
        if step.kind == "slice":
            x = local_slice(x, *slice_args(step, mesh, rank))
        elif step.kind == "zero":
            x = zero_unless_first(x, is_first(step, mesh, rank))
        else:
            handle = yield Start((transfer_of(step, mesh, rank),), (x,), where=str(step))
            (x,) = yield Wait(handle)
    return x


def value_of(layout):
    return torch.arange(torch.Size(layout.shape).numel(), dtype=torch.float64).reshape(layout.shape)


@RUNS
@given(cases())
def test_every_path_gives_the_target_layout(case):
    mesh, (before, after) = case
    value = value_of(before)
    steps = path(before, after, mesh, 8)
    comm = InProcessComm(mesh)
    locals_ = spread(value, before, mesh)
    out = comm.run([program(x, steps, mesh, r) for r, x in enumerate(locals_)])
    for rank, x in enumerate(out):
        assert tuple(x.shape) == local_shape(after, mesh, rank)
        assert x.is_contiguous()
        if not after.partial:
            torch.testing.assert_close(x, take_local(value, after, mesh, rank))
    torch.testing.assert_close(assemble(out, after, mesh), value)


@RUNS
@given(cases())
def test_inputs_are_not_changed_and_results_share_no_memory(case):
    mesh, (before, after) = case
    steps = [s for s in path(before, after, mesh, 8) if s.kind not in LOCAL_KINDS][:1]
    if not steps:
        return
    locals_ = spread(value_of(before), steps[0].before, mesh)
    copies = [x.clone() for x in locals_]
    out = InProcessComm(mesh).run([program(x, steps, mesh, r) for r, x in enumerate(locals_)])
    assert all(torch.equal(x, c) for x, c in zip(locals_, copies, strict=True))
    storages = [x.untyped_storage().data_ptr() for x in [*out, *locals_] if x.numel()]
    assert len(set(storages)) == len(storages)


@RUNS
@given(cases())
def test_sent_bytes_are_at_most_what_the_price_says(case):
    mesh, (before, after) = case
    for step in path(before, after, mesh, 8):
        if step.kind in LOCAL_KINDS:
            continue
        k = mesh.group_size(step.axes)
        for rank in range(mesh.world_size):
            index = mesh.group(step.axes, rank).index(rank)
            assert sent_bytes(transfer_of(step, mesh, rank), index, k, 8) <= wire_bytes(step, mesh, 8) + 1e-6


def _used(layout):
    """The axes and factors that a layout uses."""
    return layout.split_axes | layout.partial_axes | {layout.spot_of(a) for a in layout.split_axes}


@RUNS
@given(cases(count=3))
def test_prices_obey_the_triangle_inequality(case):
    mesh, (a, b, c) = case
    if {op for _, op in a.partial} - {"sum"} or not _used(b) <= _used(a) | _used(c):
        return
    direct = path_seconds(a, c, mesh, 4)
    assert direct <= path_seconds(a, b, mesh, 4) + path_seconds(b, c, mesh, 4) + 1e-7


@RUNS
@given(cases(), st.sampled_from(["cpu", "h100"]))
def test_the_table_of_transitions_holds_the_shortest_paths(case, device):
    mesh, (a, b) = case
    mesh = Mesh(device=device, **mesh.sizes)
    lengths = tuple(f.size for d in a.dims for f in d)
    table = transitions(mesh.axes, ("max", "sum"), lengths[:3], 4.0, mesh)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(table.shape.states)))
    for leaves, enters, w in zip(table.shape.leaves, table.shape.enters, table.weights, strict=True):
        w = min(w, graph.get_edge_data(leaves, enters, {"weight": np.inf})["weight"])
        graph.add_edge(leaves, int(enters), weight=w)
    start = len(table.shape.states) // 2
    want = nx.single_source_dijkstra_path_length(graph, start)
    row = table.rows([start])[0]
    assert all(row[i] == pytest.approx(want.get(i, np.inf), abs=1e-12) for i in range(len(row)))
    assert path_seconds(a, b, mesh, 4) <= sum(seconds(s, mesh, 4) for s in path.__wrapped__(a, b, mesh, 4)) + 1e-12


@RUNS
@given(cases(), st.integers(1, 8))
def test_prices_grow_with_bytes(case, times):
    mesh, (a, b) = case
    assert path_seconds(a, b, mesh, 4) <= path_seconds(a, b, mesh, 4 * times) + 1e-12
    assert path_seconds(a, a, mesh, 4) == 0


@pytest.mark.parametrize("k", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_an_all_gather_costs_at_most_an_all_reduce(k, size):
    mesh = Mesh(p=k, device="h100")
    whole = Layout(((Factor(size),),))
    split, part = whole.with_axes((0, 0), ("p",)), whole.with_partial("p", "sum")
    gather = Step("all_gather", ("p",), split, whole, source=(0, 0))
    if size % k == 0:
        assert seconds(gather, mesh, 4) <= seconds(Step("all_reduce", ("p",), part, whole), mesh, 4)


def test_a_merged_gather_joins_pieces_in_the_order_of_its_axes():
    mesh = Mesh(p=2, q=3, device="cpu")
    before = Layout(((Factor(11, ("q", "p")),),))
    after = Layout(((Factor(11),),))
    step = Step("all_gather", ("q", "p"), before, after, source=(0, 0))
    value = value_of(before)
    out = InProcessComm(mesh).run([program(x, [step], mesh, r) for r, x in enumerate(spread(value, before, mesh))])
    assert all(torch.equal(x, value) for x in out)


def _mesh2():
    return Mesh(p=2, device="cpu")


def _transfer(kind, size=4, mesh=None, rank=0):
    mesh = mesh or _mesh2()
    whole = Layout(((Factor(size),),))
    split, part = whole.with_axes((0, 0), ("p",)), whole.with_partial("p", "sum")
    step = {
        "all_gather": Step("all_gather", ("p",), split, whole, source=(0, 0)),
        "all_reduce": Step("all_reduce", ("p",), part, whole),
        "reduce_scatter": Step("reduce_scatter", ("p",), part, split, target=(0, 0)),
    }[kind]
    return transfer_of(step, mesh, rank)


def test_a_bucket_gives_each_result_and_counts_one_call():
    def bucket(rank):
        xs = (torch.full((4,), float(rank)), torch.full((6,), 10.0 * rank))
        handle = yield Start((_transfer("all_reduce", 4), _transfer("all_reduce", 6)), xs)
        return (yield Wait(handle))

    comm = InProcessComm(_mesh2())
    for a, b in comm.run([bucket(0), bucket(1)]):
        assert a.tolist() == [1.0] * 4 and b.tolist() == [10.0] * 6
    assert comm.counted == {"all_reduce": (1, 40)}


def test_starts_go_on_at_once_and_waits_may_come_in_any_order():
    log = []

    def one(rank):
        first = yield Start((_transfer("all_reduce"),), (torch.ones(4),))
        second = yield Start((_transfer("all_reduce"),), (torch.full((4,), 2.0),))
        log.append(rank)
        (b,) = yield Wait(second)
        (a,) = yield Wait(first)
        return a[0].item(), b[0].item()

    assert InProcessComm(_mesh2()).run([one(0), one(1)]) == [(2.0, 4.0)] * 2
    assert log == [0, 1]


def test_a_deadlock_names_what_every_rank_waits_for():
    def waits(axis_kind, where):
        handle = yield Start((_transfer(axis_kind),), (torch.ones(4),), where=where)
        yield Wait(handle)

    def ends():
        return 7
        yield

    with pytest.raises(DeadlockError) as caught:
        InProcessComm(_mesh2()).run([waits("all_reduce", "model.py:3"), ends()])
    text = str(caught.value)
    assert "rank 0 waits for all_reduce(sum) over p of float32[4] at model.py:3" in text
    assert "not started by ranks 1" in text and "rank 1 has ended" in text


def test_messages_between_two_ranks():
    mesh = _mesh2()

    def sends():
        x = torch.ones(2)
        yield Post(1, (x, x + 1))
        yield Post(1, (x + 2,))

    def receives():
        first = yield Expect(0, (((2,), torch.float32),) * 2)
        second = yield Expect(0, (((2,), torch.float32),))
        (c,), (a, b) = (yield Wait(second)), (yield Wait(first))
        return [a.tolist(), b.tolist(), c.tolist()]

    comm = InProcessComm(mesh)
    assert comm.run([sends(), receives()])[1] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert comm.sent[0]["send"] == (2, 24) and not comm.sent[1]


def test_a_message_that_nobody_sends_is_a_deadlock():
    def waits():
        yield Wait((yield Expect(0, (((2,), torch.float32),), where="model.py:4")))

    def ends():
        return None
        yield

    with pytest.raises(DeadlockError) as caught:
        InProcessComm(_mesh2()).run([ends(), waits()])
    assert "rank 1 waits for receive of float32[2] from rank 0 at model.py:4" in str(caught.value)
    assert "not started by ranks 0" in str(caught.value)


def test_a_message_of_another_shape_names_both_ends():
    def sends():
        yield Post(1, (torch.ones(3),), where="model.py:5")

    def receives():
        yield Wait((yield Expect(0, (((2,), torch.float32),), where="model.py:6")))

    with pytest.raises(MismatchError, match=r"send of float32\[3\].*model.py:5.*receive of float32\[2\].*model.py:6"):
        InProcessComm(_mesh2()).run([sends(), receives()])


def test_a_cycle_of_waits_is_a_deadlock():
    mesh = Mesh(p=2, q=2, device="cpu")
    whole = Layout(((Factor(4),),))

    def ranks(rank):
        axes = ("p", "q") if rank in (0, 3) else ("q", "p")
        for axis in axes:
            step = Step("all_reduce", (axis,), whole.with_partial(axis, "sum"), whole)
            handle = yield Start((transfer_of(step, mesh, rank),), (torch.ones(4),))
            yield Wait(handle)

    with pytest.raises(DeadlockError) as caught:
        InProcessComm(mesh).run([ranks(r) for r in range(4)])
    assert all(f"rank {r} waits for all_reduce(sum)" in str(caught.value) for r in range(4))


@pytest.mark.parametrize("other", ["kind", "shape", "dtype", "op"])
def test_a_mismatch_names_both_sides(other):
    def one(rank):
        transfer, x = _transfer("all_reduce"), torch.ones(4)
        if rank and other == "kind":
            transfer = _transfer("reduce_scatter", rank=1)
        if rank and other == "shape":
            transfer, x = _transfer("all_reduce", 5), torch.ones(5)
        if rank and other == "dtype":
            x = x.double()
        if rank and other == "op":
            transfer = transfer.__class__(**{**vars(transfer), "op": "max"})
        handle = yield Start((transfer,), (x,), where=f"model.py:{rank}")
        yield Wait(handle)

    with pytest.raises(MismatchError) as caught:
        InProcessComm(_mesh2()).run([one(0), one(1)])
    text = str(caught.value)
    assert "rank 0 started all_reduce(sum)" in text and "rank 1 started" in text
    assert "model.py:0" in text and "model.py:1" in text


def test_a_tensor_that_does_not_fit_its_transfer_is_a_mismatch():
    def one():
        yield Start((_transfer("all_reduce", 4),), (torch.ones(5),), where="model.py:9")

    with pytest.raises(MismatchError, match=r"rank 0: .*model.py:9"):
        InProcessComm(_mesh2()).run([one(), one()])


def test_an_exception_in_a_program_is_a_rank_error_with_its_cause():
    closed = []

    def good():
        try:
            handle = yield Start((_transfer("all_reduce"),), (torch.ones(4),))
            yield Wait(handle)
        finally:
            closed.append(True)

    def bad():
        raise KeyError("lost")
        yield

    with pytest.raises(RankError, match="rank 1: KeyError") as caught:
        InProcessComm(_mesh2()).run([good(), bad()])
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.rank == 1
    assert closed == [True]


def test_paused_programs_keep_collectives_apart_and_can_be_abandoned():
    def one(rank, scale):
        handle = yield Start((_transfer("all_reduce"),), (torch.full((4,), scale),))
        grad = yield Pause(("out", rank))
        (total,) = yield Wait(handle)
        return total[0].item() * grad

    comm = InProcessComm(_mesh2())
    first, second, third = ([one(r, s) for r in range(2)] for s in (1.0, 5.0, 9.0))
    assert comm.run_until_pause(first) == [("out", 0), ("out", 1)]
    comm.run_until_pause(third)
    del third
    comm.run_until_pause(second)
    assert comm.resume(first, [1.0, 2.0]) == [2.0, 4.0]
    assert comm.resume(second, [1.0, 1.0]) == [10.0, 10.0]
    with pytest.raises(MeshwrightError, match="done"):
        comm.resume(first, [1.0, 2.0])


def test_run_refuses_programs_that_pause():
    def one():
        yield Pause(1)

    with pytest.raises(MeshwrightError, match="paused"):
        InProcessComm(_mesh2()).run([one(), one()])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float16])
def test_dtypes_are_kept(dtype):
    def one(rank):
        x = torch.tensor([0, 1, rank, 1 - rank]).to(dtype)
        handle = yield Start((_transfer("all_reduce"),), (x,))
        (total,) = yield Wait(handle)
        handle = yield Start((_transfer("all_gather", 8),), (x,))
        (joined,) = yield Wait(handle)
        return total, joined

    for total, joined in InProcessComm(_mesh2()).run([one(0), one(1)]):
        assert total.dtype == joined.dtype == dtype
        assert total.tolist() == [0, 1 if dtype == torch.bool else 2, 1, 1]
        assert joined.tolist() == [0, 1, 0, 1, 0, 1, 1, 0]
