"""Calibration: the fit, the file, meshes that read it, and measuring in one process and in two."""

import json
from pathlib import Path

import meshwright as mw
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import run_ranks
from meshwright.partitioner.calibration import Calibration, MeasuredLink
from meshwright.partitioner.collective_cost import collective_seconds
from meshwright.partitioner.errors import CalibrationError
from meshwright.partitioner.hardware import DEVICES, LINKS, Line, Link
from meshwright.runtime import calibrate as module
from meshwright.runtime.calibrate import calibrate
from meshwright.runtime.curve_fit import fit_curve, fit_lines
from meshwright.runtime.measure_device import DeviceRates
from meshwright.runtime.measure_links import HAND, KINDS

SIZES = np.geomspace(4096, 2**28, 9)
LINES = (Line(1e-5, 2e-6, 1e9, tree=True), Line(8e-5, 2e-6, 9e9, tree=True))


def measured(name: str, axis: str, ranks: int, lines: tuple[Line, ...] = LINES) -> MeasuredLink:
    own = tuple((kind, lines) for kind in (*KINDS, "halo"))
    return MeasuredLink(axis, ranks, Link(name, 9e9, 1e-5, LINKS[name].lines, None, own))


def example() -> Calibration:
    device = Calibration.from_dict(
        {
            "calibration": 1,
            "device": {
                "name": "cpu", "matmul_flops": 5e10, "memory_bandwidth": 7e9, "memory": 8e9, "peaks": {"float64": 2e10}
            },
            "links": {},
        }
    ).device  # fmt: skip
    return Calibration(device, (measured("loopback", "dp", 2), measured("loopback", "tp", 4)))


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.floats(0, 5), st.floats(1e5, 1e7))
def test_a_curve_is_found_again(start: float, bandwidth: float, gain: float, h: float):
    seconds = start + SIZES / bandwidth + start * gain * np.minimum(SIZES / h, 1)
    a, rate, g, knee = fit_curve(SIZES, seconds)
    found = a + rate * SIZES + g * np.minimum(SIZES / knee, 1)
    assert np.abs(found / seconds - 1).max() < 0.25


def test_lines_meet_the_sweep_at_its_own_ranks():
    seconds = 3e-5 + SIZES / 2e9
    lines = fit_lines("all_reduce", 8, SIZES, seconds, 1e-5)
    link = Link("x", 1.0, 1.0, own=(("all_reduce", lines),))
    np.testing.assert_allclose(collective_seconds("all_reduce", ((8, link),), SIZES), seconds, rtol=1e-6)
    fewer = collective_seconds("all_reduce", ((2, link),), 0.0)
    assert 1e-5 <= fewer < 3e-5 < collective_seconds("all_reduce", ((64, link),), 0.0)


@pytest.mark.parametrize(("sent", "seconds"), [([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0, 0.0])])
def test_a_curve_needs_two_sizes_and_times(sent: list[float], seconds: list[float]):
    with pytest.raises(ValueError, match="two sizes and times above 0"):
        fit_curve(sent, seconds)


def test_saves_and_loads(tmp_path: Path):
    example().save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == example()
    assert Calibration.from_dict(example().as_dict()) == example()


def test_prints_as_a_table():
    text = str(example())
    assert "device cpu: 50 Gflop/s, memory 7 GB/s" in text and "axis tp of 4 ranks, loopback" in text
    assert "  all_reduce           18.0 us        1 GB/s        9 GB/s" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"calibration": 7}, "calibration: format 7 is not 1"),
        ({"device": 3}, "device: expected an object with fields, got 3"),
        ({"device": {"name": "cpu"}}, "device.matmul_flops: missing"),
        ({"links": {"dp": {"link": "rope"}}}, "links.dp.link: expected one of eth-10, .*; got 'rope'"),
        ({"colour": 1}, "colour: unknown; the fields are calibration, device, links"),
    ],
)
def test_wrong_files_name_file_and_field(tmp_path: Path, change: dict, says: str):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(example().as_dict() | change))
    with pytest.raises(CalibrationError, match=f"c.json: {says}"):
        Calibration.load(path)


@pytest.mark.parametrize("value", [0, -1, True, "fast", None, float("inf"), float("nan"), [1]])
def test_rates_are_positive_numbers(value):
    content = example().as_dict()
    content["links"]["tp"]["collectives"]["permute"][1]["bandwidth"] = value
    with pytest.raises(CalibrationError, match=r"here: links.tp.collectives.permute\[1\].bandwidth: expected a number"):
        Calibration.from_dict(content, "here")


def test_kinds_are_known_and_ranks_whole():
    content = example().as_dict()
    content["links"]["tp"]["collectives"]["gossip"] = [{"base": 0, "hop": 0, "bandwidth": 1}]
    with pytest.raises(CalibrationError, match="collectives.gossip: unknown"):
        Calibration.from_dict(content)
    content = example().as_dict()
    content["links"]["tp"]["ranks"] = 2.5
    with pytest.raises(CalibrationError, match="links.tp.ranks: expected a whole number"):
        Calibration.from_dict(content)


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_what_is_no_file_of_ours(tmp_path: Path, text: str):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(CalibrationError, match="c.json"):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(CalibrationError, match="none.json: no calibration can be read"):
        mw.Mesh(dp=2, device="cpu", calibration=tmp_path / "none.json")


def test_a_mesh_takes_measured_links_and_device(tmp_path: Path):
    example().save(tmp_path / "c.json")
    for given_as in (tmp_path / "c.json", str(tmp_path / "c.json"), example(), example().as_dict()):
        mesh = mw.Mesh(dp=2, x=4, far=2, device="cpu", links={"far": "eth-10"}, calibration=given_as)
        assert mesh.device == example().device and mesh.device.efficiency == 1.0
        assert mesh.link["dp"] == example().links[0].link  # its own axis
        assert mesh.link["x"] == example().links[1].link  # the same preset, the most ranks
        assert mesh.link["far"] == LINKS["eth-10"]  # not measured
    assert mesh.refined("x", (2, 2)).link["x.0"] == example().links[1].link
    assert mesh != mw.Mesh(dp=2, x=4, far=2, device="cpu", links={"far": "eth-10"})


def test_the_environment_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    example().save(tmp_path / "c.json")
    monkeypatch.setenv("MESHWRIGHT_CALIBRATION", str(tmp_path / "c.json"))
    assert mw.Mesh(dp=2, device="cpu").device == example().device
    assert mw.Mesh(dp=2, device="h100").device == DEVICES["h100"]  # planned for another machine
    monkeypatch.setenv("MESHWRIGHT_CALIBRATION", str(tmp_path / "gone.json"))
    with pytest.raises(CalibrationError, match="gone.json"):
        mw.Mesh(dp=2, device="cpu")


def test_another_device_is_refused_when_given():
    with pytest.raises(ValueError, match="the calibration is of device 'cpu', but the mesh is of 'h100'"):
        mw.Mesh(dp=2, device="h100", calibration=example())


def test_calibration_of_another_machine_is_refused(tmp_path: Path):
    with pytest.raises(CalibrationError, match="the mesh is of device 'b200', but this machine has"):
        calibrate(mw.Mesh(dp=2, device="b200"))
    with pytest.raises(CalibrationError, match="its folder does not exist"):
        calibrate(mw.Mesh(dp=2, device="cpu"), tmp_path / "no" / "c.json")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is not what these tests are about."""
    monkeypatch.setattr(module, "measure_device", lambda device: RATES)


RATES = DeviceRates((("float32", 5e10), ("float64", 2e10), ("bfloat16", 1e9)), 7e9, 0.0)


@pytest.mark.usefixtures("quick")
def test_in_one_process(tmp_path: Path):
    found = mw.calibrate(mw.Mesh(dp=2, tp=2, one=1, device="cpu"), tmp_path / "c.json")
    assert [(m.axis, m.ranks) for m in found.links] == [("dp", 2), ("tp", 2)]
    assert {kind for kind, _ in found.links[0].link.own} == {*KINDS, *HAND, "halo"}
    assert found.device.matmul_flops == 5e10 and found.device.peak("float64") == 2e10
    assert Calibration.load(tmp_path / "c.json") == found


def test_the_device_is_measured():
    found = mw.calibrate(mw.Mesh(one=1, device="cpu"))
    assert not found.links and found.device.name == "cpu"
    assert 1e8 < found.device.matmul_flops < 1e15 and 1e8 < found.device.memory_bandwidth < 1e14


@pytest.mark.parametrize(("ranks", "threads", "share"), [(2, 1, 1.0), (4, 1, 0.5), (2, 2, 0.5), (1, 4, 0.5)])
def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int, share: float):
    """Four ranks on two cores were each given a core, and plans that repeat work looked too cheap."""
    assert module.core_share(module.torch.device("cpu")) == 1.0  # in one process
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert module.core_share(module.torch.device("cpu")) == share
    assert module.core_share(module.torch.device("cuda")) == 1.0


def two_processes(rank: int, world: int, folder: str) -> tuple[str, str]:
    module.measure_device = lambda device: DeviceRates(RATES.flops, 7e9 - rank, 0.0)
    module.core_share = lambda device: 1.0  # whatever cores the tests run on
    found = calibrate(mw.Mesh(dp=world, device="cpu"), Path(folder, "c.json"))
    return str(found.as_dict()), str(Calibration.load(Path(folder, "c.json")).as_dict())


@pytest.mark.slow
@pytest.mark.gloo
def test_processes_agree_and_one_writes(tmp_path: Path):
    (first, saved), (second, _) = run_ranks(two_processes, 2, str(tmp_path))
    assert first == second == saved
    assert "'memory_bandwidth': 6999999999.0" in first  # the slower rank's
