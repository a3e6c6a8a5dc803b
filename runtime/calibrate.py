"""`mw.calibrate`: measures this machine once, for the planner.

    device   what large matrix products and copies reach                              `measure_device.py`
    links    of each axis the sweep of each collective, fitted by two lines a kind    `measure_links.py`, `curve_fit.py`

All ranks measure, the slowest counts, and all fit the same numbers: they return the same `Calibration`.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..partitioner.calibration import Calibration, MeasuredLink
from ..partitioner.errors import CalibrationError
from ..partitioner.hardware import Device, Link, detected
from ..partitioner.mesh import Mesh
from .comm import Comm
from .curve_fit import fit_lines
from .launch import check_world, comm_for, device_here, mesh_here
from .measure_device import DeviceRates, measure_device
from .measure_links import Case, measure_axis


def calibrate(mesh: Any, path: str | os.PathLike[str] | None = None) -> Calibration:
    """Measure the device and the links of a mesh: a few seconds, once a machine.

    Under `torchrun` every process calls it, and every axis is measured over torch.distributed. In one process the links
    are those of the in-process ranks: good for plans that run there, and for nothing else.

    Args:
        mesh: a `Mesh` or DeviceMesh of the machine that this runs on.
        path: the file to write (by rank 0), for `Mesh(..., calibration=path)` or `MESHWRIGHT_CALIBRATION`.

    Returns:
        What was measured, the same on every rank; `print` shows it as a table.

    Raises:
        CalibrationError: the mesh is of another device than this machine's, or the file cannot be written.
        PlanError: the mesh does not match the processes.
    """
    mesh = mesh_here(mesh)
    check_world(mesh, "global")
    here = detected()
    if mesh.device.name != here:
        raise CalibrationError(
            f"the mesh is of device {mesh.device.name!r}, but this machine has {here!r}: measure there"
        )
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise CalibrationError(f"{path}: its folder does not exist")
    device, comm = device_here(), comm_for(mesh)
    try:
        rates = measure_device(device)
        cases = {axis: measure_axis(comm, mesh, axis, device) for axis, k in mesh.axes if k > 1}
    finally:
        _close(comm)
    found = _calibration(mesh, _agreed_rates(rates, device), {a: _agreed(of, device) for a, of in cases.items()})
    if path is not None:
        _save(found, path, device)
    return found


def _calibration(
    mesh: Mesh, rates: DeviceRates, sweeps: dict[str, dict[str, list[tuple[float, float]]]]
) -> Calibration:
    links = tuple(
        MeasuredLink(a, mesh.sizes[a], measured_link(mesh.link[a], mesh.sizes[a], of)) for a, of in sweeps.items()
    )
    return Calibration(_device(mesh.device, rates), links)


def _device(preset: Device, rates: DeviceRates) -> Device:
    """The preset with what was measured; what was not is the share of its peak that the preset expects."""
    flops = dict(rates.flops)
    main = flops.pop("float32" if preset.name == "cpu" else max(("bfloat16", "float16"), key=lambda d: flops[d]))
    rest = {dtype: peak * preset.efficiency for dtype, peak in preset.peaks} | flops
    return replace(
        preset, matmul_flops=main, memory_bandwidth=rates.copy, memory=rates.memory or preset.memory,
        peaks=tuple(rest.items()), efficiency=1.0, memory_share=1.0,
    )  # fmt: skip


def measured_link(preset: Link, ranks: int, sweeps: dict[str, list[tuple[float, float]]]) -> Link:
    """The preset with lines fitted to {kind: [(bytes sent, seconds)]} of so many ranks."""
    step = min(seconds for _, seconds in sweeps["permute"])
    own = {}
    for kind in sweeps:
        sent, seconds = zip(*sweeps[kind], strict=True)
        own[kind] = fit_lines(kind, ranks, sent, seconds, step)
    own["halo"] = own["permute"]
    bandwidth = own["all_reduce"][-1].bandwidth
    return replace(preset, bandwidth=bandwidth, latency=step, switch=None, own=tuple(own.items()))


def _agreed(cases: list[Case], device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """{kind: [(bytes sent, seconds of the fastest batch, each as long as its slowest rank)]}."""
    slowest = iter(_over_ranks([seconds for case in cases for seconds in case.seconds], device))
    found: dict[str, list[tuple[float, float]]] = {case.kind: [] for case in cases}
    for case in cases:
        found[case.kind].append((case.sent, min(itertools.islice(slowest, len(case.seconds)))))
    return found


def _agreed_rates(rates: DeviceRates, device: torch.device) -> DeviceRates:
    """The rates of the slowest rank, and the least memory."""
    share = core_share(device)
    some = [rates.memory, share * rates.copy, *(share * f for _, f in rates.flops)]
    memory, copy, *flops = (-v for v in _over_ranks([-v for v in some], device))
    names = [name for name, _ in rates.flops]
    return DeviceRates(tuple(zip(names, flops, strict=True)), copy, memory)


def core_share(device: torch.device) -> float:
    """Of a core, what a thread of a rank gets while all ranks of this machine compute.

    The best of short runs is that of a core alone, but a step has all ranks at work at once: four on two cores get half
    a core each. What other programs take is no property of the machine, and is not counted.
    """
    if device.type != "cpu" or not dist.is_initialized():
        return 1.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    return min(1.0, cores / (ranks * torch.get_num_threads()))


def _over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The largest value of any process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    every = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.tolist()


def _save(found: Calibration, path: str | os.PathLike[str], device: torch.device) -> None:
    """Rank 0 writes; every rank knows whether it could before any goes on."""
    problem: OSError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found.save(path)
        except OSError as error:
            problem = error
    if _over_ranks([float(problem is not None)], device)[0]:
        raise CalibrationError(f"{path}: cannot be written by rank 0: {problem or 'see its message'}") from problem


def _close(comm: Comm) -> None:
    close = getattr(comm, "close", None)
    if close is not None:
        close()
