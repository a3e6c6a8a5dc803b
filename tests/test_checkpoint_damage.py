"""Damaged, partial and foreign checkpoints: each names what is wrong, and changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.runtime.checkpoint_files import _signature
from small import CE, X, Y, adamw, mesh, mlp, sgd
from torch import nn

SHARD = "rank-00001.safetensors"


def made(axes: dict[str, int] | None = None, make: Any = adamw, **options: Any) -> mw.Compiled:
    model = options.pop("model", None) or mlp()
    compiled = mw.compile(model, mesh(axes or {"dp": 2}), loss=CE, optimizer=make, zero=1, **options)
    compiled.step(X, target=Y)
    return compiled


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    made().save(folder)
    return folder


@pytest.fixture(scope="module")
def reader() -> mw.Compiled:
    return made()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def edit(change: Callable[[dict[str, Any]], Any], sign: bool = True) -> Callable[[Path], None]:
    """Change the manifest, and its checksum with it."""

    def do(folder: Path) -> None:
        body = json.loads((folder / "manifest.json").read_text())
        body.pop("sha256")
        before = _signature(body)
        change(body)
        (folder / "manifest.json").write_text(json.dumps({**body, "sha256": _signature(body) if sign else before}))

    return do


def elsewhere(body: dict[str, Any]) -> None:
    body["tensors"]["params/0.weight"]["pieces"].pop()


def other_dtype(body: dict[str, Any]) -> None:
    for entry in body["tensors"]["params/0.weight"], body["tensors"]["params/2.weight"]:
        entry["dtype"] = "float64"


def swapped(folder: Path) -> None:
    shutil.copy(folder / "rank-00000.safetensors", folder / SHARD)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard cut short": (lambda f: cut(f / SHARD, 64), f"{SHARD} cannot be read; and with it; beside it"),
    "a shard gone": (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing, and with it params/0.weight; and 8 more"),
    "a shard of no bytes": (lambda f: (f / SHARD).write_bytes(b""), f"{SHARD} cannot be read"),
    "a bit of a tensor": (lambda f: flip(f / SHARD, -3), f"in {SHARD} does not have its checksum"),
    "a bit of a shard's head": (lambda f: flip(f / SHARD, 12), f"{SHARD} cannot be read"),
    "the shard of another rank": (swapped, f"params/0.weight in {SHARD} does not have its checksum"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json cannot be read"),
    "a manifest cut short": (lambda f: cut(f / "manifest.json", 100), "damaged; manifest.json is no JSON"),
    "a manifest changed": (edit(lambda b: b.update(step=7), sign=False), "damaged; the checksum it states"),
    "a manifest of a newer version": (edit(lambda b: b.update(version=2)), "version 2; reads 1"),
    "a JSON of others": (lambda f: (f / "manifest.json").write_text("[1]"), "not the manifest of a meshwright"),
    "a piece that the manifest lacks": (edit(elsewhere), "params/0.weight has 24 of its 48 elements"),
    "tensors of other dtypes": (edit(other_dtype), "does not fit; params/0.weight is [8, 6] torch.float64"),
    "a tensor that nobody has": (edit(lambda b: b["tensors"].pop("params/0.bias")), "it lacks params/0.bias"),
    "another seed": (edit(lambda b: b.update(seed=3)), "its seed is 3, here 0; compile(seed=3)"),
    "other groups": (edit(lambda b: b["optimizer"]["groups"][0]["params"].reverse()), "parameter groups hold other"),
    "a scheduler more": (edit(lambda b: b["schedulers"].append({})), "1 schedulers, here are 0"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_changes_nothing(kind: str, saved: Path, reader: mw.Compiled, tmp_path: Path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    do, says = DAMAGE[kind]
    (one,) = folder.glob("step-*")
    do(one)
    before = reader.state_dict(), [repr(o.state_dict()) for o in reader.optimizer.each], reader.steps  # type: ignore[union-attr]
    with pytest.raises(mw.CheckpointError) as caught:
        reader.load(folder)
    missing = [words for words in says.split("; ") if words not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert len(str(caught.value)) < 1200
    assert all(torch.equal(x, before[0][n]) for n, x in reader.state_dict().items())
    assert [repr(o.state_dict()) for o in reader.optimizer.each] == before[1]  # type: ignore[union-attr]
    assert reader.steps == before[2]


def test_a_damaged_one_is_refused_before_the_first_step_too(saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "copy")
    (one,) = tmp_path.glob("copy/step-*")
    flip(one / SHARD, -3)
    compiled = mw.compile(mlp(), mesh({"dp": 2}), loss=CE, optimizer=adamw)
    with pytest.raises(mw.CheckpointError, match="does not have its checksum"):
        compiled.load(tmp_path / "copy")
    compiled.step(X, target=Y)  # from the model's own values
    assert compiled.steps == 1


def test_what_does_not_fit_is_said_at_once(saved: Path):
    torch.manual_seed(0)
    other = made(model=nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4)))
    with pytest.raises(mw.CheckpointError, match=r"0.bias is \[8\].*0.weight is \[8, 6\].*2.weight"):
        other.load(saved)
    with pytest.raises(mw.CheckpointError, match="its optimizer is AdamW, here SGD"):
        made(make=sgd()).load(saved)
    with pytest.raises(mw.CheckpointError, match="compile was given none"):
        made(make=None).load(saved)


def test_no_checkpoint(tmp_path: Path, reader: mw.Compiled):
    with pytest.raises(mw.CheckpointError, match="is no folder"):
        reader.load(tmp_path / "nowhere")
    with pytest.raises(mw.CheckpointError, match="holds no finished checkpoint"):
        reader.load(tmp_path)
    with pytest.raises(mw.CheckpointError, match="keep=0"):
        reader.save(tmp_path, keep=0)
    with pytest.raises(mw.MeshwrightError, match="data is a set, which a checkpoint cannot hold"):
        reader.save(tmp_path, data={1})
    (tmp_path / "file").write_text("")
    with pytest.raises(mw.CheckpointError, match="cannot be written"):
        reader.save(tmp_path / "file")
