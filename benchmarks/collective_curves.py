"""Fits the curves of `meshwright` to published sweeps of collectives and prints the errors as a table.

    python benchmarks/collective_curves.py [sweeps.csv]        default: benchmarks/data/collective_curves.csv

Five ways, each row's error being |fitted / measured - 1|, median and worst in percent:
    line     one latency and one bandwidth for the sweep, the usual model
    sweep    the two lines that `mw.calibrate` fits to the sweep of one collective over one group
    ranks    two lines (six numbers) for one collective over all groups of the system; one that was swept once has none
    system   two lines (six numbers) for all collectives and groups of the system
    preset   nothing fitted: the presets of the package, from datasheets
A row that no function growing with size can meet within 25 % (it takes over 5/3 of the time of a larger message) is
left out and counted.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from meshwright.partitioner.collective_cost import Levels, collective_seconds, steps
from meshwright.partitioner.hardware import LINKS, Line
from meshwright.runtime.curve_fit import fit_curve

DATA = Path(__file__).parent / "data" / "collective_curves.csv"
PRESETS = {"A100-8": "nvlink3", "H200-8": "nvlink4", "B200-8": "nvlink5", "Galvatron": "nvlink3"}
BETWEEN = "eth-400"  # of the systems with several nodes


@dataclass(frozen=True)
class Sweep:
    """One collective over one group: bytes that a rank sends, and seconds."""

    system: str
    kind: str
    ranks: int
    nodes: int
    sent: np.ndarray
    seconds: np.ndarray
    left_out: int

    @property
    def levels(self) -> Levels:
        """As the presets have it; () for a system without one."""
        inside = next((LINKS[name] for start, name in PRESETS.items() if self.system.startswith(start)), None)
        if inside is None:
            return ()
        return ((self.nodes, LINKS[BETWEEN]), (self.ranks // self.nodes, inside))


def sweeps(path: Path) -> list[Sweep]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    groups: dict[tuple[str, str, int, int], list[tuple[float, float]]] = {}
    for r in rows:
        key = (r["system"], r["op"], int(r["n_ranks"]), int(r["n_nodes"]))
        groups.setdefault(key, []).append((float(r["bytes"]), float(r["time_us"]) * 1e-6))
    return [_sweep(key, of) for key, of in sorted(groups.items())]


def _sweep(key: tuple[str, str, int, int], points: list[tuple[float, float]]) -> Sweep:
    _, kind, ranks, _ = key
    points.sort()
    kept = [(n, t) for i, (n, t) in enumerate(points) if t * 3 <= 5 * min([later for _, later in points[i:]])]
    share = (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    nbytes, seconds = np.array(kept).T
    return Sweep(*key, nbytes * share, seconds, len(points) - len(kept))


def by_line(sweep: Sweep) -> np.ndarray:
    """Least squares of relative errors with one latency and one bandwidth."""
    columns = np.stack([np.ones_like(sweep.sent), sweep.sent], 1)
    x = np.linalg.lstsq(columns / sweep.seconds[:, None], np.ones_like(sweep.sent), rcond=None)[0]
    return columns @ x


def by_sweep(sweep: Sweep) -> np.ndarray:
    start, rate, gain, h = fit_curve(sweep.sent, sweep.seconds)
    return start + rate * sweep.sent + gain * np.minimum(sweep.sent / h, 1)


def by_lines(of: list[Sweep]) -> list[np.ndarray] | list[None]:
    """One base, hop and bandwidth below a size and one above, the cheaper of the two, for every sweep."""
    if len(of) < 2:
        return [None] * len(of)
    sent, seconds = np.concatenate([s.sent for s in of]), np.concatenate([s.seconds for s in of])
    tree = Line(0.0, 0.0, 1.0, tree=True)
    hops = np.concatenate([np.full(len(s.sent), steps(s.kind, s.ranks, tree)) for s in of])
    columns = np.stack([np.ones_like(sent), hops, sent], 1)
    best, found = np.inf, seconds
    for knee in np.geomspace(sent.min() * 2, sent.max() / 2, 24):
        fits = [columns @ _relative(columns[rows], seconds[rows]) for rows in (sent < knee, sent >= knee)]
        guess = np.minimum(*fits)
        score = float(np.mean(np.abs(guess / seconds - 1) ** 4))
        if score < best and guess.min() > 0:
            best, found = score, guess
    return np.split(found, np.cumsum([len(s.sent) for s in of])[:-1])


def _relative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    for chosen in ([0, 1, 2], [0, 2], [1, 2], [2]):
        x = np.zeros(3)
        x[chosen] = np.linalg.lstsq(columns[:, chosen] / seconds[:, None], np.ones_like(seconds), rcond=None)[0]
        if np.all(x >= 0):
            break
    return x


def by_preset(sweep: Sweep) -> np.ndarray | None:
    return collective_seconds(sweep.kind, sweep.levels, sweep.sent) if sweep.levels else None


def errors(guess: np.ndarray | None, sweep: Sweep) -> np.ndarray:
    return np.array([]) if guess is None else np.abs(guess / sweep.seconds - 1)


def _cell(of: Iterable[np.ndarray]) -> str:
    every = np.concatenate(list(of))
    return f"{np.median(every) * 100:.1f} / {every.max() * 100:.1f}" if every.size else "-"


def table(found: list[Sweep]) -> str:
    """The errors by system and collective, in Markdown."""
    ways: list[Callable[[Sweep], np.ndarray | None]] = [by_line, by_sweep, by_preset]
    lines = [
        "| system | collective | ranks | rows | left out | line | sweep | ranks | system | preset |",
        "|---" * 10 + "|",
    ]
    for system, of_system in itertools.groupby(found, key=lambda s: s.system):
        of = list(of_system)
        shared = by_lines(of)
        for kind in dict.fromkeys(s.kind for s in of):
            these = [(s, g) for s, g in zip(of, shared, strict=True) if s.kind == kind]
            line, sweep, preset = (_cell(errors(way(s), s) for s, _ in these) for way in ways)
            together = _cell(errors(g, s) for s, g in these)
            of_kind = [s for s, _ in these]
            every_rank = _cell(errors(g, s) for s, g in zip(of_kind, by_lines(of_kind), strict=True))
            ranks = ", ".join(str(s.ranks) for s, _ in these)
            rows, out = sum(len(s.sent) for s, _ in these), sum(s.left_out for s, _ in these)
            cells = (system.partition(" (")[0], kind, ranks, rows, out, line, sweep, every_rank, together, preset)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sweeps(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)))
