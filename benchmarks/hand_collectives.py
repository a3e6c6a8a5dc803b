"""Times all-reduces written as messages over gloo, beside torch's own and the prices of the cost model.

    OMP_NUM_THREADS=1 python benchmarks/hand_collectives.py measure     writes benchmarks/data/hand_collectives.csv
    python benchmarks/hand_collectives.py rank                          prices against times, pair by pair
    python benchmarks/hand_collectives.py plot                          docs/hand_collectives.png

Calls of all algorithms, and the messages that prices are made of, take turns, round after round, so that a ratio
compares the same seconds of one machine. A round has a few short batches of each; a batch takes as long as its slowest
rank, and the fastest counts, as in `mw.calibrate`: what else runs is no property of the machine. Prices are of links
fitted to the medians of the rounds, as `mw.calibrate` fits its own. Two algorithms are a tie where the times of the
rounds differ in either direction in more than a quarter of the rounds, or where their prices are within 10 %, which is
as well as two lines fit a sweep (`docs/hardware.md`); `rank --within 0.01` counts those too.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import meshwright as mw
import torch
import torch.distributed as dist
import typer
from meshwright.partitioner.calibration import Calibration, MeasuredLink
from meshwright.partitioner.collective_cost import collective_seconds
from meshwright.partitioner.collective_programs import ALGORITHMS, even, hand_program
from meshwright.partitioner.hand_cost import hand_seconds, program_for
from meshwright.partitioner.transfer import Transfer
from meshwright.runtime.calibrate import measured_link
from meshwright.runtime.comm import Start, Wait
from meshwright.runtime.distributed import DistributedComm
from meshwright.runtime.hand_collectives import by_hand
from meshwright.runtime.measure_links import HAND, Case, ring_bytes, sweep

RANKS, SIZES = (2, 3, 4), (1 << 16, 1 << 20, 1 << 25)
BATCHES = {1 << 16: 5, 1 << 20: 3, 1 << 25: 1}
PARTS = ("permute", "all_reduce", *HAND)
SWEEP = {1 << 14: 4, 1 << 16: 4, 1 << 18: 3, 1 << 20: 3, 1 << 22: 2, 1 << 25: 1}
"""Of each size of the parts, its batches a round."""
WITHIN = 0.1
"""Prices that differ by less say nothing about an order."""
DATA = Path(__file__).parent / "data" / "hand_collectives.csv"
Csv = Annotated[Path, typer.Option("--csv")]
app = typer.Typer(add_completion=False)


def names(k: int) -> tuple[str, ...]:
    """Over one axis "hierarchical" is the ring: it is timed where there are two."""
    return ("torch", *(a for a in ALGORITHMS if a != "hierarchical" or k == 4))


def mesh_of(k: int, name: str, **more: Any) -> mw.Mesh:
    if name == "hierarchical":
        return mw.Mesh(dp_replicate=2, dp_shard=2, device="cpu", **more)
    return mw.Mesh(dp=k, device="cpu", **more)


def price(mesh: mw.Mesh, name: str, nbytes: int) -> float:
    axes, k = mesh.names, mesh.world_size
    if name == "torch":
        return collective_seconds("all_reduce", mesh.levels(axes), 2 * nbytes * (k - 1) / k)
    return hand_seconds(program_for(name, "all_reduce", axes, mesh, nbytes), mesh.levels(axes), nbytes)


def call(comm: DistributedComm, mesh: mw.Mesh, name: str, x: torch.Tensor, batches: int, repeats: int) -> list[float]:
    """Of each batch, seconds of a call on this rank."""

    def program():
        transfer = Transfer("all_reduce", mesh.names, tuple(x.shape), tuple(x.shape))
        return (yield Wait((yield Start((transfer,), (x,)))))

    found = []
    for _ in range(batches):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            made = program()
            comm.run([made if name == "torch" else by_hand(made, name, mesh, comm.rank)])
        found.append((time.perf_counter() - begin) / repeats)
    return found


def parts_of(comm: DistributedComm, mesh: mw.Mesh) -> list[Case]:
    """One round of the parts: messages, torch's all-reduce, the copy into a buffer."""
    k, axis = mesh.world_size, mesh.names[0]
    wholes = {-(-n // (4 * k)) * 4 * k: batches for n, batches in SWEEP.items()}
    cases = [Case(kind, n, ring_bytes(kind, n, k), [0.0] * b) for kind in PARTS for n, b in wholes.items()]
    comm.run([sweep(mesh, axis, comm.rank, cases, torch.device("cpu"))])
    return cases


def fitted(k: int, rounds: list[list[Case]]) -> Calibration:
    """The links of the medians of all rounds, each round as long as its fastest batch on its slowest rank."""
    took = torch.tensor([[s for case in of for s in case.seconds] for of in rounds], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    fastest = [x.amin(1) for x in took.split([len(case.seconds) for case in rounds[0]], 1)]
    sweeps: dict[str, list[tuple[float, float]]] = {}
    for case, seconds in zip(rounds[0], fastest, strict=True):
        sweeps.setdefault(case.kind, []).append((case.sent, float(seconds.quantile(0.5))))
    mesh = mesh_of(k, "ring")
    return Calibration(mesh.device, (MeasuredLink("dp", k, measured_link(mesh.link["dp"], k, sweeps)),))


def timed(rank: int, k: int, rounds: int) -> list[tuple[Any, ...]]:
    """(ranks, bytes, algorithm, price, seconds of each round) of all algorithms and sizes, on rank 0."""
    meshes = {name: mesh_of(k, name) for name in names(k)}
    comms = {mesh.names: DistributedComm(mesh) for mesh in meshes.values()}
    parts, took = [], {nbytes: [] for nbytes in SIZES}
    for at in range(rounds + 1):
        found = parts_of(comms[meshes["ring"].names], meshes["ring"])
        parts += [found] if at else []
        for nbytes in SIZES:
            x, repeats = torch.ones(nbytes // 4), max(1, (1 << 18) // nbytes)
            order = list(meshes)[at % len(meshes) :] + list(meshes)[: at % len(meshes)]
            own = {n: call(comms[meshes[n].names], meshes[n], n, x, BATCHES[nbytes], repeats) for n in order}
            took[nbytes] += [[own[n] for n in meshes]] if at else []
    measured = fitted(k, parts)
    rows = []
    for nbytes in SIZES:
        slowest = torch.tensor(took[nbytes], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        slowest = slowest.amin(2)
        for i, name in enumerate(meshes):
            said = price(mesh_of(k, name, calibration=measured), name, nbytes)
            rows.append((k, nbytes, name, said, *slowest[:, i].tolist()))
    if rank == 0:
        print(measured)
    for comm in comms.values():
        comm.close()
    return rows


def launch(k: int, rounds: int) -> list[list[str]]:
    """Forks k processes; the rows of the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(k):
            child = os.fork()
            if child == 0:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(k), "LOCAL_WORLD_SIZE": str(k)}
                wait = timedelta(seconds=300)
                dist.init_process_group("gloo", f"file://{folder}/store", timeout=wait, rank=rank, world_size=k)
                rows = timed(rank, k, rounds)
                if rank == 0:
                    with (folder / "rows").open("w") as file:
                        csv.writer(file).writerows(rows)
                dist.barrier()
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        with (folder / "rows").open() as file:
            return list(csv.reader(file))


@app.command()
def measure(csv_path: Csv = DATA, rounds: int = 12) -> None:
    """Time everything: about two minutes on a machine that does nothing else."""
    torch.set_num_threads(1)
    rows = [row for k in RANKS for row in launch(k, rounds)]
    with csv_path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["ranks", "bytes", "algorithm", "price", *(f"round_{i}" for i in range(rounds))])
        out.writerows([*row[:3], *(f"{float(v):.6f}" for v in row[3:])] for row in rows)
    rank(csv_path)


def read(path: Path) -> dict[tuple[int, int], dict[str, tuple[float, list[float]]]]:
    """{(ranks, bytes): {algorithm: (price, seconds by round)}}."""
    found: dict[tuple[int, int], dict[str, tuple[float, list[float]]]] = {}
    with path.open() as file:
        for k, nbytes, name, said, *took in list(csv.reader(file))[1:]:
            found.setdefault((int(k), int(nbytes)), {})[name] = float(said), [float(t) for t in took]
    return found


def tie(a: list[float], b: list[float]) -> bool:
    wins = sum(x < y for x, y in zip(a, b, strict=True))
    return min(wins, len(a) - wins) > len(a) / 4


@app.command()
def rank(csv_path: Csv = DATA, within: float = WITHIN) -> None:
    """A row a group and size: the order by time and by price, and pairs of one order, of the other, and ties."""
    for (k, nbytes), of in read(csv_path).items():
        good, bad, ties = 0, [], 0
        for a, b in itertools.combinations(of, 2):
            if tie(of[a][1], of[b][1]) or abs(math.log(of[a][0] / of[b][0])) < math.log1p(within):
                ties += 1
            elif (statistics.median(of[a][1]) < statistics.median(of[b][1])) == (of[a][0] < of[b][0]):
                good += 1
            else:
                bad.append(f"{a}/{b}")
        print(f"{k} ranks, {nbytes} bytes: {good} pairs alike, {len(bad)} not {bad}, {ties} ties")
        for name in sorted(of, key=lambda n: statistics.median(of[n][1])):
            print(f"    {name:14} {1e3 * statistics.median(of[name][1]):9.3f} ms, price {1e3 * of[name][0]:9.3f}")


@app.command()
def plot(csv_path: Csv = DATA, png: Path = Path("docs/hand_collectives.png")) -> None:
    """Bytes of the busiest rank by formula, and medians at 64 KB and 32 MB, against the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4))
    shown = [a for a in ALGORITHMS if a != "hierarchical"]
    for name in shown:
        busiest = []
        for k in range(2, 17):
            made = hand_program(name, "all_reduce", (k,))
            sent = made.sent(even(720720, made.chunks))
            busiest.append(max(sum(v for (a, _), v in sent.items() if a == m) for m in range(k)) / 720720)
        panels[0].plot(range(2, 17), busiest, marker=".", label=name)
    panels[0].set(xlabel="ranks", ylabel="bytes sent by the busiest rank / n", title="an all-reduce of n bytes")
    panels[0].set_yscale("log")
    found = read(csv_path)
    for panel, nbytes in ((panels[1], SIZES[0]), (panels[2], SIZES[-1])):
        for name in [*shown, "torch"]:
            took = [1e3 * statistics.median(found[k, nbytes][name][1]) for k in RANKS]
            panel.plot(RANKS, took, marker="o", label=name)
        panel.set(xlabel="ranks", ylabel="ms", xticks=RANKS, title=f"{nbytes >> 10} KB over gloo, two cores")
    panels[1].legend()
    figure.tight_layout()
    figure.savefig(png, dpi=90)


if __name__ == "__main__":
    app()
