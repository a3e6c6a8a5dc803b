"""The image of a safetensors file: what others read from it, and that its memory is used again."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.runtime.file_image import DIRECT, DTYPES, SLICE, Image
from safetensors.torch import load_file


def some(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(21).remainder(2).view(3, 7).t().to(dtype)


@pytest.mark.parametrize("kind", ["disk", "memory", "pages too small"])
def test_safetensors_reads_what_an_image_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    """Every dtype, strides, empty and 0-d tensors, sizes that are no whole pages and larger than a write."""
    folder = Path("/dev/shm") if kind == "memory" else tmp_path
    real = os.write

    def refused(file: int, data: Any) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, data)

    if kind == "pages too small":
        monkeypatch.setattr("meshwright.runtime.file_image.os.write", refused)
    want = {str(dtype): some(dtype) for dtype in DTYPES}
    want |= {"none": torch.empty(0, 3), "one": torch.tensor(3.5), "long": torch.arange(SLICE // 4 + 3)}
    image, path = Image(), folder / f"image-{os.getpid()}.safetensors"
    try:
        for _ in range(2):
            image.take(dict(want))
            image.write(path)
            got = load_file(path)
            assert got.keys() == want.keys() == image.tensors.keys()
            for name, x in want.items():
                assert got[name].dtype == x.dtype and torch.equal(got[name], x), name
                assert torch.equal(image.tensors[name], x), name
            want = {n: x for n, x in want.items() if n != "long"}  # a shorter one over a longer one
    finally:
        path.unlink(missing_ok=True)


def test_its_memory_is_used_again_and_tensors_are_let_go():
    image, x = Image(), torch.ones(5000)
    given = {"x": x}
    image.take(given)
    where = image.tensors["x"].data_ptr()
    image.take({"x": 2 * x})
    assert not given and image.tensors["x"].data_ptr() == where and (image.tensors["x"] == 2).all()
    with pytest.raises(mw.MeshwrightError, match=r"no dtype for odd \(torch.complex64\)"):
        image.take({"odd": torch.ones(2, dtype=torch.complex64)})
