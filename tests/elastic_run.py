"""examples/elastic.py with a loss and a gain: of four processes one dies after step 2 with its agent; the three that
go on stop after step 4 until a fourth has come, and all are started again.

    torchrun ... tests/elastic_run.py FOLDER STEPS
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

DIES, WAITS = 2, 4


def main(folder: Path, steps: int) -> None:
    at = Path(__file__).parents[1] / "examples" / "elastic.py"
    spec = importlib.util.spec_from_file_location("elastic", at)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def each(step: int, loss: float) -> None:
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step} {world} {loss!r}\n")
        if step == DIES and world == 4 and "DIES" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == WAITS and world == 3:
            (folder / "waits").touch()
            time.sleep(600)

    example.train(folder, steps, world, each)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
