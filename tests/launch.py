"""Runs a function in several processes joined by gloo: `run_ranks("test_distributed:all_kinds", 4)`.

Each process is a fresh interpreter (nothing is forked), so the function must be importable: it is named
`"module:function"`, where the module lies in the tests folder. It is called as `function(rank, world, *args)` after
torch.distributed has been joined through a file store; what it returns must pickle.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


@dataclass
class Outcome:
    """What one process ended with: its value, or the traceback, or (when it was killed) only an exit code."""

    rank: int
    value: Any = None
    error: str = ""
    exit_code: int = 0

    @property
    def ok(self) -> bool:
        return not self.error and self.exit_code == 0


class RanksFailed(AssertionError):
    """Some process failed; the message holds every failed one's traceback."""

    def __init__(self, outcomes: list[Outcome]):
        self.outcomes = outcomes
        failed = [f"--- rank {o.rank}, exit code {o.exit_code}\n{o.error}" for o in outcomes if not o.ok]
        super().__init__("\n".join(failed))


def run_ranks(
    function: str | Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 120,
    comm_timeout: float = 60,
    join: bool = True,
) -> list[Any]:
    """The values that `function(rank, world, *args)` returns in `world` processes, by rank.

    Args:
        function: `"module:function"`, or a function at the top level of a test module.
        timeout: seconds until every process is ended.
        comm_timeout: the timeout of the process group.
        join: False leaves torch.distributed to the function (RANK, WORLD_SIZE, MASTER_ADDR ... are set).

    Raises:
        RanksFailed: a process raised, died or ran past the timeout.
    """
    outcomes = run_outcomes(function, world, *args, timeout=timeout, comm_timeout=comm_timeout, join=join, grace=5)
    if not all(o.ok for o in outcomes):
        raise RanksFailed(outcomes)
    return [o.value for o in outcomes]


def run_outcomes(
    function: str | Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 120,
    comm_timeout: float = 60,
    join: bool = True,
    grace: float | None = None,
    but: int | None = None,
) -> list[Outcome]:
    """As `run_ranks`, but failures are values.

    Args:
        grace: seconds the others get after the first failure.
        but: a rank that is not waited for.
    """
    name = function if isinstance(function, str) else f"{function.__module__.rpartition('.')[2]}:{function.__name__}"
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        Path(folder, "job").write_bytes(pickle.dumps((name, args, comm_timeout, join, but is None)))
        children = [_child(folder, rank, world, port) for port in [_free_port()] for rank in range(world)]
        try:
            _wait_for([c for rank, c in enumerate(children) if rank != but], timeout, grace)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
        return [_outcome(folder, rank, child.returncode) for rank, child in enumerate(children)]


def _child(folder: str, rank: int, world: int, port: int) -> subprocess.Popen:
    env = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with Path(folder, f"err{rank}").open("wb") as err:
        return subprocess.Popen([sys.executable, __file__, folder], env=env, stdout=err, stderr=err)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _wait_for(children: list[subprocess.Popen], timeout: float, grace: float | None) -> None:
    end = time.monotonic() + timeout
    failed = False
    while any(c.poll() is None for c in children) and time.monotonic() < end:
        if grace is not None and not failed and any(c.poll() for c in children):
            failed, end = True, min(end, time.monotonic() + grace)
        time.sleep(0.02)


def _outcome(folder: str, rank: int, exit_code: int) -> Outcome:
    result = Path(folder, f"out{rank}")
    if result.exists():
        value, error = pickle.loads(result.read_bytes())
        return Outcome(rank, value, error, 1 if error else 0)
    printed = Path(folder, f"err{rank}").read_text(errors="replace")[-4000:]
    return Outcome(rank, None, printed or "ended before it returned", exit_code)


def _main(folder: str) -> int:
    name, args, comm_timeout, join, together = pickle.loads(Path(folder, "job").read_bytes())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    value, error = None, ""
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if join:
            wait = timedelta(seconds=comm_timeout)
            dist.init_process_group("gloo", f"file://{folder}/store", timeout=wait, rank=rank, world_size=world)
        module, _, function = name.partition(":")
        value = pickle.dumps(getattr(importlib.import_module(module), function)(rank, world, *args))
        value = pickle.loads(value)
    except BaseException:
        error = traceback.format_exc()
    part = Path(folder, f"out{rank}.part")
    part.write_bytes(pickle.dumps((value, error)))
    part.rename(Path(folder, f"out{rank}"))
    if not error and join and together and dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(1 if error else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    sys.exit(_main(sys.argv[1]))
