"""A checkpoint on disk: safetensors files beside a JSON manifest; nothing is pickled.

    path/step-12.save-3/                 12 steps done, the third save into `path`; the highest save is the latest
        manifest.json                    what there is, with a checksum of itself
        rank-00000.safetensors           the pieces that rank 0 owns

A piece is a product of ranges of a tensor's *factors* (`layout.py`): the manifest has each tensor's whole shape, its
factors, and of each piece its file, (start, length) per factor, and sha256. So it reads back into any other layout.

Written as `.saving-...`: files first, each flushed to the disk, the manifest last; then one rename. Whatever stops it
before the rename leaves the older checkpoints as they were. Each rank writes its file and a note of its pieces; rank 0
waits for the notes of all, so a save needs no collective and may run in a thread beside training.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..partitioner.errors import MeshwrightError
from .file_image import Image

VERSION = 1
FORMAT = "meshwright checkpoint"
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d+)\.save-(\d+)")
UNFINISHED = re.compile(r"\.(?:saving|gone)-step-(\d+)\.save-(\d+)")
PATIENCE = 600.0
"""Seconds that rank 0 waits for what the other ranks write."""


class CheckpointError(MeshwrightError):
    """A checkpoint cannot be written, or is damaged, foreign or does not fit; nothing in memory has changed."""


@dataclass(frozen=True)
class Piece:
    """What one rank writes of one tensor. `at`: (start, length) of each factor; `factors`: their sizes, by dim."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    factors: tuple[tuple[int, ...], ...]
    at: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankPart:
    """What one rank owns: pieces by tensor name, and values of the optimizer that are no tensors, by parameter."""

    rank: int
    pieces: dict[str, Piece]
    image: Image
    values: dict[str, dict[str, Any]] = field(default_factory=dict)


# -- names
def numbers(path: Path, pattern: re.Pattern[str] = NAME) -> dict[int, Path]:
    """{number of the save: its folder} in a folder of checkpoints."""
    if not path.is_dir():
        return {}
    found = ((pattern.fullmatch(p.name), p) for p in path.iterdir())
    return {int(match[2]): p for match, p in found if match}


def next_number(path: Path) -> int:
    """One that no save into `path` has had, finished or not."""
    return 1 + max([0, *numbers(path), *numbers(path, UNFINISHED)])


def latest(path: Path) -> Path:
    """The checkpoint itself, or the last saved in a folder of them.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).exists() or NAME.fullmatch(path.name):
        return path
    found = numbers(path)
    if not found:
        what = "is no folder" if not path.is_dir() else "holds no finished checkpoint (step-*.save-*)"
        raise CheckpointError(f"{path} {what}: give the folder that save() was given, or one checkpoint in it")
    return found[max(found)]


# -- writing
def write_part(folder: Path, part: RankPart) -> None:
    """Write one rank's file, and the note of its pieces."""
    name = f"rank-{part.rank:05d}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if part.pieces:
            part.image.write(folder / name)
        tensors = {
            n: {
                "dtype": _dtype_name(p.dtype), "shape": p.shape, "factors": p.factors,
                "piece": {"file": name, "at": p.at, "sha256": checksum(part.image.tensors[n])},
            }
            for n, p in part.pieces.items()
        }  # fmt: skip
        _write_json(folder / f"rank-{part.rank:05d}.json", {"tensors": tensors, "values": part.values})
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be written: {error}; older checkpoints are whole") from error


def finish(folder: Path, final: Path, world: int, head: dict[str, Any], keep: int | None) -> None:
    """Once all ranks have written: the manifest, the rename, and what is not kept removed."""
    try:
        tensors, values = _merged(folder, world)
        body = {"format": FORMAT, "version": VERSION, **head, "tensors": tensors, "values": values}
        _write_json(folder / MANIFEST, {**body, "sha256": _signature(body)})
        for note in folder.glob("rank-*.json"):
            note.unlink()
        _flush(folder)
        folder.rename(final)
        _flush(final.parent)
        _tidy(final, keep)
    except OSError as error:
        raise CheckpointError(f"{final} cannot be written: {error}; older checkpoints are whole") from error


def _merged(folder: Path, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    begun = time.monotonic()
    for rank in range(world):
        note = folder / f"rank-{rank:05d}.json"
        while not note.exists():
            if failed := sorted(folder.glob("rank-*.failed")):
                raise CheckpointError(f"{failed[0].stem} could not write its part: {failed[0].read_text()}")
            if time.monotonic() - begun > PATIENCE:
                raise CheckpointError(
                    f"rank {rank} has written nothing to {folder} in {PATIENCE:.0f} s: is it a folder that all "
                    f"processes share?"
                )
            time.sleep(0.01)
        found = json.loads(note.read_text())
        for name, entry in found["tensors"].items():
            piece = entry.pop("piece")
            tensors.setdefault(name, entry | {"pieces": []})["pieces"].append(piece)
        for name, kept in found["values"].items():
            values[name] = kept
    return tensors, values


def _tidy(final: Path, keep: int | None) -> None:
    """Remove what unfinished saves left, and all but the last `keep` checkpoints; renamed first, so none is half."""
    mine = int(NAME.fullmatch(final.name)[2])  # type: ignore[index]
    for number, folder in numbers(final.parent, UNFINISHED).items():
        if number < mine:
            shutil.rmtree(folder, ignore_errors=True)
    found = numbers(final.parent)
    for number in sorted(found)[:-keep] if keep else ():
        gone = found[number].with_name(f".gone-{found[number].name}")
        found[number].rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, value: Any) -> None:
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(value, indent=1))
    _flush(beside)
    beside.rename(path)


def _signature(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def checksum(x: torch.Tensor) -> str:
    return hashlib.sha256(x.reshape(-1).view(torch.uint8).numpy()).hexdigest()  # type: ignore[arg-type]


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """As safetensors can hold it: complex numbers as pairs."""
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- reading
class Checkpoint:
    """A checkpoint that is there, its manifest read and checked.

    Raises:
        CheckpointError: there is no manifest, or it is damaged, of another format or a newer version.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = self._read_manifest()
        self.tensors: dict[str, Any] = self.manifest["tensors"]

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            found = json.loads(path.read_text())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {self.others()}") from error
        except ValueError as error:
            raise CheckpointError(f"the checkpoint is damaged: {path} is no JSON ({error}); {self.others()}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the manifest of a {FORMAT}; a state dict loads by load_state_dict()")
        if found.get("version") != VERSION:
            raise CheckpointError(f"{path} has version {found.get('version')!r}; this meshwright reads {VERSION}")
        said = found.pop("sha256", None)
        if said != _signature(found):
            raise CheckpointError(
                f"the checkpoint is damaged: {path} does not have the checksum it states; {self.others()}"
            )
        return found

    def others(self) -> str:
        """The way out: the checkpoints beside this one."""
        beside = [p.name for _, p in sorted(numbers(self.folder.parent).items()) if p != self.folder]
        return f"nothing in memory was changed; beside it: {', '.join(beside[-3:]) or 'none'}"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.tensors[name]["dtype"])

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor, put together from its pieces.

        Raises:
            CheckpointError: a piece is missing or is not what was written.
        """
        entry, dtype = self.tensors[name], self.dtype(name)
        factors = [n for dim in entry["factors"] for n in dim]
        out, found = torch.empty(factors, dtype=dtype), 0
        for piece in entry["pieces"]:
            value = self._piece(name, piece, dtype)
            target = out
            for i, (start, length) in enumerate(piece["at"]):
                target = target.narrow(i, start, length)
            target.copy_(value.reshape(target.shape))
            found += value.numel()
        if found != out.numel():
            raise CheckpointError(f"{name} has {found} of its {out.numel()} elements")
        return out.reshape(entry["shape"])

    def _piece(self, name: str, piece: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
        path = self.folder / Path(piece["file"]).name
        if not path.exists():
            raise CheckpointError(f"{path.name} is missing, and with it {name}")
        try:
            with safe_open(path, "pt") as file:
                stored = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path.name} cannot be read ({error}), and with it {name}") from error
        if checksum(stored) != piece["sha256"]:
            raise CheckpointError(f"{name} in {path.name} does not have its checksum")
        value = torch.view_as_complex(stored) if dtype.is_complex else stored
        if value.dtype != dtype:
            raise CheckpointError(f"{name} in {path.name} is {value.dtype}, not {dtype}")
        return value

    def read(self, names: list[str], take: Callable[[str, torch.Tensor], None]) -> None:
        """Give each whole tensor to `take`, one after another.

        Raises:
            CheckpointError: some are damaged; names files and tensors, after all have been looked at.
        """
        faults = list(self._faults(names, take))
        if faults:
            some = "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else "")
            raise CheckpointError(f"the checkpoint {self.folder} is damaged: {some}; {self.others()}")

    def _faults(self, names: list[str], take: Callable[[str, torch.Tensor], None]) -> Iterator[str]:
        for name in names:
            try:
                take(name, self.whole(name))
            except CheckpointError as error:
                yield str(error)
