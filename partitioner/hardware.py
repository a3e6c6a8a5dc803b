"""Devices and links: the constants of the cost model, from vendors' datasheets.

    seconds of a line = base + hop * steps + sent bytes / bandwidth       (`collective_cost.py` takes the cheapest line)
    seconds of a call = max(flops / (efficiency * peak), bytes / (memory_share * memory_bandwidth))  (`compute_cost.py`)

All bandwidths are bytes a second in ONE direction; vendors usually print the sum of both. What a datasheet does not say
is how much of its rates a program gets: `LINK_SHARE`, `Device.efficiency` and `Device.memory_share` are round figures
that hold for no machine exactly. `mw.calibrate` measures a machine and replaces them (`docs/hardware.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

LINK_SHARE = 0.8
"""Of a link's datasheet bandwidth, what a collective of large messages gets: headers, credits, reads of memory."""


@dataclass(frozen=True)
class Line:
    """Seconds of one protocol of a link: `base + hop * steps + sent / bandwidth`.

    `steps` are those of a ring (k - 1 for k ranks, twice that for an all-reduce), or of a `tree` (log2 k). `base` and
    `hop` are seconds, `bandwidth` bytes a second in one direction.
    """

    base: float
    hop: float
    bandwidth: float
    tree: bool = False


@dataclass(frozen=True)
class Link:
    """A link between ranks.

    Attributes:
        name: of the preset.
        bandwidth: bytes a second in one direction, by the datasheet.
        latency: seconds of one step of a collective.
        lines: the protocols of a collective, of which the cheapest is taken; one of `latency` and `bandwidth` if empty.
        switch: the line of collectives that the switch computes (NVLS, SHARP); None where it does not.
        own: {kind of collective: lines} as measured, in place of `lines` and `switch`; as pairs.
    """

    name: str
    bandwidth: float
    latency: float
    lines: tuple[Line, ...] = ()
    switch: Line | None = None
    own: tuple[tuple[str, tuple[Line, ...]], ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # links are keys of the caches that prices are looked up in

    def lines_of(self, kind: str) -> tuple[Line, ...]:
        """The lines of a kind of collective, without the switch's."""
        return dict(self.own).get(kind) or self.lines or (Line(0.0, self.latency, self.bandwidth),)

    @property
    def has_messages(self) -> bool:
        """Whether single messages were measured, by which hand-written collectives are priced."""
        return {"message", "stream", "messages", "buffer"} <= dict(self.own).keys()

    def switch_of(self, kind: str) -> Line | None:
        """The line of the switch for a kind of collective: measured kinds have it among their own lines."""
        return None if kind in dict(self.own) else self.switch


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        matmul_flops: dense 16-bit peak, flop/s (of a CPU: of float32).
        memory_bandwidth: bytes a second.
        memory: bytes.
        link: between devices of one box.
        peaks: {dtype name: dense peak} of the other dtypes, as pairs; "tf32" is float32 where torch may round it.
        efficiency: share of a peak that large matrix products reach.
        memory_share: share of `memory_bandwidth` that large copies reach.
        tile: multiples of m, n and k that a matrix product is computed in.
        host: to the host's memory; None for a CPU.
    """

    name: str
    matmul_flops: float
    memory_bandwidth: float
    memory: float
    link: Link
    peaks: tuple[tuple[str, float], ...] = ()
    efficiency: float = 0.8
    memory_share: float = 0.9
    tile: tuple[int, int, int] = (64, 64, 16)
    host: Link | None = None

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second to or from the host's memory; a CPU copies within its own."""
        return self.host.bandwidth if self.host else self.memory_bandwidth * self.memory_share / 2

    def __hash__(self) -> int:
        return hash(self.name)

    def peak(self, dtype: torch.dtype | str) -> float:
        """Dense peak of a dtype, flop/s; dtypes that are not listed run at the rate of `matmul_flops`."""
        return self._peaks.get(dtype, self.matmul_flops)

    @cached_property
    def _peaks(self) -> dict[torch.dtype | str, float]:
        named: dict[torch.dtype | str, float] = {name: peak for name, peak in self.peaks}
        return named | {getattr(torch, name): peak for name, peak in self.peaks if hasattr(torch, name)}


def _link(name: str, bandwidth: float, latency: float, hops: tuple[float, float], switch: bool = False, **how) -> Link:
    """A link with the two protocols of NCCL that matter: one for small messages, one that fills the wire.

    Their bases are NCCL's (14 us LL128, 8.4 us Simple; NVIDIA/nccl src/graph/tuning.cc, `baseLatencies`), `hops` its
    `hwLatencies` of the two. LL128 carries 120 bytes of payload in 128.
    """
    small = Line(14e-6, hops[0], LINK_SHARE * bandwidth * 120 / 128, **how)
    large = Line(8.4e-6, hops[1], LINK_SHARE * bandwidth)
    in_switch = Line(8.4e-6 + 25e-6, 0.0, LINK_SHARE * bandwidth) if switch else None  # NVLS: 25 us, the same table
    return Link(name, bandwidth, latency, (small, large), in_switch)


_NVLINK, _PCIE, _NET = (1.9e-6, 3.4e-6), (2.5e-6, 5.7e-6), (8.5e-6, 14e-6)
"""NCCL's `hwLatencies`, seconds a hop, LL128 and Simple: ring in a box (NVLink, PCIe), tree and ring between boxes."""
_TCP = (3e-5, 6e-5)
"""Nobody publishes the latency of a socket hop: an estimate, of a kernel's TCP stack on both sides."""


def _nvlink(generation: int, bandwidth: float) -> Link:
    """From the fourth on the switch reduces (NVLS)."""
    return _link(f"nvlink{generation}", bandwidth, 7e-6, _NVLINK, switch=generation >= 4)


def _net(name: str, bandwidth: float, hops: tuple[float, float] = _NET, switch: bool = False) -> Link:
    return _link(name, bandwidth, hops[1], hops, switch, tree=True)


LINKS = {
    link.name: link
    for link in (
        # gloo over TCP between processes of one machine, as measured by `mw.calibrate`, buffers and all
        Link("loopback", 5.2e8, 6e-5, own=(("all_gather", (Line(0.0, 6e-5, 4.2e8),)),)),
        _link("pcie3", 15.75e9, 8e-6, _PCIE),  # PCI-SIG: 8 GT/s x16, 128b/130b
        _link("pcie4", 31.5e9, 8e-6, _PCIE),  # 16 GT/s x16
        _link("pcie5", 63e9, 8e-6, _PCIE),  # 32 GT/s x16
        _link("pcie6", 121e9, 8e-6, _PCIE),  # 64 GT/s x16, 242 bytes of payload in a flit of 256
        _nvlink(1, 80e9),  # NVIDIA P100 datasheet: 160 GB/s both directions
        _nvlink(2, 150e9),  # V100: 300 GB/s
        _nvlink(3, 300e9),  # A100: 600 GB/s
        _nvlink(4, 450e9),  # H100, H200: 900 GB/s
        _nvlink(5, 900e9),  # B200: 1.8 TB/s
        _nvlink(6, 1800e9),  # Rubin, announced: 3.6 TB/s
        _net("ib-edr", 12.5e9),  # NVIDIA ConnectX datasheets: 100 Gb/s a port
        _net("ib-hdr", 25e9),  # 200 Gb/s
        _net("ib-ndr", 50e9),  # 400 Gb/s
        _net("ib-xdr", 100e9),  # 800 Gb/s
        _net("ib-hdr-sharp", 25e9, switch=True),  # the same through Quantum switches that reduce (SHARP)
        _net("ib-ndr-sharp", 50e9, switch=True),
        _net("ib-xdr-sharp", 100e9, switch=True),
        _net("eth-10", 1.25e9, _TCP),  # IEEE 802.3: the name is the rate in Gb/s
        _net("eth-40", 5e9, _TCP),
        _net("eth-100", 12.5e9),  # as RoCE
        _net("eth-400", 50e9),
    )
}


def _gpu(
    name: str, half: float, tera: tuple[float, float, float], memory: tuple[float, float], link: str, host: str
) -> Device:
    """Dense teraflop/s: `half`, and `tera` of tf32, fp32, fp64; `memory`: (TB/s, GB)."""
    tf32, fp32, fp64 = tera
    peaks = {"float64": fp64, "float32": fp32, "tf32": tf32, "complex64": fp32, "complex128": fp64}
    pairs = tuple((dtype, peak * 1e12) for dtype, peak in peaks.items())
    return Device(name, half * 1e12, memory[0] * 1e12, memory[1] * 1e9, LINKS[link], pairs, host=LINKS[host])


# one core of a server CPU with fp32 matmul and stream copy as measured on one thread
_CPU = Device(
    "cpu", 9.2e10, 1.7e10, 8e9, LINKS["loopback"], (("float64", 4.6e10), ("complex128", 4.6e10)),
    efficiency=1.0, memory_share=1.0, tile=(8, 8, 1),
)  # fmt: skip

DEVICES = {
    device.name: device
    for device in (
        _CPU,
        # NVIDIA's datasheets, dense. No tensor cores in a P100 (fp16 is its vector rate), no TF32 in a V100
        _gpu("p100", 21.2, (10.6, 10.6, 5.3), (0.732, 16), "nvlink1", "pcie3"),
        _gpu("v100", 125, (15.7, 15.7, 7.8), (0.9, 32), "nvlink2", "pcie3"),  # SXM2
        _gpu("a100", 312, (156, 19.5, 19.5), (2.04, 80), "nvlink3", "pcie4"),  # SXM, 80 GB; fp64 on tensor cores
        _gpu("h100", 989, (494.5, 67, 67), (3.35, 80), "nvlink4", "pcie5"),  # SXM
        _gpu("h200", 989, (494.5, 67, 67), (4.8, 141), "nvlink4", "pcie5"),  # SXM
        _gpu("b200", 2250, (1125, 80, 40), (8.0, 180), "nvlink5", "pcie5"),  # HGX
    )
}


def device_named(name: str | None) -> Device:
    """The preset of that name; None detects the device of this machine.

    Raises:
        ValueError: no such preset; the message lists those there are.
    """
    if name is None:
        name = detected()
    if name not in DEVICES:
        raise ValueError(f"no device preset {name!r}; there are {', '.join(sorted(DEVICES))}")
    return DEVICES[name]


def host_bandwidth(device: Device) -> float:
    """Bytes a second from a device to its host's memory: PCIe x16 of the generation in its datasheet; a CPU copies."""
    if device.name == "cpu":
        return device.memory_bandwidth
    return LINKS[{"p100": "pcie3", "v100": "pcie3", "a100": "pcie4"}.get(device.name, "pcie5")].bandwidth


def link_named(name: str) -> Link:
    """The preset of that name.

    Raises:
        ValueError: no such preset; the message lists those there are.
    """
    if name not in LINKS:
        raise ValueError(f"no link preset {name!r}; there are {', '.join(sorted(LINKS))}")
    return LINKS[name]


def detected() -> str:
    """The preset that fits this machine's first GPU; `"a100"` for a GPU without one, `"cpu"` where there is none."""
    if not torch.cuda.is_available():
        return "cpu"
    found = torch.cuda.get_device_name().lower()
    for name in ("b200", "h200", "h100", "a100", "v100", "p100"):
        if name in found:
            return name
    return "a100"
