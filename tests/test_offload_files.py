"""Optimizer state in files: the same bits as without, bounded host memory; full, damaged and truncated files."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from launch import run_ranks
from meshwright.runtime.block_file import PREFIX, Block, BlockFile, FileError
from meshwright.runtime.tracked import WatchedComm, track
from small import CE, X, Y, adamw, mesh, mlp
from test_offload import WAYS, named, same_bits, trained, written_by_others
from torch import nn


def files(folder: Path, **more: Any) -> mw.Offload:
    return mw.Offload("nvme", nvme_path=folder, **more)


@pytest.mark.parametrize("axes,options", WAYS, ids=named)
def test_the_bits_are_those_without_offload(tmp_path: Path, axes: dict[str, int], options: dict[str, Any]):
    in_files = trained(files(tmp_path, sub_group_size=16), axes, **dict(options))
    same_bits(trained("none", axes, **dict(options)), in_files)


KINDS: dict[str, Any] = {
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1),
    "NAdam": torch.optim.NAdam,
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
}


def test_any_element_wise_optimizer(tmp_path: Path):
    for make in KINDS.values():
        same_bits(trained("none", {"dp": 1}, make), trained(files(tmp_path), {"dp": 1}, make))


def test_parts_of_a_large_parameter(tmp_path: Path):
    """Cut at 2^16 elements, and the host holds what its buffers hold: of 290 thousand elements 12 * 70 thousand
    would be all, 4 buffers a sub-group, one in their midst read, stepped and written in turn."""
    x, y = torch.randn(2, 300), torch.tensor([0, 3])
    found = []
    for offload in ("none", files(tmp_path, sub_group_size=70_000, buffer_count=4)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 600))
        compiled = mw.compile(model, mesh({"dp": 1}), loss=CE, optimizer=adamw, offload=offload)
        for _ in range(2):
            compiled.step(x, target=y)
        found.append(compiled)
    same_bits(*found)
    report, n = found[1].offload_report, sum(p.numel() for p in found[1].parameters())
    assert report.host_nbytes < 4 * 4 * 70_000 < 12 * n
    assert report.device_nbytes == 8 * n
    assert (report.read, report.written) == (8 * n, 4 * n + 2 * 12 * n)  # at first what others wrote: the parameters
    assert found[0].offload_report.device_nbytes > 16 * n


def test_a_ratio_leaves_the_last_parameters_on_the_device(tmp_path: Path):
    half = trained(files(tmp_path, ratio=0.5), {"dp": 2}, zero=0)
    same_bits(trained("none", {"dp": 2}, zero=0), half)
    assert half.offload_report.file_nbytes < trained(files(tmp_path), {"dp": 2}, zero=0).offload_report.file_nbytes


def test_what_others_write_is_stepped_from(tmp_path: Path):
    same_bits(written_by_others("none"), written_by_others(files(tmp_path)))


def test_a_state_of_four_times_the_device(tmp_path: Path):
    """16 bytes a parameter are four times what a device may use; with the moments in files it never needs that."""
    held = {}
    for offload in ("none", files(tmp_path)):
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.ReLU())))
        compiled = mw.compile(model, mesh({"dp": 4}), loss=CE, optimizer=adamw, offload=offload, zero=3)
        compiled._comm = WatchedComm(compiled.mesh)
        x, y = torch.randn(4, 256), torch.arange(4)
        for _ in range(2):
            compiled.step(x, target=y)
        held[offload if offload == "none" else "files"] = max(r.peak for r in track(compiled, x, target=y))
    budget = 16 * sum(p.numel() for p in model.parameters()) / 4
    assert held["files"] < budget < held["none"]


# -- faults
def a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    write, writes = os.pwrite, iter(range(10**6))

    def pwrite(*args: Any) -> int:
        if next(writes) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)


def flipped(path: Path) -> None:
    """One bit of each block."""
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 4096):
        data[at] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    os.truncate(path, 3 * 4096 + 8)


def state_of(compiled: mw.Compiled) -> dict[str, torch.Tensor]:
    assert compiled.optimizer is not None
    out = dict(compiled.gather("params"))
    for optimizer, host in zip(compiled.optimizer.each, compiled.optimizer.host, strict=True):
        for name, p in host.named_parameters():
            out |= {f"{name} {k}": x for k, x in host.kept(optimizer, name, p).items()}
    return out


@pytest.mark.parametrize("after", [0, 7, 17])
def test_a_disk_that_fills_up_undoes_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int):
    """On all ranks, wherever it happens; and once there is room the same step is made as if nothing had been."""
    model, options = nn.Sequential(nn.BatchNorm1d(6), mlp(), nn.Dropout(0.3)), {"loss": CE, "optimizer": adamw}
    one = mw.compile(model, mesh({"dp": 2}), offload=files(tmp_path, sub_group_size=8), **options)
    other = mw.compile(model, mesh({"dp": 2}), **options)
    for compiled in (one, other):
        compiled.step(X, target=Y)
    before, buffers = state_of(one), one.gather("buffers")
    with monkeypatch.context() as patch:
        a_disk_that_is_full(patch, after)
        wrong = r"meshwright-rank-0000\d-.*\.state: .* of [\d.]+\.(weight|bias) cannot be written: No space.*undone"
        with pytest.raises(FileError, match=wrong):
            one.step(X, target=Y)
    now = state_of(one)
    assert [n for n in before if not torch.equal(before[n], now[n])] == []
    assert all(torch.equal(b, one.gather("buffers")[n]) for n, b in buffers.items())
    for compiled in (one, other):
        for _ in range(2):
            compiled.step(X, target=Y)
    same_bits(one, other)


@pytest.mark.parametrize(
    "spoil,said",
    [
        (flipped, r"rank-0000\d-.*\.state is damaged: exp_avg\w* of \w\.\w+ is not what was written there"),
        (truncated, r"rank-0000\d-.*\.state is truncated: it ends within \w+ of \w\.\w+"),
    ],
)
def test_a_spoiled_file(tmp_path: Path, spoil: Callable[[Path], None], said: str):
    """Is found before it is used; the last checkpoint then brings back what it held."""
    one, other = (trained(o, {"dp": 2}, zero=1) for o in (files(tmp_path), "none"))
    one.save(tmp_path / "saved")
    before = one.gather("params")
    for path in tmp_path.glob(PREFIX + "*"):
        spoil(path)
    for _ in range(2):
        with pytest.raises(FileError, match=said):
            one.step(X, target=Y)
    with pytest.raises(FileError, match=said):
        one.save(tmp_path / "more")
    assert all(torch.equal(p, before[n]) for n, p in one.gather("params").items())
    one.load(tmp_path / "saved")
    for compiled in (one, other):
        compiled.step(X, target=Y)
    same_bits(one, other)


def test_a_file_that_is_spoiled_in_the_midst_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing can be given back then: it says what stays stepped, and goes on only from a checkpoint."""
    one = trained(files(tmp_path, sub_group_size=8), {"dp": 1})
    one.save(tmp_path / "saved")
    want = one.gather("params")
    with monkeypatch.context() as patch:
        a_disk_that_is_full(patch, 6)
        assert one.optimizer is not None
        file = one.optimizer.host[0].file  # type: ignore[union-attr]
        patch.setattr(file, "_sums", {b: s for b, s in file._sums.items() if "parameter" not in file.blocks[b].what})
        with pytest.raises(FileError, match=r"could not give back \d parameters.*load the last checkpoint"):
            one.step(X, target=Y)
    with pytest.raises(FileError, match="load the last checkpoint"):
        one.step(X, target=Y)
    one.load(tmp_path / "saved")
    assert all(torch.equal(p, want[n]) for n, p in one.gather("params").items())
    one.step(X, target=Y)


def test_a_disk_without_room_at_the_start(tmp_path: Path):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 4))
    compiled = mw.compile(model, mesh({"dp": 2}), loss=CE, optimizer=adamw, offload=files(tmp_path), zero=0)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(FileError, match=r"rank 0 needs 2,2\d\d,\d\d\d bytes in .* are free: File too large. Give"):
            compiled.step(torch.randn(4, 300), target=Y)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list(tmp_path.iterdir()) == []


def test_files_are_removed(tmp_path: Path):
    """With the model; and those of a process that was killed by the next that comes."""
    compiled = trained(files(tmp_path), {"dp": 2})
    left = tmp_path / f"{PREFIX}00000-killed.state"
    left.write_bytes(b"left")
    assert len(list(tmp_path.iterdir())) == 3
    made = BlockFile(tmp_path, 7, [Block("a block", 8)])
    assert not left.exists() and len(list(tmp_path.iterdir())) == 3
    made.close()
    del compiled
    gc.collect()
    assert list(tmp_path.iterdir()) == []


# -- processes
def a_rank(rank: int, world: int, folder: str) -> list[dict[str, torch.Tensor]]:
    on_hosts = trained("full", {"dp": 2}, zero=1).gather("params")
    compiled = trained(files(Path(folder)), {"dp": 2}, zero=1)
    before = compiled.gather("params")
    if rank:
        (path,) = Path(folder).glob(f"{PREFIX}00001-*")
        truncated(path)
    said = "truncated.*undone" if rank else "of another rank failed. The step was undone"
    with pytest.raises(FileError, match=said):
        compiled.step(X, target=Y)
    after = compiled.gather("params")
    assert all(torch.equal(before[n], after[n]) for n in before)
    return [on_hosts, after]


def test_in_two_processes(tmp_path: Path):
    want = trained("none", {"dp": 2}, zero=1).gather("params")
    for got in run_ranks("test_offload_files:a_rank", 2, str(tmp_path), timeout=200):
        assert all(torch.equal(want[n], one[n]) for n in want for one in got)
