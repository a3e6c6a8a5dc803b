"""What `mw.calibrate` measured of a machine: its device and its links, kept in one JSON file.

A measured link replaces the preset of the same name on the axis that was measured, else on every axis with that preset;
the measured device replaces the preset of its name. Everything measured is what programs get, so shares are 1.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .collective_cost import KINDS, MESSAGES
from .errors import CalibrationError
from .fields import Fields
from .hardware import DEVICES, LINKS, Device, Line, Link

VERSION = 1
VARIABLE = "MESHWRIGHT_CALIBRATION"
"""The environment variable that names a file for every mesh."""


@dataclass(frozen=True)
class MeasuredLink:
    """The link of one axis: `link` has the name of the preset it replaces, and its lines by kind of collective."""

    axis: str
    ranks: int
    link: Link


@dataclass(frozen=True)
class Calibration:
    """Measured rates of one machine. `print` shows them; `save` and `load` keep them."""

    device: Device
    links: tuple[MeasuredLink, ...] = ()

    def link(self, axis: str, preset: Link) -> Link:
        """What was measured of that preset: on the axis itself, else on the axis with most ranks, else the preset."""
        same = [m for m in self.links if m.link.name == preset.name]
        best = max(same, key=lambda m: (m.axis == axis, m.ranks), default=None)
        return preset if best is None else best.link

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` wrote.

        Raises:
            CalibrationError: the file is missing or is no calibration; the message names the file and the field.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{path}: no calibration can be read: {error}; mw.calibrate writes one") from error
        return cls.from_dict(content, str(path))

    def as_dict(self) -> dict[str, Any]:
        """The content of the file, in plain numbers."""
        d = self.device
        device = {
            "name": d.name, "matmul_flops": d.matmul_flops, "memory_bandwidth": d.memory_bandwidth,
            "memory": d.memory, "peaks": dict(d.peaks),
        }  # fmt: skip
        return {"calibration": VERSION, "device": device, "links": {m.axis: _link_dict(m) for m in self.links}}

    @classmethod
    def from_dict(cls, content: Any, where: str = "calibration") -> Calibration:
        """The reverse of `as_dict`; `where` is what errors name.

        Raises:
            CalibrationError: a field is missing, unknown, or no positive number.
        """
        fields = Fields(content, where)
        version = fields.number("calibration")
        if version != VERSION:
            fields.fail("calibration", f"format {version:g} is not {VERSION}, which is read here: calibrate again")
        device = _device(fields.inner("device"))
        links = fields.inner("links")
        found = tuple(_measured(axis, links.inner(axis)) for axis in links.names())
        fields.done()
        return cls(device, found)

    def __str__(self) -> str:
        d = self.device
        lines = [f"device {d.name}: {_rate(d.matmul_flops, 'flop/s')}, memory {_rate(d.memory_bandwidth, 'B/s')}"]
        lines += [f"  {dtype:<12}{_rate(peak, 'flop/s'):>14}" for dtype, peak in d.peaks]
        for m in self.links:
            lines.append(f"axis {m.axis} of {m.ranks} ranks, {m.link.name}")
            lines.append(f"  {'collective':<16}{'start':>12}{'small':>14}{'large':>14}")
            lines += [_row(kind, of, m.ranks) for kind, of in m.link.own]
        return "\n".join(lines)


Given = Calibration | str | os.PathLike[str] | dict[str, Any] | None
"""A calibration, its file, or the content of its file."""


def calibration_for(device: Device, given: Given) -> Calibration | None:
    """The calibration of a mesh: what was given, else the file that the environment names where it is of this device.

    Raises:
        CalibrationError: it cannot be read.
        ValueError: it was given, and is of another device.
    """
    source = os.environ.get(VARIABLE) if given is None else given
    if source is None or source == "":
        return None
    if isinstance(source, dict):
        found = Calibration.from_dict(source)
    else:
        found = source if isinstance(source, Calibration) else Calibration.load(source)
    if found.device.name == device.name:
        return found
    if given is None:
        return None
    raise ValueError(f"the calibration is of device {found.device.name!r}, but the mesh is of {device.name!r}")


def _device(fields: Fields) -> Device:
    name = fields.text("name", DEVICES)
    rates = {key: fields.number(key) for key in ("matmul_flops", "memory_bandwidth", "memory")}
    peaks = fields.inner("peaks")
    of = tuple((dtype, peaks.number(dtype)) for dtype in peaks.names())
    fields.done()
    return replace(DEVICES[name], **rates, peaks=of, efficiency=1.0, memory_share=1.0)


def _measured(axis: str, fields: Fields) -> MeasuredLink:
    name = fields.text("link", LINKS)
    ranks, latency, bandwidth = fields.whole("ranks"), fields.number("latency"), fields.number("bandwidth")
    kinds = fields.inner("collectives")
    own = tuple((kind, tuple(_line(f) for f in kinds.items(kind))) for kind in kinds.names(KINDS | MESSAGES))
    fields.done()
    return MeasuredLink(axis, ranks, Link(name, bandwidth, latency, LINKS[name].lines, None, own))


def _line(fields: Fields) -> Line:
    made = Line(fields.number("base", 0.0), fields.number("hop", 0.0), fields.number("bandwidth"), tree=True)
    fields.done()
    return made


def _link_dict(m: MeasuredLink) -> dict[str, Any]:
    kinds = {k: [{"base": x.base, "hop": x.hop, "bandwidth": x.bandwidth} for x in of] for k, of in m.link.own}
    return {
        "link": m.link.name, "ranks": m.ranks, "latency": m.link.latency, "bandwidth": m.link.bandwidth,
        "collectives": kinds,
    }  # fmt: skip


def _row(kind: str, lines: tuple[Line, ...], ranks: int) -> str:
    steps = (ranks - 1).bit_length() * (2 if kind == "all_reduce" else 1)
    if kind in {"permute", "halo"} | MESSAGES:
        steps = 1
    start = min(line.base + line.hop * steps for line in lines)
    small, large = _rate(lines[0].bandwidth, "B/s"), _rate(lines[-1].bandwidth, "B/s")
    return f"  {kind:<16}{start * 1e6:>9.1f} us{small:>14}{large:>14}"


def _rate(value: float, unit: str) -> str:
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"
