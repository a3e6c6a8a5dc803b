"""A file of blocks of bytes that only the process that made it reads: room is taken at once, every read is checked.

    made      all blocks are preallocated, so that a full disk is known before training, not in the midst of it
    read      the crc32 of a block's bytes is that of what was last written there, or it is an error
    locked    while its process lives; files that nobody locks are of processes that were killed, and are removed

Errors name the file and the block. Reads and writes may come from several threads, to different blocks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..partitioner.errors import MeshwrightError

PAGE = 4096
"""Blocks start at multiples of so many bytes."""

PREFIX, SUFFIX = "meshwright-rank-", ".state"


class FileError(MeshwrightError):
    """A file with state of the optimizer cannot be made, read or written."""


@dataclass(frozen=True)
class Block:
    """A part of the file: what it holds, for errors; and its bytes."""

    what: str
    nbytes: int


class BlockFile:
    """A preallocated file.

    Attributes:
        path: where it lies, until the process ends or `close`.
        nbytes: of the whole file.
        read_nbytes, written_nbytes: so far.

    Raises:
        FileError: the folder cannot be written, or has too little room.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, blocks: Sequence[Block]):
        self.blocks = blocks
        self.offsets: list[int] = []
        end = 0
        for block in blocks:
            self.offsets.append(end)
            end += -(-block.nbytes // PAGE) * PAGE
        self.nbytes, self.read_nbytes, self.written_nbytes = end, 0, 0
        self._sums: dict[int, int] = {}
        _sweep(Path(folder))
        self._fd, self.path = _opened(Path(folder), rank, end)
        self.close = weakref.finalize(self, _close, self._fd, self.path)

    def write(self, block: int, x: torch.Tensor) -> None:
        """Put a tensor's bytes (contiguous, on the host) into a block.

        Raises:
            FileError: the disk is full, or fails.
        """
        data = _bytes_of(x)
        at = self.offsets[block]
        self._sums.pop(block, None)  # half written is not to be read
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], at + done)
        except OSError as error:
            raise FileError(f"{self.path}: {self.blocks[block].what} cannot be written: {error.strerror}") from error
        self._sums[block] = zlib.crc32(data)
        self.written_nbytes += len(data)

    def read(self, block: int, into: torch.Tensor) -> torch.Tensor:
        """Fill a tensor (contiguous, on the host) from what was last written into a block.

        Raises:
            FileError: the file is shorter than that, was changed, or cannot be read.
        """
        data, what = _bytes_of(into), self.blocks[block].what
        done = 0
        try:
            while done < len(data):
                got = os.preadv(self._fd, [data[done:]], self.offsets[block] + done)
                if not got:
                    raise FileError(f"{self.path} is truncated: it ends within {what}")
                done += got
        except OSError as error:
            raise FileError(f"{self.path}: {what} cannot be read: {error.strerror}") from error
        if zlib.crc32(data) != self._sums.get(block):
            raise FileError(f"{self.path} is damaged: {what} is not what was written there")
        self.read_nbytes += len(data)
        return into


def _bytes_of(x: torch.Tensor) -> memoryview:
    return memoryview(x.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _opened(folder: Path, rank: int, nbytes: int) -> tuple[int, Path]:
    """A new file that is locked before it has the name by which others look for abandoned ones."""
    made = None
    try:
        fd, made = tempfile.mkstemp(".opening", f"{PREFIX}{rank:05d}-", folder)
        fcntl.flock(fd, fcntl.LOCK_EX)
        path = Path(made).with_suffix(SUFFIX)
        os.rename(made, path)
        made = path
        os.posix_fallocate(fd, 0, max(nbytes, 1))
    except OSError as error:
        if made is not None:
            Path(made).unlink(missing_ok=True)
            os.close(fd)  # type: ignore[possibly-undefined]
        room = f", where {shutil.disk_usage(folder).free:,} are free" if folder.is_dir() else ""
        raise FileError(
            f"rank {rank} needs {nbytes:,} bytes in {folder} for the optimizer's state{room}: {error.strerror}. Give "
            f"nvme_path= a disk with room, more ranks with zero=1, or keep the state on the host: offload='full'"
        ) from error
    return fd, path


def _sweep(folder: Path) -> None:
    """Remove files of processes that have ended without removing theirs."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another's, or gone in the meantime
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass  # its process lives
        finally:
            os.close(fd)


def _close(fd: int, path: Path) -> None:
    os.close(fd)
    path.unlink(missing_ok=True)
