"""A safetensors file as it will lie on disk, put together in host memory and written past the page cache.

    length of the header, 8 bytes little endian | header, JSON, spaces up to a whole page | tensors, widest dtype first

Memory that has been used before has its pages: copying into it takes a seventh of the time of copying into new memory.
Whole pages can go to the disk by themselves (O_DIRECT), which leaves the processor to training; docs/checkpoints.md
has what both save.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
from pathlib import Path

import torch

from ..partitioner.errors import MeshwrightError

PAGE = 4096
"""Bytes; what memory, offsets and lengths of a write past the page cache must be multiples of."""

SLICE = 2**24
"""Bytes of one write."""

DIRECT = getattr(os, "O_DIRECT", 0)

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The names that safetensors gives to dtypes."""


class Image:
    """One file in host memory; what it held before is overwritten by the next `take`.

    Attributes:
        tensors: what the file holds, by name, in the memory of the image.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.size = 0
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy tensors of any device and strides. The dict is emptied on the way: each can go once it is copied.

        Raises:
            MeshwrightError: of a dtype that safetensors does not have.
        """
        if odd := [f"{n} ({x.dtype})" for n, x in tensors.items() if x.dtype not in DTYPES]:
            raise MeshwrightError(f"safetensors has no dtype for {', '.join(odd)}: they cannot be written")
        order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
        header, at = {}, 0
        for name in order:
            x = tensors[name]
            header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
            at += x.nbytes
        text = json.dumps(header).encode()
        begin = _whole_pages(8 + len(text))
        self._reserve(begin + at)
        self.size, self.tensors = begin + at, {}
        start = (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8)
        self._memory[:begin] = start
        for name in order:
            x = tensors.pop(name).detach()
            here = self._bytes[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
            here.copy_(x)
            self.tensors[name] = here
            begin += x.nbytes

    def _reserve(self, size: int) -> None:
        if size > len(self._memory):
            self.tensors = {}
            self._memory = mmap.mmap(-1, _whole_pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, path: Path) -> None:
        """Into a new file, until it is on the disk.

        Raises:
            OSError: the disk is full, or whatever else it says.
        """
        file = _opened(path)
        try:
            with memoryview(self._memory) as memory:
                self._write(file, memory[: _whole_pages(self.size)])
            os.ftruncate(file, self.size)
            os.fsync(file)
        finally:
            os.close(file)

    def _write(self, file: int, memory: memoryview) -> None:
        at = 0
        while at < len(memory):
            try:
                at += os.write(file, memory[at : at + SLICE])
            except OSError as error:
                flags = fcntl.fcntl(file, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & DIRECT:
                    raise
                fcntl.fcntl(file, fcntl.F_SETFL, flags & ~DIRECT)  # this disk wants larger pages: by way of the cache


def _opened(path: Path) -> int:
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    try:
        return os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)  # no disk: a file system in memory


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
