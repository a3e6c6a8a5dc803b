"""Space split over a mesh: which rows windows need, the halo that fetches them, the rules on top, whole networks."""

from __future__ import annotations

import copy
import itertools

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_ranks
from meshwright.partitioner.collective import path, path_seconds, wire_bytes
from meshwright.partitioner.layout import Factor, Layout, take_local, whole
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.rules.space import apart
from meshwright.partitioner.states import Prices, layout_states
from meshwright.partitioner.strategies import Seen
from meshwright.partitioner.through_time import way
from meshwright.partitioner.transfer import local_slice, sent_bytes, slice_args, transfer_of
from meshwright.partitioner.transitions import STEP
from meshwright.partitioner.window import Through, Window, chunk, exchange
from meshwright.runtime.comm import Start, Wait
from meshwright.runtime.distributed import DistributedComm
from meshwright.runtime.inprocess import InProcessComm
from rulecheck import check_call
from torch import nn

aten = torch.ops.aten
RUNS = settings(max_examples=120, deadline=None)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


# --- the arithmetic of windows -------------------------------------------------------------------------------------


@st.composite
def windows(draw):
    """(size of what is read, size of what is made, window)."""
    kernel, stride, dilation = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding, size = draw(st.integers(0, 4)), draw(st.integers(1, 24))
    window = Window(kernel, stride, padding, dilation)
    made = (size + 2 * padding - window.reach - 1) // stride + 1
    return size, made, window


def read_by(window: Window, row: int) -> set[int]:
    return {row * window.stride - window.padding + window.dilation * j for j in range(window.kernel)}


@RUNS
@given(windows().filter(lambda w: w[1] > 0), st.integers(1, 5))
def test_a_window_names_the_rows_that_are_read_and_touched(case, ranks):
    size, made, window = case
    touched = Window(window.kernel, window.stride, window.padding, window.dilation, touched=True)
    for index in range(ranks):
        start, length = chunk(made, ((ranks, index),))
        reads = set().union(*(read_by(window, o) for o in range(start, start + length)))
        low, high = window.span(start, length)
        assert not reads or (min(reads), max(reads) + 1) == (low, high)
        a, b = window.rows(size, start, length)
        assert reads & set(range(size)) <= set(range(a, b)) and 0 <= a <= b <= size
        start, length = chunk(size, ((ranks, index),))
        own = set(range(start, start + length))
        a, b = touched.rows(made, start, length)
        assert {o for o in range(made) if read_by(window, o) & own} <= set(range(a, b))
        assert all(min(read_by(window, o)) < start + length and max(read_by(window, o)) >= start for o in range(a, b))


@RUNS
@given(windows().filter(lambda w: w[1] > 0), st.lists(st.integers(1, 3), min_size=1, max_size=2))
def test_an_exchange_gives_every_rank_its_rows_once_and_in_order(case, ranks):
    size, made, window = case
    through = Through(window, made)
    table = exchange((size, 1), size, through, tuple(ranks))
    members = [tuple(zip(ranks, at, strict=True)) for at in itertools.product(*(range(n) for n in ranks))]
    for receiver, cuts in enumerate(members):
        start, length = through.piece(size, *chunk(made, cuts))
        came = [row for giver in table for row in range(*giver[receiver])]
        assert came == list(range(start, start + length))
    for giver, cuts in zip(table, members, strict=True):
        start, length = chunk(size, cuts)
        assert all(start <= a and b <= start + length for a, b in giver if b > a)


# --- the halo as a step of a path ----------------------------------------------------------------------------------


def windowed(sizes, at, axes, window, made):
    dims = [(Factor(n),) for n in sizes]
    dims[at] = (Factor(sizes[at], axes, Through(window, made)),)
    return Layout(tuple(dims))


def program(x, before, after, mesh, rank):
    here = take_local(x, before, mesh, rank).clone()
    for step in path(before, after, mesh, x.element_size()):
        if step.kind == "slice":
            here = local_slice(here, *slice_args(step, mesh, rank))
        else:
            (here,) = yield Wait((yield Start((transfer_of(step, mesh, rank),), (here,))))
    return here


@RUNS
@given(windows().filter(lambda w: w[0] > 1 and w[1] > 1), st.integers(2, 4), st.booleans(), st.booleans())
def test_a_path_to_a_window_gives_its_rows(case, ranks, is_split, two_axes):
    size, made, window = case
    mesh = Mesh(device="cpu", **({"p": ranks, "q": 2} if two_axes else {"p": ranks}))
    axes = mesh.names
    x = torch.randn(2, size, 3)
    before = whole(x.shape).with_axes((1, 0), axes) if is_split else whole(x.shape)
    after = windowed(x.shape, 1, axes, window, made)
    comm = InProcessComm(mesh)
    got = comm.run([program(x, before, after, mesh, r) for r in comm.ranks])
    for rank, part in enumerate(got):
        torch.testing.assert_close(part, take_local(x, after, mesh, rank), rtol=0, atol=0)
    steps = path(before, after, mesh, 4)
    if not is_split:
        assert [s.kind for s in steps] == ["slice"] and not any(comm.sent[0])
    elif [s.kind for s in steps] == ["halo"]:
        sent = [comm.sent[r]["halo"][1] for r in comm.ranks]
        assert sent == [_formula(mesh, axes, size, made, window, r) * 2 * 3 * 4 for r in comm.ranks]
        assert max(sent) == pytest.approx(wire_bytes(steps[0], mesh, 4))
        transfers = [transfer_of(steps[0], mesh, r) for r in comm.ranks]
        assert sent == [sent_bytes(t, i, len(transfers), 4) for i, t in enumerate(transfers)]


def _formula(mesh, axes, size, made, window, rank):
    """Rows of this rank's piece that the others' windows see."""
    cuts = [tuple((mesh.sizes[a], mesh.coord(r)[a]) for a in axes) for r in range(mesh.world_size)]
    start, length = chunk(size, cuts[rank])
    total = 0
    for other in range(mesh.world_size):
        low, high = window.rows(size, *chunk(made, cuts[other]))
        total += len(set(range(low, high)) & set(range(start, start + length))) if other != rank else 0
    return total


@RUNS
@given(windows().filter(lambda w: w[0] > 1 and w[1] > 1), st.integers(2, 4), st.booleans(), st.integers(1, 1000))
def test_a_window_is_priced_as_its_steps_are(case, ranks, beside, width):
    """A bug that was: a halo's seconds on top of the split's, where a gather and a slice were cheaper and emitted."""
    size, made, window = case
    links = {"p": "eth-100", "q": "nvlink4"}
    mesh = Mesh(p=ranks, q=2, device="h100", links=links)
    befores = [whole((2, size, width)), *(whole((2, size, width)).with_axes(at, ("p",)) for at in ((1, 0), (2, 0)))]
    after = windowed((2, size, width), 1, ("p",), window, made)
    if beside:
        befores, after = [b.with_axes((0, 0), ("q",)) for b in befores], after.with_axes((0, 0), ("q",))
    want = layout_states([after], mesh.names)
    want.seen[0, 0] = Seen((1, 0), Through(window, made), (size, 1), size)
    prices = Prices(mesh).between((2, size, width), 4, layout_states(befores, mesh.names), want)[:, 0]
    for price, before in zip(prices, befores, strict=True):
        steps = path(before, after, mesh, 4)
        assert price == pytest.approx(path_seconds(before, after, mesh, 4) + STEP * len(steps))


def test_a_dim_of_several_factors_is_seen_as_one():
    mesh, window = Mesh(p=2, device="cpu"), Window(3, 1, 1)
    x = torch.randn(10, 4)
    before = Layout(((Factor(5, ("p",)), Factor(2)), (Factor(4),)))
    after = Layout(((Factor(10, ("p",), Through(window, 5, 2)),), (Factor(4),)))
    assert [s.kind for s in path(before, after, mesh, 4)] == ["halo"]
    comm = InProcessComm(mesh)
    for rank, part in enumerate(comm.run([program(x, before, after, mesh, r) for r in comm.ranks])):
        torch.testing.assert_close(part, x[: 6 + 1] if rank == 0 else x[6 - 1 :])


def test_rows_are_sent_in_each_micro_batch_and_not_before():
    """A bug that was: an input entered the loop over micro-batches through its window, then the halo was made again."""
    grid = Mesh(x=2, y=2, device="cpu").in_time(2)
    before = whole((4, 3, 16))
    seen = (Factor(16, ("y",), Through(Window(3, padding=1), 16)),)
    after = Layout(((Factor(4, ("micro", "x")),), *before.dims[1:2], seen))
    steps = way(before, after, grid, 4)
    assert [s.before for s in steps] == [before, *(s.after for s in steps[:-1])]
    assert steps[-1].after == after
    assert not any(f.through for s in steps for d in s.before.dims for f in d)


def test_two_windows_bring_the_corners_too():
    mesh, window = Mesh(p=2, q=2, device="cpu"), Window(3, 1, 1)
    x = torch.randn(6, 6)
    before = Layout(((Factor(6, ("p",)),), (Factor(6, ("q",)),)))
    after = Layout(tuple((Factor(6, (a,), Through(window, 6)),) for a in "pq"))
    comm = InProcessComm(mesh)
    (part, *_) = comm.run([program(x, before, after, mesh, r) for r in comm.ranks])
    torch.testing.assert_close(part, x[:4, :4])
    assert str(after) == "[6:p~k3p1, 6:q~k3p1]"


# --- the rules -----------------------------------------------------------------------------------------------------

GEOMETRIES = [
    # size, kernel, stride, padding, dilation
    (9, 3, 1, 1, 1),
    (11, 7, 2, 3, 1),
    (7, 3, 2, 0, 2),
    (5, 5, 1, 2, 1),  # larger than a piece
    (9, 1, 2, 0, 1),  # leaves rows out
    (8, 2, 3, 1, 1),
    (6, 1, 1, 2, 1),  # windows wholly in the padding
    (6, 1, 1, 0, 1),  # no window at all
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_split_over_space(geometry, groups):
    size, k, s, p, d = geometry
    x, w = torch.randn(2, 2, size), torch.randn(4, 2 // groups, k)
    args = (x, w, torch.randn(4), [s], [p], [d], False, [0], groups)
    g = torch.randn_like(aten.convolution(*args))
    assert check_call(aten.convolution.default, args, ranks=(2, 3, 4))
    for mask, sizes in (([False, True, True], [4]), ([True, False, False], None), ([True, True, True], [4])):
        assert check_call(aten.convolution_backward.default, (g, x, w, sizes, *args[3:], mask), ranks=(2, 3, 4))


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("size,kernel,stride,padding", [(9, 3, 2, 1), (8, 2, 2, 0), (7, 3, 1, 1), (6, 5, 3, 2)])
def test_pools_split_over_space(size, kernel, stride, padding, ceil):
    x = torch.randn(2, size, size + 1)
    at = ([kernel] * 2, [stride] * 2, [padding] * 2)
    y, index = aten.max_pool2d_with_indices(x, *at, [1, 1], ceil)
    g = torch.randn_like(y)
    assert check_call(aten.max_pool2d_with_indices.default, (x, *at, [1, 1], ceil), ranks=(2, 4)) >= 5
    back = aten.max_pool2d_with_indices_backward.default
    assert check_call(back, (g, x, *at, [1, 1], ceil, index), ranks=(2, 4)) >= 5
    for include, divisor in ((True, None), (False, None), (True, 3)):
        rest = (*at, ceil, include, divisor)
        assert check_call(aten.avg_pool2d.default, (x, *rest), ranks=(2, 4)) >= 5
        assert check_call(aten.avg_pool2d_backward.default, (g, x, *rest), ranks=(2, 4)) >= 5


def test_the_first_of_a_pool_of_infinities_is_a_real_row():
    x = torch.full((1, 8, 4), float("-inf"))
    check_call(aten.max_pool2d_with_indices.default, (x, [3, 3], [2, 2], [1, 1]))


def test_a_gradient_for_both_is_written_out_as_two():
    x, w, g = torch.randn(2, 3, 7, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 7, 5)
    rest = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for mask in ([True, True, True], [True, False, True], [True, True, False]):
        want = aten.convolution_backward(g, x, w, *rest, mask)
        for wanted, a, b in zip(mask, want, apart(g, x, w, *rest, mask), strict=True):
            assert (b is not None) == wanted
            if wanted:
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sizes", [((5, 4), (15, 4)), ((2, 3), (6, 6)), ((4, 1), (4, 3))])
def test_nearest_resizes_split_over_space(sizes):
    small, big = sizes
    x, g = torch.randn(2, 2, *small), torch.randn(2, 2, *big)
    assert check_call(aten.upsample_nearest2d.default, (x, list(big)), ranks=(2, 4))
    assert check_call(aten.upsample_nearest2d_backward.default, (g, list(big), [2, 2, *small]), ranks=(2, 4))


# --- whole networks ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int):
        super().__init__()
        self.a, self.b = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.Conv2d(o, o, 3, 1, 1)
        self.na, self.short = nn.BatchNorm2d(o), nn.Conv2d(i, o, 1, stride)

    def forward(self, x):
        return F.relu(self.b(F.relu(self.na(self.a(x)))) + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 4, 7, 2, 3), nn.MaxPool2d(3, 2, 1)
        self.one, self.two, self.head = Residual(4, 4, 1), Residual(4, 6, 2), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.two(self.one(self.pool(F.relu(self.stem(x))))).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.mid = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=4, dilation=2)
        self.up, self.out, self.pool = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(4, 2, 1), nn.AvgPool2d(2)

    def forward(self, x):
        a = F.silu(self.down(x))
        b = F.interpolate(F.silu(self.mid(self.pool(a))), size=a.shape[2:], mode="nearest")
        return self.out(F.silu(self.up(torch.cat([a, b], 1))))


class Tokens(nn.Module):
    """A causal convolution, and a loss-like shift by one token."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Conv1d(6, 6, 4, padding=3, groups=6), nn.Linear(6, 5)

    def forward(self, x):
        y = self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        y = self.head(F.silu(y))
        return y[:, :-1] * y[:, 1:]


NETS = {
    "resnet": (ResNet, (4, 3, 33, 12)),
    "unet": (UNet, (2, 2, 14, 6)),
    "volume": (lambda: nn.Sequential(nn.Conv3d(1, 2, 3, 2, 1), nn.ReLU(), nn.Conv3d(2, 2, 3)), (2, 1, 11, 7, 7)),
    "tokens": (Tokens, (2, 9, 6)),
}
CP2, CP4, BOTH = {"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2}
RUN = [("resnet", CP2), ("resnet", CP4), ("unet", CP4), ("unet", BOTH), ("volume", CP2), ("tokens", CP4)]
RUN += [("tokens", BOTH)]


def losses(out: torch.Tensor) -> torch.Tensor:
    return (out.float() ** 2).mean()


@pytest.mark.parametrize("name,axes", RUN, ids=lambda a: a if isinstance(a, str) else "x".join(f"{k}{a[k]}" for k in a))
def test_a_network_split_over_space_equals_one_device(name, axes):
    make, shape = NETS[name]
    model, x = make(), torch.randn(*shape)
    compiled = mw.compile(copy.deepcopy(model), mw.Mesh(**axes), loss=losses)
    loss = compiled.step(x)
    want = losses(model(x))
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    grads = compiled.gather("grads")
    for key, p in model.named_parameters():
        torch.testing.assert_close(grads[key], p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
    for key, b in model.named_buffers():
        torch.testing.assert_close(compiled.gather("buffers")[key], b, rtol=1e-4, atol=1e-5)


def test_the_convolutions_of_a_cp_mesh_split_their_rows():
    model = nn.Sequential(nn.Conv2d(2, 4, 5, 2, 2), nn.MaxPool2d(3, 2, 1), Residual(4, 6, 2))
    compiled = mw.compile(model, mw.Mesh(cp=2), loss=losses)
    compiled.step(torch.randn(2, 2, 33, 7))
    choices = compiled.plan.choices
    convolutions = {n: by["cp"] for n, by in choices.items() if n.startswith(("convolution", "max_pool"))}
    assert len(convolutions) > 8 and all(isinstance(c, tuple) and c[0] in ("r0", "s0") for c in convolutions.values())
    assert compiled.comm.sent[0]["halo"][0] > 0


def test_channels_and_space_split_together():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    x = torch.randn(2, 2, 9, 8)
    compiled = mw.compile(copy.deepcopy(model), mw.Mesh(cp=2, tp=2), loss=losses)
    loss, want = compiled.step(x), losses(model(x))
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    for key, p in model.named_parameters():
        torch.testing.assert_close(compiled.gather("grads")[key], p.grad)


def test_a_transposed_convolution_keeps_its_space_whole():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, stride=2))
    x = torch.randn(2, 2, 7, 6)
    compiled = mw.compile(copy.deepcopy(model), mw.Mesh(cp=2), loss=losses)
    torch.testing.assert_close(compiled.step(x), losses(model(x)).detach())


# --- between processes ---------------------------------------------------------------------------------------------

WIRED = ((11, 7, 2, 3, 1), (9, 3, 1, 1, 1), (5, 5, 1, 2, 1), (12, 2, 2, 0, 1))


def _halos(ranks):
    """(step, tensor) of several halos on one axis of so many ranks."""
    mesh = Mesh(p=ranks, device="cpu")
    for i, (size, k, s, p, d) in enumerate(WIRED):
        window = Window(k, s, p, d)
        made = (size + 2 * p - window.reach - 1) // s + 1
        before = whole((2, size, 3)).with_axes((1, 0), ("p",))
        after = windowed((2, size, 3), 1, ("p",), window, made)
        for step in path(before, after, mesh, 4):
            if step.kind == "halo":
                x = torch.arange(2.0 * size * 3).reshape(2, size, 3) + 1000 * i
                yield step, x.to(torch.int64 if i % 2 else torch.float32)


def _halo_program(mesh, rank):
    steps = list(_halos(mesh.world_size))
    out = []
    for bucket in (steps, steps[:1]):
        transfers = tuple(transfer_of(step, mesh, rank) for step, _ in bucket)
        tensors = tuple(take_local(x, step.before, mesh, rank).clone() for step, x in bucket)
        out += yield Wait((yield Start(transfers, tensors)))
    return out


def run_halos(rank, world):
    mesh = Mesh(p=world, device="cpu")
    comm = DistributedComm(mesh)
    (out,) = comm.run([_halo_program(mesh, rank)])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    compiled = mw.compile(model, mw.Mesh(cp=world), loss=losses)
    loss = compiled.step(torch.randn(2, 1, 9, 6))
    return out, comm.counted, loss, compiled.gather("grads"), compiled.comm.sent[rank]["halo"]


@pytest.mark.gloo
def test_halos_between_processes():
    mesh = Mesh(p=2, device="cpu")
    comm = InProcessComm(mesh)
    want = comm.run([_halo_program(mesh, r) for r in comm.ranks])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    losses(model(torch.randn(2, 1, 9, 6))).backward()
    for rank, (got, counted, _, grads, halo) in enumerate(run_ranks("test_halo:run_halos", 2)):
        for a, b in zip(got, want[rank], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert counted == comm.sent[rank] and halo[0] > 0
        for key, p in model.named_parameters():
            torch.testing.assert_close(grads[key], p.grad)
