"""The mesh: named axes over ranks, and what a user's axis name means.

Ranks are numbered row-major over the axes in the order given, the last axis fastest:

    rank = ((c_0 * n_1 + c_1) * n_2 + c_2) ...        (`Mesh.coord`, `Mesh.rank_of`)

An axis whose name has a *role* restricts what the planner may do with it; any other name is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

from .calibration import Given, calibration_for
from .hardware import Device, Link, device_named, link_named

TIME = "micro"
"""The axis of micro-batches: ranks in time, one after another, of the same device. `Mesh.in_time` adds it."""

ROLES = {
    TIME: "data",
    "dp": "data",
    "dp_replicate": "data",
    "dp_shard": "data",
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
}
"""Axis names that mean something to users of Megatron-LM, torchtitan and FSDP2, and their role."""


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes over ranks: `Mesh(dp=2, tp=4)`.

    Args:
        device: a preset name (`"h100"`, `"cpu"`, ...); detected from the machine when None.
        links: `{axis: preset name}` for axes whose link is not the device's own.
        calibration: what `mw.calibrate` measured, or the file it wrote; by default the file that the environment
            variable `MESHWRIGHT_CALIBRATION` names, if any. It replaces the presets of the links and the device that it
            measured; a file of the environment that measured another device is for other meshes and is left alone.
        **axes: axis name -> number of ranks, slowest axis first.

    Raises:
        ValueError: no axis, a size below 1, an unknown device or link name, a calibration of another device.
        CalibrationError: the calibration's file cannot be read.
    """

    axes: tuple[tuple[str, int], ...]
    device: Device
    links: tuple[tuple[str, Link], ...] = field(default=())
    compared: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Lines of what `auto_mesh` compared; no part of what the mesh is."""

    def __init__(
        self,
        *sizes: Any,
        device: str | None = None,
        links: dict[str, str] | None = None,
        calibration: Given = None,
        **axes: int,
    ):
        if sizes:
            raise ValueError(f"a mesh has named axes, such as Mesh(dp=2, tp=4); got {', '.join(map(repr, sizes))}")
        bad = {a: n for a, n in axes.items() if not isinstance(n, int) or isinstance(n, bool) or n < 1}
        if bad or not axes:
            given = ", ".join(f"{a}={n!r}" for a, n in axes.items()) or "no axis"
            raise ValueError(f"a mesh needs axes with sizes of at least 1, such as Mesh(dp=2, tp=4); got {given}")
        if TIME in axes:
            raise ValueError(f"the axis {TIME!r} stands for micro-batches: pass micro_batches={axes[TIME]!r} instead")
        unknown = set(links or {}) - set(axes)
        if unknown:
            raise ValueError(f"links name {sorted(unknown)}, but the mesh has the axes {sorted(axes)}")
        preset = device_named(device)
        own = {a: preset.link for a in axes} | {a: link_named(n) for a, n in (links or {}).items()}
        measured = calibration_for(preset, calibration)
        if measured is not None:
            own = {a: measured.link(a, link) for a, link in own.items()}
            preset = measured.device
        self._set(tuple(axes.items()), preset, tuple(own.items()))

    def _set(self, axes: tuple[tuple[str, int], ...], device: Device, links: tuple[tuple[str, Link], ...]) -> None:
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "links", links)

    def beside(self, compared: tuple[str, ...]) -> Mesh:
        """This mesh, with the lines of what it was compared to."""
        made = Mesh.__new__(Mesh)
        made._set(self.axes, self.device, self.links)
        object.__setattr__(made, "compared", compared)
        return made

    def __hash__(self) -> int:
        return hash(self.axes)  # meshes are keys of caches: what is long is left to ==

    @classmethod
    def from_device_mesh(cls, device_mesh: Any) -> Mesh:
        """The mesh of a `torch.distributed.DeviceMesh`, which must name its dims.

        Raises:
            ValueError: the dims have no names, or the ranks are not in row-major order.
        """
        names = device_mesh.mesh_dim_names
        if not names:
            raise ValueError("the DeviceMesh has no dim names; pass mesh_dim_names=('dp', 'tp') to init_device_mesh")
        ranks = device_mesh.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise ValueError(f"the DeviceMesh numbers its ranks {ranks}; meshwright needs row-major order from 0")
        return cls(**dict(zip(names, device_mesh.mesh.shape, strict=True)))

    def __str__(self) -> str:
        return ", ".join(f"{a}={n}" for a, n in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name -> number of ranks."""
        return dict(self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(a for a, _ in self.axes)

    @cached_property
    def world_size(self) -> int:
        return math.prod(n for _, n in self.axes)

    @cached_property
    def link(self) -> dict[str, Link]:
        """Axis name -> the link its ranks talk over."""
        return dict(self.links)

    def levels(self, axes: tuple[str, ...]) -> tuple[tuple[int, Link], ...]:
        """(ranks, link) of each of the axes: what `collective_cost.collective_seconds` prices a group by."""
        found = self._levels.get(axes)
        if found is None:
            found = self._levels[axes] = tuple((self.sizes[a], self.link[a]) for a in axes)
        return found

    @cached_property
    def _levels(self) -> dict[tuple[str, ...], tuple[tuple[int, Link], ...]]:
        return {}

    def role(self, axis: str) -> str:
        """`"data"`, `"tensor"`, `"context"`, `"expert"`, `"pipeline"`, or `"free"`."""
        return ROLES.get(axis.partition(".")[0], "free")

    def refined(self, axis: str, sizes: tuple[int, ...]) -> Mesh:
        """The same ranks with one axis written as several, `tp` as `tp.0`, `tp.1`, the first outermost.

        A factor that an axis is too large for can then be split by a part of it, and another factor by the rest.
        """
        if math.prod(sizes) != self.sizes[axis] or any(k < 1 for k in sizes):
            raise ValueError(f"{sizes} do not multiply to {axis}={self.sizes[axis]}")
        axes: dict[str, int] = {}
        links: dict[str, Link] = {}
        for name, n in self.axes:
            parts = {f"{name}.{i}": k for i, k in enumerate(sizes)} if name == axis else {name: n}
            axes |= parts
            links |= dict.fromkeys(parts, self.link[name])
        made = Mesh.__new__(Mesh)
        made._set(tuple(axes.items()), self.device, tuple(links.items()))
        return made

    def in_time(self, micro_batches: int) -> Mesh:
        """This mesh and, outermost, an axis of micro-batches. Rank r at micro-batch i is rank i * world_size + r of it.

        What moves between micro-batches moves in the device's own memory.
        """
        memory = Link("memory", self.device.memory_bandwidth * self.device.memory_share, 0.0)
        made = Mesh.__new__(Mesh)
        made._set(((TIME, micro_batches), *self.axes), self.device, ((TIME, memory), *self.links))
        return made

    def timeline(self, micro_batches: int) -> Mesh:
        """The axis of micro-batches alone."""
        timed, made = self.in_time(micro_batches), Mesh.__new__(Mesh)
        made._set(timed.axes[:1], self.device, timed.links[:1])
        return made

    @cached_property
    def space(self) -> Mesh:
        """This mesh without its axis in time."""
        if TIME not in self.sizes:
            return self
        made = Mesh.__new__(Mesh)
        made._set(
            tuple(x for x in self.axes if x[0] != TIME), self.device, tuple(x for x in self.links if x[0] != TIME)
        )
        return made

    @cached_property
    def coords(self) -> tuple[dict[str, int], ...]:
        """Of each rank, axis name -> index on that axis."""
        return tuple(dict(zip(self.names, c, strict=True)) for c in product(*(range(n) for _, n in self.axes)))

    def coord(self, rank: int) -> dict[str, int]:
        return self.coords[rank]

    def rank_of(self, coord: dict[str, int]) -> int:
        rank = 0
        for axis, n in self.axes:
            rank = rank * n + coord[axis]
        return rank

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axes` only, the last axis of `axes` fastest."""
        here = dict(self.coord(rank))
        pieces = product(*(range(self.sizes[a]) for a in axes))
        return tuple(self.rank_of(here | dict(zip(axes, piece, strict=True))) for piece in pieces)

    def group_size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[a] for a in axes)
