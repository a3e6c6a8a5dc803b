"""Presets of devices and links, the roofline, and meshes with unequal links."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright import Mesh
from meshwright.partitioner.compute_cost import compute_seconds
from meshwright.partitioner.hardware import DEVICES, LINKS, Line, device_named, link_named

H100, CPU = DEVICES["h100"], DEVICES["cpu"]
DEVICE = st.sampled_from(sorted(DEVICES)).map(DEVICES.get)
DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, "tf32", "float16"])
SIZE = st.integers(1, 5000)


def test_presets_are_there():
    assert set(DEVICES) >= {"p100", "v100", "a100", "h100", "h200", "b200", "cpu"}
    names = [f"pcie{i}" for i in (3, 4, 5, 6)] + [f"nvlink{i}" for i in range(1, 7)]
    names += [f"ib-{n}" for n in ("edr", "hdr", "ndr", "xdr")] + [f"eth-{n}" for n in (10, 40, 100, 400)]
    assert set(LINKS) >= {*names, "loopback"}


@pytest.mark.parametrize(("name", "both"), [("nvlink1", 160e9), ("nvlink4", 900e9), ("nvlink5", 1800e9)])
def test_bandwidth_is_one_direction(name: str, both: float):
    """Vendors print the sum of both."""
    assert link_named(name).bandwidth == both / 2


@pytest.mark.parametrize(("name", "gigabits"), [("ib-edr", 100), ("ib-xdr", 800), ("eth-10", 10), ("eth-400", 400)])
def test_network_rates_are_bits(name: str, gigabits: float):
    assert link_named(name).bandwidth == gigabits * 1e9 / 8


@pytest.mark.parametrize("family", ["nvlink", "pcie"])
def test_generations_are_faster(family: str):
    rates = [LINKS[n].bandwidth for n in sorted(LINKS) if n.startswith(family)]
    assert rates == sorted(rates)


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_no_collective_beats_the_wire(link):
    lines = [line for kind in ("all_reduce", "permute") for line in link.lines_of(kind)]
    assert all(0 < line.bandwidth <= link.bandwidth and line.base >= 0 and line.hop > 0 for line in lines)
    assert link.latency > 0


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_devices_are_sane(device):
    assert device.peak(torch.float64) <= device.peak(torch.float32) <= device.matmul_flops
    assert device.peak(torch.float32) <= device.peak("tf32") <= device.matmul_flops
    assert device.peak(torch.bfloat16) == device.matmul_flops
    assert 0 < device.efficiency <= 1 and 0 < device.memory_share <= 1
    assert device.link in LINKS.values()


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="no device preset 'h1'; there are a100, "):
        device_named("h1")
    with pytest.raises(ValueError, match="no link preset 'ib'; there are eth-10, "):
        link_named("ib")


def test_a_link_without_lines_has_its_latency_and_bandwidth():
    loop = LINKS["loopback"]
    assert loop.lines_of("all_reduce") == (Line(0.0, loop.latency, loop.bandwidth),)


def test_mesh_with_a_slow_and_a_fast_axis():
    mesh = Mesh(node=4, gpu=8, device="h100", links={"node": "ib-ndr"})
    assert mesh.levels(("node", "gpu")) == ((4, LINKS["ib-ndr"]), (8, LINKS["nvlink4"]))
    fine = mesh.refined("gpu", (2, 4))
    assert fine.names == ("node", "gpu.0", "gpu.1") and fine.device == mesh.device
    assert fine.link["gpu.1"] == LINKS["nvlink4"] and fine.link["node"] == LINKS["ib-ndr"]
    with pytest.raises(ValueError, match="do not multiply to gpu=8"):
        mesh.refined("gpu", (3, 3))


def test_equal_meshes_are_one_key():
    def made(link):
        return Mesh(a=2, b=2, device="a100", links={"a": link})

    assert len({made("ib-hdr"), made("ib-hdr"), made("pcie4")}) == 2


def test_roofline_takes_the_slower():
    flops = compute_seconds(1e12, 0.0, torch.bfloat16, H100)
    assert flops == pytest.approx(1e12 / (989e12 * 0.8))
    assert compute_seconds(1e12, 1e6, torch.bfloat16, H100) == flops
    assert compute_seconds(1e6, 1e9, torch.bfloat16, H100) == pytest.approx(1e9 / (3.35e12 * 0.9))
    assert compute_seconds(1e12, 0.0, torch.float32, H100) > 10 * flops


@pytest.mark.parametrize(
    ("shape", "more"),
    [((4096, 4096, 4096), 1.0), ((4097, 4096, 4096), 4160 / 4097), ((65, 128, 128), 128 / 65), ((1, 4096, 4096), 8.0)],
)
def test_products_pay_for_whole_tiles(shape: tuple[int, int, int], more: float):
    flops = 2.0 * math.prod(shape)
    whole = compute_seconds(flops, 0.0, torch.bfloat16, H100)
    assert compute_seconds(flops, 0.0, torch.bfloat16, H100, shape) == pytest.approx(whole * more)


@given(DEVICE, DTYPE, SIZE, SIZE, SIZE, st.integers(0, 2))
def test_seconds_grow_with_each_size(device, dtype, m: int, n: int, k: int, which: int):
    larger = (m + (which == 0), n + (which == 1), k + (which == 2))
    times = [compute_seconds(2.0 * math.prod(s), 0.0, dtype, device, s) for s in ((m, n, k), larger)]
    assert times[0] <= times[1] * (1 + 1e-12)


@given(DEVICE, DTYPE, st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=6))
def test_arrays_are_priced_as_numbers(device, dtype, shapes):
    m, n, k = np.array(shapes).T
    together = compute_seconds(2.0 * m * n * k, 4.0 * m * n, dtype, device, (m, n, k))
    one_by_one = [compute_seconds(2.0 * a * b * c, 4.0 * a * b, dtype, device, (a, b, c)) for a, b, c in shapes]
    np.testing.assert_allclose(together, one_by_one, rtol=1e-12)


def test_every_preset_is_on_the_page():
    page = (Path(__file__).parents[1] / "docs" / "hardware.md").read_text()
    assert [name for name in (*DEVICES, *LINKS) if f"`{name}`" not in page] == []
