"""Where we run: all ranks in this process, or one rank of many under torchrun."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ..partitioner.errors import PlanError
from ..partitioner.mesh import Mesh
from ..partitioner.wires import GLOO, NCCL, ONE_PROCESS
from .comm import Comm
from .distributed import DistributedComm, join
from .inprocess import InProcessComm
from .watch import Watch


def mesh_here(mesh: Any) -> Mesh:
    """A `Mesh` from what the user gave.

    Raises:
        PlanError: it is neither a `Mesh` nor a DeviceMesh.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if hasattr(mesh, "mesh_dim_names"):
        return Mesh.from_device_mesh(mesh)
    got = type(mesh).__name__
    raise PlanError(f"mesh must be a meshwright.Mesh or a torch DeviceMesh, not {got}: Mesh(dp=2, tp=2)")


def launched() -> int:
    """Processes of this launch: 1 when run as a plain script."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def check_world(mesh: Mesh, inputs: str) -> None:
    """Raises:
    PlanError: the mesh does not match the number of processes, or `inputs` is neither "global" nor "local".
    """
    if inputs not in ("global", "local"):
        raise PlanError(f"inputs={inputs!r}: say 'global' or 'local'")
    world = launched()
    if world == 1:
        if inputs == "local" and mesh.world_size > 1:
            raise PlanError("inputs='local' needs one process a rank (torchrun); in one process pass the global batch")
        return
    if world != mesh.world_size:
        raise PlanError(
            f"mesh {mesh} has {mesh.world_size} ranks, but {world} processes run; launch "
            f"torchrun --nproc-per-node {mesh.world_size}, or change the mesh"
        )


def check_by_hand(collectives: str, device: torch.device) -> None:
    """Raises:
    PlanError: collectives by hand, between GPUs: NCCL has no tags to keep the messages of two collectives apart.
    """
    if collectives != "torch" and launched() > 1 and device.type == "cuda":
        raise PlanError(
            f"collectives={collectives!r} runs in one process or over gloo, not over NCCL, which cannot tell the "
            f"messages of two collectives apart: say collectives='torch'"
        )


def comm_for(mesh: Mesh, timeout: float | None = None, watch: Watch | None = None) -> Comm:
    """The comm of this process: all ranks of the mesh, or the one that lives here."""
    return InProcessComm(mesh) if launched() == 1 else DistributedComm(mesh, device_here(), timeout, watch)


def wire_here(device: torch.device) -> str:
    """What `comm_for` talks over, as the memory model calls it (`partitioner/wires.py`)."""
    if launched() == 1:
        return ONE_PROCESS
    return NCCL if device.type == "cuda" else GLOO


def watch_here(timeout: float | None = None) -> Watch | None:
    """The notes of what ranks are at; None where all live in this process. All processes call it together."""
    if launched() == 1:
        return None
    device = device_here()
    join(device, timeout)
    return Watch(device)


def device_here() -> torch.device:
    """The GPU of this process under torchrun where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
