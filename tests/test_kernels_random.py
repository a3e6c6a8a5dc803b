"""Random numbers by element: Philox against numpy, the moments of every distribution, every aten op's form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from meshwright.kernels import philox, random
from meshwright.partitioner.allocations import Calls, Storages, spec_of


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def philox_numpy(counter, key):
    c = [np.asarray(x, dtype=np.uint64) for x in counter]
    k = [np.uint64(x) for x in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        shift = np.uint64(32)
        c = [(p1 >> shift) ^ c[1] ^ k[0], p1 & low, (p0 >> shift) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def test_philox_equals_numpy():
    lo, hi = torch.randint(0, 1 << 32, (1000,)), torch.randint(0, 1 << 32, (1000,))
    kept = lo.clone(), hi.clone()
    got = philox.philox4(lo, hi, 0xFFFFFFFF, 5, 0xFFFFFFFE, 0x12345678)
    want = philox_numpy((lo.numpy(), hi.numpy(), [0xFFFFFFFF] * 1000, [5] * 1000), (0xFFFFFFFE, 0x12345678))
    for g, w in zip(got, want, strict=True):
        assert (g.numpy() == w.astype(np.int64)).all()
    assert (kept[0] == lo).all() and (kept[1] == hi).all()
    known = philox.philox4(0, 0, 0, 0, 0, 0)  # the authors' own vector
    assert known == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def words_numpy(at, op, step, seed, words):
    """The words of the elements `at`, by the formula of the file."""
    k = 4 // words
    block = np.asarray(at) // k
    low, high = block & 0xFFFFFFFF, block >> 32
    four = philox_numpy((low, high, [op] * len(at), [step] * len(at)), (seed & 0xFFFFFFFF, seed >> 32))
    first = np.asarray(at) % k * words
    return [np.stack(four)[first + i, np.arange(len(at))].astype(np.int64) for i in range(words)]


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize(
    "pieces",
    [
        philox.whole_pieces((4, 6)),
        philox.whole_pieces((5, 3)),  # the last block is short
        (((1, 2, 4),), ((0, 2, 2), (1, 2, 3))),  # runs that start within a block
        (((2, 2, 4),), ((0, 8, 8),)),  # runs of whole blocks
        (((0, 3, 3),), ((4, 4, 12),)),
        (((0, 0, 3),), ((0, 4, 4),)),  # nothing
        (((1 << 20, 2, 1 << 21),), ((5, 3, 1 << 20),)),  # beyond 2^32 elements
        (((1 << 21, 2, 1 << 22),), ((8, 4, 1 << 20),)),
    ],
)
def test_bits_follow_the_element(pieces, words):
    seed = (7 << 32) + 9
    at = philox.linear_index(pieces).numpy()
    for got, want in zip(
        philox.element_words(pieces, seed, 3, 2, words), words_numpy(at, 3, 2, seed, words), strict=True
    ):
        assert (got.numpy() == want).all()


def test_a_part_has_the_bits_of_the_whole():
    whole = philox.element_bits(philox.whole_pieces((4, 6)), seed=1, op=3, step=2)
    part = philox.element_bits((((1, 2, 4),), ((0, 2, 2), (1, 2, 3))), 1, 3, 2)
    assert (part == whole.reshape(4, 2, 3)[1:3, :, 1:3].reshape(2, 4)).all()


def test_words_are_used_once():
    """Neighbours share a counter, never a word; other ops and steps have words of their own."""
    p = philox.whole_pieces((1 << 14,))
    draws = [philox.element_words(p, 5, op, step, 2) for op in (0, 1) for step in (0, 1)]
    pairs = torch.cat([a * (1 << 31) + (b >> 1) for a, b in draws])
    assert len(pairs.unique()) == len(pairs)


def _key(op=0) -> Any:
    return {"seed": 11, "op": op, "step": 4}


N = 200_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_moments(dtype):
    p = philox.whole_pieces((N,))
    u = random.uniform(p, dtype, -1.0, 3.0, **_key())
    assert u.dtype == dtype and u.min() >= -1 and u.max() < 3.01
    u = u.double()
    assert abs(u.mean() - 1) < 0.02 and abs(u.var() - 16 / 12) < 0.02
    z = random.normal(p, dtype, 0.5, 2.0, **_key(1)).double()
    assert abs(z.mean() - 0.5) < 0.02 and abs(z.std() - 2) < 0.02
    unit = (z - 0.5) / 2
    assert abs((unit**3).mean()) < 0.05 and abs((unit**4).mean() - 3) < 0.1
    e = random.exponential(p, dtype, 2.0, **_key(2)).double()
    assert e.min() > 0 and abs(e.mean() - 0.5) < 0.01 and abs(e.var() - 0.25) < 0.02
    assert abs(np.corrcoef(u.numpy(), z.numpy())[0, 1]) < 0.01


def test_discrete_draws():
    p = philox.whole_pieces((N,))
    x = torch.randn(N)
    y, mask = random.dropout(x, 0.3, **_key(), pieces=p)
    assert abs(mask.float().mean() - 0.7) < 0.005
    torch.testing.assert_close(y, x * mask / 0.7)
    assert (random.dropout(x, 0.0, **_key(), pieces=p)[0] == x).all()
    assert not random.dropout(x, 1.0, **_key(), pieces=p)[0].any()
    assert abs(random.bernoulli(0.2, p, torch.float32, **_key()).mean() - 0.2) < 0.005
    assert random.bernoulli(torch.tensor([0.0, 1.0]), (((0, 2, 2),),), torch.int64, **_key()).tolist() == [0, 1]
    counts = random.randint(p, -2, 3, torch.int64, **_key())
    assert counts.unique().tolist() == [-2, -1, 0, 1, 2]
    assert torch.bincount(counts + 2).min() > N / 5 * 0.97
    wide = random.randint(p, 0, 1 << 40, torch.int64, **_key())
    assert wide.min() >= 0 and wide.max() < 1 << 40 and wide.max() > 1 << 39
    assert sorted(random.randperm(50, torch.int64, **_key()).tolist()) == list(range(50))


def test_every_random_op_has_its_form():
    aten = torch.ops.aten
    x = torch.rand(3, 4)
    calls = [
        (aten.native_dropout.default, (x, 0.3, True), {}),
        (aten.native_dropout.default, (x, 0.3, False), {}),
        (aten.rand.default, ([3, 4],), {"dtype": torch.float64}),
        (aten.rand_like.default, (x,), {}),
        (aten.uniform.default, (x, -1.0, 1.0), {}),
        (aten.randn.default, ([3, 4],), {}),
        (aten.randn_like.default, (x,), {}),
        (aten.normal_functional.default, (x, 1.0, 2.0), {}),
        (aten.normal.Tensor_float, (x, 2.0), {}),
        (aten.normal.Tensor_Tensor, (x, x), {}),
        (aten.normal.float_float, (0.0, 1.0, [3]), {}),
        (aten.bernoulli.default, (x,), {}),
        (aten.bernoulli.p, (x, 0.25), {}),
        (aten.bernoulli.Tensor, (x, x), {}),
        (aten.bernoulli_.float, (x.clone(), 0.5), {}),
        (aten.uniform_.default, (x.clone(),), {}),
        (aten.normal_.default, (x.clone(), 0.0, 3.0), {}),
        (aten.exponential.default, (x,), {}),
        (aten.randint.default, (9, [5]), {}),
        (aten.randint.low, (2, 9, [5]), {}),
        (aten.randint_like.default, (x, 9), {}),
        (aten.randint_like.low_dtype, (x, 2, 9), {}),
        (aten.random.default, (x,), {}),
        (aten.random.to, (x, 5), {}),
        (getattr(aten.random, "from"), (x, 2, 5), {}),
        (aten.randperm.default, (7,), {}),
    ]
    for target, args, kwargs in calls:
        want = target(*args, **kwargs)
        build = random.canonical_random(target)
        assert build is not None, target
        node = SimpleNamespace(args=args, kwargs=kwargs, meta={"val": want})
        fn, new_args, new_kwargs = build(node, seed=1, op=2, step=3)
        got = fn(*new_args, **new_kwargs)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype, target
    assert random.canonical_random(aten.add.Tensor) is None


@pytest.mark.parametrize("pieces", [philox.whole_pieces((300_001,)), (((3, 70_001, 90_003),),)], ids=["whole", "part"])
def test_the_memory_model_knows_what_a_draw_holds(pieces):
    """Against every storage that a draw makes: at least its peak, and not far above."""
    n, shape = pieces[0][0][1], philox.local_shape(pieces)
    key = {"seed": 3, "op": 1, "step": 2}
    half, x = torch.bfloat16, torch.randn(shape)
    calls = [
        (random.dropout, (x, 0.1), {**key, "pieces": pieces}),
        (random.uniform, (pieces, torch.float32, 0.0, 1.0), key),
        (random.uniform, (pieces, half, 0.0, 2.0), key),
        (random.uniform, (pieces, torch.float64, 0.0, 2.0), key),
        (random.normal, (pieces, torch.float32, 0.0, 1.0), key),
        (random.normal, (pieces, half, 1.0, x), key),
        (random.exponential, (pieces, torch.float32, 1.0), key),
        (random.bernoulli, (0.5, pieces, half), key),
        (random.randint, (pieces, 0, 100, torch.int64), key),
        (random.randperm, (n, torch.int64), key),
    ]
    for target, args, kwargs in calls:
        seen = Storages([x])
        with seen:
            target(*args, **kwargs)
        specs = [spec_of(a) if isinstance(a, torch.Tensor) else a for a in args]
        said = Calls(None, False).effect(target, tuple(specs), kwargs).inside
        assert seen.peak <= said <= 1.7 * seen.peak, (target, args[:2], seen.peak, said)
