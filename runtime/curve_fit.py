"""Fits the two lines of a collective to a sweep of message sizes.

    seconds(w) = start + rate * w + gain * min(w / h, 1)      start, rate, gain >= 0
               = min(start + (rate + gain / h) w,  start + gain + rate w)

For each h the rest is linear: least squares of the relative errors, reweighted towards their fourth power so that no
size is far off. The best h of a grid wins. Sweeps span five decades of seconds: absolute errors would see the last size
only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ..partitioner.collective_cost import steps
from ..partitioner.hardware import Line

Sweep = Sequence[float] | np.ndarray
_KNEES, _ROUNDS = 16, 10
_LEAST_RATE = 1e-15
"""Seconds a byte of a line whose time does not grow within the sweep."""


def fit_curve(sent: Sweep, seconds: Sweep) -> tuple[float, float, float, float]:
    """Start (seconds), rate (seconds a byte), gain (seconds), h (bytes) of a sweep.

    Args:
        sent: bytes that a rank sends, at least two different sizes.
        seconds: of each.

    Raises:
        ValueError: fewer than two sizes, or a time that is not above 0.
    """
    w, t = np.asarray(sent, float), np.asarray(seconds, float)
    if w.shape != t.shape or len(np.unique(w)) < 2 or not np.all(t > 0):
        raise ValueError(f"a curve needs two sizes and times above 0; got {w.tolist()} and {t.tolist()}")
    knees = np.geomspace(min(w.min() * 1.5, w.max() / 4), w.max() / 4, _KNEES)
    columns = np.stack([np.broadcast_to(c, (_KNEES, len(w))) for c in (1.0, w, np.minimum(w / knees[:, None], 1))], 2)
    found, errors = _fitted(columns / t[:, None])
    best = int(np.argmin(errors))
    start, rate, gain = found[best].tolist()
    return start, max(rate, _LEAST_RATE), gain, float(knees[best])


def fit_lines(kind: str, ranks: int, sent: Sweep, seconds: Sweep, step: float) -> tuple[Line, ...]:
    """The lines of one kind of collective, measured over `ranks` ranks.

    `step` is the seconds of a small message to one peer: what the start takes beyond it is laid to the further steps of
    a tree, so that other numbers of ranks are priced by theirs. After a single step a further one is another message.
    """
    start, rate, gain, h = fit_curve(sent, seconds)
    many = steps(kind, ranks, Line(0.0, 0.0, 1.0, tree=True))
    hop = min(max(start - step, 0.0) / (many - 1) if many > 1 else step, start / many)
    base = max(start - hop * many, 0.0)
    small, large = Line(base, hop, 1 / (rate + gain / h), tree=True), Line(base + gain, hop, 1 / rate, tree=True)
    return (small, large) if gain else (large,)


def _fitted(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each fit, coefficients of at least 0 that bring every row near 1, and the mean fourth power of the errors."""
    many, rows, n = columns.shape
    weights, best, found = np.ones((many, rows)), np.full(many, np.inf), np.zeros((many, n))
    for _ in range(_ROUNDS):
        x = _nonnegative(columns * weights[:, :, None], weights)
        errors = np.abs(np.einsum("krn,kn->kr", columns, x) - 1)
        score = np.mean(errors**4, 1)
        better = score < best
        best, found = np.where(better, score, best), np.where(better[:, None], x, found)
        weights = weights * np.sqrt(errors / np.maximum(errors.max(1, keepdims=True), 1e-12) + 0.05)
        weights /= weights.max(1, keepdims=True)
    return found, best


def _nonnegative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with coefficients of at least 0, by trying every set of them: there are three."""
    many, _, n = a.shape
    norms = np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-300)
    unit = a / norms
    products, aims = np.einsum("krn,krm->knm", unit, unit) + 1e-13 * np.eye(n), np.einsum("krn,kr->kn", unit, b)
    best, found = np.full(many, np.inf), np.zeros((many, n))
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(1, n + 1)):
        at = list(chosen)
        x = np.zeros((many, n))
        x[:, at] = np.linalg.solve(products[:, at][:, :, at], aims[:, at, None])[:, :, 0]
        rest = np.sum((np.einsum("krn,kn->kr", unit, x) - b) ** 2, 1)
        better = np.all(x >= 0, 1) & (rest < best)
        best, found = np.where(better, rest, best), np.where(better[:, None], x, found)
    return found / norms[:, 0]
