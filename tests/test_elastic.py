"""Under torchrun: of four processes one is lost, three go on, a fourth comes back; losses are those of one device."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from elastic_run import DIES, WAITS
from launch import _free_port

ROOT = Path(__file__).parents[1]
STEPS = 7
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The last: processes of a new round find each other in a store of their own, not by the keys of the round before."""


def agent(folder: Path, port: int, host: bool, dies: bool = False) -> subprocess.Popen:
    """torchrun for one machine of one process."""
    conf = f"is_host={int(host)},last_call_timeout=3,join_timeout=300,keep_alive_interval=1,keep_alive_max_attempt=8"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "3:4", "--nproc-per-node", "1"]
    command += ["--max-restarts", "9", "--monitor-interval", "0.5", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf, "--local-addr", "127.0.0.1"]
    env = os.environ | ENV | ({"DIES": "1"} if dies else {})
    command += [str(ROOT / "tests" / "elastic_run.py"), str(folder), str(STEPS)]
    with (folder / f"log{time.monotonic_ns()}").open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)


def undisturbed() -> list[float]:
    """The losses of a run on a mesh of one rank."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from elastic import batch, model  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.remove(str(ROOT / "examples"))
    compiled = mw.compile(
        model(), mw.Mesh(dp=1), loss=F.cross_entropy, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)
    )
    return [float(compiled.step(x, target=y)) for x, y in map(batch, range(STEPS))]


@pytest.mark.slow
@pytest.mark.gloo
def test_four_then_three_then_four_processes_train_as_one(tmp_path: Path):
    port, end = _free_port(), time.monotonic() + 1500
    agents = [agent(tmp_path, port, host=i == 0, dies=i == 3) for i in range(4)]
    try:
        while not (tmp_path / "waits").exists():
            assert time.monotonic() < end and any(a.poll() is None for a in agents[:3]), logs(tmp_path)
            time.sleep(0.2)
        agents.append(agent(tmp_path, port, host=False))
        codes = [a.wait(max(1, end - time.monotonic())) for a in agents]
    finally:
        for a in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(a.pid, signal.SIGKILL)
            a.wait()
    assert [*codes[:3], codes[4]] == [0] * 4 and codes[3] == -9, logs(tmp_path)
    lines = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert [int(step) for step, _, _ in lines] == list(range(STEPS)), lines
    assert [int(world) for _, world, _ in lines] == [4] * (DIES + 1) + [3] * (WAITS - DIES) + [4] * (STEPS - 1 - WAITS)
    assert [float(loss) for _, _, loss in lines] == pytest.approx(undisturbed(), rel=1e-5)


def logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("log*")))
