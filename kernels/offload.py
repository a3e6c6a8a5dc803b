"""A tensor's way to host memory and back: `offload` copies down, `reload` starts the copy up, `reloaded` waits for it.

On CUDA both copies run on a stream of their own, in order, to and from page-locked memory; the device's memory is
free again once its copy is done. On a CPU the host is memory that nobody counts as the device's, filled and read by the
same calls. Strides stay as they are, so that what reads the copy does what it did with the tensor.
"""

from __future__ import annotations

from functools import cache

import torch

lib = torch.library.Library("meshwright", "FRAGMENT")
lib.define("offload(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
lib.define("reload(Tensor host, *, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _fake_offload(x):
    return torch.empty_like(x, device="cpu")


def _fake_reload(host, *, device):
    return torch.empty_like(host, device=device)


def _offload_cpu(x):
    return torch.empty_like(x).copy_(x)


def _offload_cuda(x):
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    side = _stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    return host


def _reload(host, *, device):
    if device.type != "cuda":
        return torch.empty_like(host, device=device).copy_(host)
    side = _stream(device)
    x = torch.empty_like(host, device=device)  # of the computing stream, which may reuse it only after `reloaded`
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        x.copy_(host, non_blocking=True)
    x.record_stream(side)
    return x


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def reloaded(x: torch.Tensor) -> torch.Tensor:
    """What `reload` gave, once it is there."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(_stream(x.device))
    return x


lib.impl("offload", _fake_offload, "Meta")
lib.impl("reload", _fake_reload, "Meta")
lib.impl("offload", _offload_cpu, "CPU")
lib.impl("offload", _offload_cuda, "CUDA")
lib.impl("reload", _reload, "CPU")
torch.library.register_fake("meshwright::offload", _fake_offload, lib=lib)
torch.library.register_fake("meshwright::reload", _fake_reload, lib=lib)
OFFLOAD, RELOAD = torch.ops.meshwright.offload.default, torch.ops.meshwright.reload.default

__all__ = ["OFFLOAD", "RELOAD", "reloaded"]
