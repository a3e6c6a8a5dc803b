"""Collectives written as messages: equal to the comm's own, to the byte of their formulas, proved and priced."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from meshwright.partitioner.collective_programs import ALGORITHMS, KINDS, HandProgram, check, even, hand_program
from meshwright.partitioner.hand_cost import cheapest, fastest_first, hand_seconds
from meshwright.partitioner.hardware import LINKS, Line
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.transfer import Transfer
from meshwright.runtime.comm import Start, Wait
from meshwright.runtime.faults import DeadlockError, MismatchError, RankError
from meshwright.runtime.hand_collectives import by_hand, channel_of
from meshwright.runtime.inprocess import InProcessComm

NAMES = (*ALGORITHMS, "server:2", "auto")
MESHES = [{"p": 2}, {"p": 3}, {"p": 4}, {"p": 8}, {"p": 2, "q": 2}, {"p": 2, "q": 3}]
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
FEW = (torch.float32, torch.bfloat16, torch.bool)
SIZES = (1, 7, 24)


def transfer(kind: str, axes: tuple[str, ...], k: int, index: int, n: int, op: str = "sum") -> Transfer:
    """Along dim 1 of a tensor (2, n); pieces as `torch.chunk` would have them, some of them empty."""
    sizes = even(n, k)
    if kind == "all_gather":
        return Transfer(kind, axes, (2, sizes[index]), (2, n), gather_dim=1, gather_sizes=sizes)
    if kind == "reduce_scatter":
        return Transfer(kind, axes, (2, n), (2, sizes[index]), op, split_dim=1, split_sizes=sizes)
    return Transfer(kind, axes, (2, n), (2, n), op)


def value(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, shape, generator=generator)
    return x.to(dtype) * 1j + x.T.reshape(shape) if dtype.is_complex else x.to(dtype)


def starts(mesh: Mesh, rank: int, dtypes=DTYPES, sizes=SIZES):
    """Every kind and op over each axis and all, of each dtype and size, and buckets of several dtypes."""
    for axes in dict.fromkeys([mesh.names, tuple(reversed(mesh.names)), mesh.names[:1]]):
        k, index = mesh.group_size(axes), mesh.group(axes, rank).index(rank)
        for kind, op in itertools.product(KINDS, ("sum", "max")):
            if kind == "all_gather" and op == "max":
                continue
            seed = rank if kind != "all_gather" else 7 + index
            for n, dtype in itertools.product(sizes, dtypes):
                if dtype.is_complex and op != "sum":
                    continue
                t = transfer(kind, axes, k, index, n, op)
                yield Start((t,), (value(t.view, dtype, seed),))
            bucket = tuple(transfer(kind, axes, k, index, n, op) for n in (3, 8, 5, 8))
            some = (torch.float32, torch.int64, torch.float32, torch.bool)
            yield Start(bucket, tuple(value(t.view, d, seed + i) for i, (t, d) in enumerate(zip(bucket, some))))  # noqa: B905


def program(requests):
    """Starts three at a time before it waits for any."""
    out, held = [], []
    for request in requests:
        held.append((yield request))
        if len(held) == 3:
            for handle in held:
                out.append((yield Wait(handle)))
            held = []
    for handle in held:
        out.append((yield Wait(handle)))
    return out


def mesh_of(axes: dict[str, int], **more) -> Mesh:
    return Mesh(**axes, device="cpu", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("axes", MESHES, ids=lambda a: "x".join(map(str, a.values())))
def test_results_equal_those_of_the_comm(axes):
    mesh = mesh_of(axes)
    ranks = range(mesh.world_size)
    dtypes = DTYPES if axes in MESHES[:2] else FEW
    requests = [list(starts(mesh, r, dtypes)) for r in ranks]
    again = [[tuple(x.clone() for x in s.tensors) for s in each] for each in requests]
    want = InProcessComm(mesh).run([program(each) for each in requests])
    for name in NAMES:
        comm = InProcessComm(mesh)
        got = comm.run([by_hand(program(each), name, mesh, r) for r, each in enumerate(requests)])
        assert set(comm.counted) <= {"send"}
        for a, b in zip(_flat(got), _flat(want), strict=True):
            assert a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b), name
    given = [[s.tensors for s in each] for each in requests]
    assert all(torch.equal(a, b) for a, b in zip(_flat(given), _flat(again), strict=True))


def _flat(nested) -> list[torch.Tensor]:
    return [nested] if isinstance(nested, torch.Tensor) else [x for part in nested for x in _flat(part)]


def test_results_share_no_memory():
    mesh = mesh_of({"p": 4})
    for name in NAMES:
        requests = [list(starts(mesh, r, (torch.float32,), (24,))) for r in range(4)]
        out = InProcessComm(mesh).run([by_hand(program(s), name, mesh, r) for r, s in enumerate(requests)])
        given = [[s.tensors for s in r] for r in requests]
        by_rank = [{x.untyped_storage().data_ptr() for x in _flat(r) if x.numel()} for r in [*out, given]]
        assert all(not a & b for a, b in itertools.combinations(by_rank, 2))


@pytest.mark.parametrize("k", range(1, 18))
def test_programs_are_proved_for_every_number_of_members(k):
    for name, kind in itertools.product((*ALGORITHMS, f"server:{k}", "server:1"), KINDS):
        for dims in {(k,), *((a, k // a) for a in (2, 3) if k % a == 0)}:
            assert hand_program(name, kind, dims).members == k


def sent_by(name: str, kind: str, k: int, n: int, dims=()) -> list[int]:
    made = hand_program(name, kind, dims or (k,))
    sizes = even(n, made.chunks)
    return [sum(v for (a, _), v in made.sent(sizes).items() if a == m) for m in range(k)]


@pytest.mark.parametrize("k", range(2, 9))
def test_bytes_of_the_ring(k):
    """2 n (k - 1) / k each where k divides n; else n less the chunk that a member never sends, twice."""
    n = 840 * k
    for name in ("ring", "bidirectional", f"server:{k}"):
        assert sent_by(name, "all_reduce", k, n) == [2 * n * (k - 1) // k] * k
        assert sent_by(name, "reduce_scatter", k, n) == [n * (k - 1) // k] * k
        assert sent_by(name, "all_gather", k, n) == [n * (k - 1) // k] * k
    sizes = even(n + 1, k)
    want = [2 * (n + 1) - sizes[m] - sizes[(m + 1) % k] for m in range(k)]
    assert sent_by("ring", "all_reduce", k, n + 1) == want and max(want) <= 2 * (k - 1) * -(-(n + 1) // k)
    ring = hand_program("ring", "all_reduce", (k,))
    assert len(ring.rounds) == 2 * (k - 1)
    assert set(ring.sent((n // k,) * k)) == {(m, (m + 1) % k) for m in range(k)}, "to one neighbour only"


def test_bytes_and_rounds_of_the_others():
    n, k = 840, 8
    assert sent_by("halving", "all_reduce", k, n) == [2 * n * (k - 1) // k] * k
    assert len(hand_program("halving", "all_reduce", (k,)).rounds) == 6  # 2 log2 k
    assert max(sent_by("halving", "all_reduce", 6, n)) == n * 3 // 2 + n  # of 4 cores, and all of it to a guest
    tree = hand_program("tree", "all_reduce", (k,))
    assert len(tree.rounds) == 6 and sum(tree.sent((n,)).values()) == 2 * n * (k - 1)
    assert max(sent_by("tree", "all_reduce", k, n)) == 3 * n
    server = hand_program("server", "all_reduce", (k,)).sent((n,))
    assert sum(v for pair, v in server.items() if 0 in pair) == 2 * n * (k - 1)
    assert max(sent_by("server:4", "all_reduce", k, n)) == n * (7 + 3) // 4
    levels = hand_program("hierarchical", "all_reduce", (2, 4)).sent((n // 8,) * 8)
    across = sum(v for (a, b), v in levels.items() if a // 4 != b // 4)
    assert across == 2 * n, "each of 4 cards takes n / 4 across and back: a flat ring carries 2 n 7 / 8 on each edge"
    assert sent_by("hierarchical", "all_reduce", k, n, (2, 4)) == [2 * n * (k - 1) // k] * k


def test_what_is_counted_is_what_the_program_says():
    mesh = mesh_of({"p": 4})
    for name in ALGORITHMS:
        comm = InProcessComm(mesh)
        t = transfer("all_reduce", ("p",), 4, 0, 500)
        comm.run([by_hand(program([Start((t,), (torch.ones(2, 500),))]), name, mesh, r) for r in range(4)])
        assert [comm.sent[r].get("send", (0, 0))[1] for r in range(4)] == sent_by(name, "all_reduce", 4, 4000)


@pytest.mark.parametrize("fault", ["twice", "lost", "late"])
def test_a_wrong_program_is_named(fault):
    good = hand_program("ring", "all_reduce", (4,))
    rounds = list(good.rounds)
    if fault == "twice":
        rounds.insert(1, rounds[0])
    elif fault == "lost":
        del rounds[2]
    else:
        rounds[0], rounds[5] = rounds[5], rounds[0]
    with pytest.raises(ValueError, match="ring all_reduce.*chunk"):
        check(dataclasses.replace(good, rounds=tuple(rounds)))


def test_a_program_that_stops_early_is_named():
    with pytest.raises(ValueError, match="member 0 ends without all of chunk 0"):
        check(HandProgram("none", "all_reduce", 2, 1, 1, ()))
    with pytest.raises(ValueError, match="5 servers among 4"):
        hand_program("server:5", "all_reduce", (4,))
    with pytest.raises(ValueError, match="no collective program 'star'"):
        hand_program("star", "all_reduce", (4,))


def test_faults_are_those_of_the_comm():
    mesh = mesh_of({"p": 2})
    t = transfer("all_reduce", ("p",), 2, 0, 8)

    def one(shape):
        yield Wait((yield Start((t,), (torch.ones(shape),), where="model.py:3")))

    def ends():
        return None
        yield

    with pytest.raises(DeadlockError, match=r"rank 0 waits for receive .*all_reduce\(sum\).*model.py:3 by ring"):
        InProcessComm(mesh).run([by_hand(one((2, 8)), "ring", mesh, 0), by_hand(ends(), "ring", mesh, 1)])
    with pytest.raises((RankError, MismatchError), match="a tensor of shape"):
        InProcessComm(mesh).run([by_hand(one((2, 7)), "ring", mesh, r) for r in range(2)])


def test_channels_are_apart():
    mesh = mesh_of({"p": 2, "q": 2, "r": 2})
    axes = [a for n in (1, 2, 3) for a in itertools.permutations(mesh.names, n)]
    found = {channel_of(a, mesh, i) for a in axes for i in range(3)}
    assert len(found) == 3 * len(axes) and min(found) > 0 and max(found) < 2**31


def test_prices():
    fast_inside = Mesh(node=4, gpu=8, device="h100", links={"node": "ib-ndr"}).levels(("node", "gpu"))
    assert fastest_first(fast_inside) == (1, 0)
    one = Mesh(p=8, device="h100").levels(("p",))
    for levels in (fast_inside, one):
        dims = tuple(k for k, _ in levels)
        for name, kind in itertools.product(ALGORITHMS, KINDS):
            made = hand_program(name, kind, dims, fastest_first(levels))
            assert 0 < hand_seconds(made, levels, 10) < hand_seconds(made, levels, 1000)
    ring, link = hand_program("ring", "all_reduce", (8,)), one[0][1]
    assert hand_seconds(ring, one, 8e9) == pytest.approx(14 * link.latency + 2 * 8e9 * 7 / 8 / link.bandwidth)
    assert cheapest("all_reduce", fast_inside, 1 << 30) == "hierarchical"
    assert cheapest("all_reduce", one, 1 << 10) in ("tree", "halving", "server")
    flat = hand_seconds(hand_program("ring", "all_reduce", (32,)), fast_inside, 1 << 30)
    tall = hand_seconds(hand_program("hierarchical", "all_reduce", (4, 8), (1, 0)), fast_inside, 1 << 30)
    assert tall < flat
    same = Mesh(node=4, gpu=8, device="h100").levels(("node", "gpu"))
    tall = hand_seconds(hand_program("hierarchical", "all_reduce", (4, 8), (1, 0)), same, 1 << 40)
    flat = hand_seconds(hand_program("ring", "all_reduce", (32,)), same, 1 << 40)
    assert tall == pytest.approx(flat, rel=1e-3), "hierarchical gains bytes only where links differ"


def test_prices_by_measured_messages():
    """On cores that all ranks share, what counts is all that is sent; a rank alone has a core of its own at most."""
    lines = {"message": (1e-3, 1e9), "stream": (5e-4, 2e9), "messages": (2e-3, 5e8), "buffer": (0.0, 4e9)}
    own = tuple((kind, (Line(start, 0.0, rate),)) for kind, (start, rate) in lines.items())
    one = ((4, dataclasses.replace(LINKS["loopback"], own=own)),)
    names = ("tree", "server", "halving", "ring")
    prices = {n: hand_seconds(hand_program(n, "all_reduce", (4,)), one, 0) for n in names}
    # ms: 1 to and from the leaf, 1.5 where the root has two; 1 and twice 0.5, each way; 4 and 6 rounds of 2
    assert prices == pytest.approx({"tree": 5e-3, "server": 4e-3, "halving": 8e-3, "ring": 12e-3})
    large = {n: hand_seconds(hand_program(n, "all_reduce", (4,)), one, 1e9) for n in names}
    # seconds: 0.25 copied first; all messages at once send 2 each of 6 and of 4 rounds
    assert large["ring"] == pytest.approx(12e-3 + 0.25 + 3.0)
    assert large["halving"] == pytest.approx(8e-3 + 0.25 + 3.0)
    assert large["tree"] == pytest.approx(5e-3 + 0.25 + 2 * (1.0 + 1.5))
    assert large["server"] == pytest.approx(4e-3 + 0.25 + 2 * 2.0)
