"""Devices and links: the constants of the cost model.

    seconds of an op         = max(flops / matmul_flops, bytes / memory_bandwidth)         (roofline)
    seconds of a collective  = steps * latency + wire_bytes / bandwidth                    (`collective.seconds`)

All bandwidths are bytes a second in ONE direction; vendors usually print the sum of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Link:
    """A link between ranks. `latency` is the start of one collective step in seconds."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """One accelerator. `matmul_flops` is dense 16-bit (fp32 on a CPU); `memory` is bytes."""

    name: str
    matmul_flops: float
    memory_bandwidth: float
    memory: float
    link: Link


LINKS = {
    link.name: link
    for link in (
        Link("loopback", 2.1e9, 6e-5),  # gloo over TCP between processes of one machine, as measured
        Link("pcie3", 15.75e9, 8e-6),  # PCI-SIG: 8 GT/s x16
        Link("pcie4", 31.5e9, 8e-6),
        Link("pcie5", 63e9, 8e-6),
        Link("nvlink2", 150e9, 7e-6),  # NVIDIA V100 datasheet: 300 GB/s both directions
        Link("nvlink3", 300e9, 7e-6),  # NVIDIA A100 datasheet: 600 GB/s both directions
        Link("nvlink4", 450e9, 7e-6),  # NVIDIA H100 datasheet: 900 GB/s both directions
        Link("nvlink5", 900e9, 7e-6),  # NVIDIA B200 datasheet: 1.8 TB/s both directions
        Link("ib-edr", 12.5e9, 14e-6),
        Link("ib-hdr", 25e9, 14e-6),
        Link("ib-ndr", 50e9, 14e-6),
        Link("ib-xdr", 100e9, 14e-6),
    )
}

DEVICES = {
    device.name: device
    for device in (
        # one core of a server CPU with fp32 matmul and stream copy as measured on one thread
        Device("cpu", 9.2e10, 8.6e9, 8e9, LINKS["loopback"]),
        Device("v100", 125e12, 0.9e12, 32e9, LINKS["nvlink2"]),  # V100 SXM2 datasheet
        Device("a100", 312e12, 2.04e12, 80e9, LINKS["nvlink3"]),  # A100 80GB SXM datasheet
        Device("h100", 989e12, 3.35e12, 80e9, LINKS["nvlink4"]),  # H100 SXM datasheet, dense
        Device("h200", 989e12, 4.8e12, 141e9, LINKS["nvlink4"]),  # H200 SXM datasheet, dense
        Device("b200", 2250e12, 8e12, 180e9, LINKS["nvlink5"]),  # B200 datasheet, dense
    )
}


def device_named(name: str | None) -> Device:
    """The preset of that name; None detects the device of this machine.

    Raises:
        ValueError: no such preset; the message lists those there are.
    """
    if name is None:
        name = _detected()
    if name not in DEVICES:
        raise ValueError(f"no device preset {name!r}; there are {', '.join(sorted(DEVICES))}")
    return DEVICES[name]


def link_named(name: str) -> Link:
    """The preset of that name.

    Raises:
        ValueError: no such preset; the message lists those there are.
    """
    if name not in LINKS:
        raise ValueError(f"no link preset {name!r}; there are {', '.join(sorted(LINKS))}")
    return LINKS[name]


def _detected() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    found = torch.cuda.get_device_name().lower()
    for name in ("b200", "h200", "h100", "a100", "v100"):
        if name in found:
            return name
    return "a100"
