"""Who stopped: each process writes down once a second what it is at, and reads the others' notes when something fails.

A note is (beat, step, doing, seconds): the number of the note, the training step, what the process does (the
collective or message that it waits for, a line of a generated program with the user's source line, or a line of the
user's script), and for how long. Notes lie in a store of their own that rank 0 serves. Whoever fails to hear from a
peer names it:

    raised    it wrote down its error before it left
    gone      its notes have stopped: killed, stopped, or cut off
    ended     its script came to the end
    behind    its notes go on, and it waits for nobody: what it does, and for how long

The first of these kinds that there is, is the cause; ranks that only wait, or left because of another, are not named.
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from .faults import MeshwrightError, PeerError

BEAT = 1.0
"""Seconds from note to note."""

SILENT = 5.0
"""Beats without a new note after which a rank is gone."""

LINGER = 10.0
"""Beats that rank 0 stays, after something failed, for ranks that have not read why."""

_ROOT = Path(__file__).parents[1]
_NOT_THE_USERS = (
    *(str(_ROOT / room) for room in ("runtime", "passes", "partitioner", "kernels", "__init__.py")),
    str(Path(torch.__file__).parent), str(Path(os.__file__).parent), "<frozen",
)  # fmt: skip


@dataclass(frozen=True)
class Note:
    """What one process was at. `waits`: whether that is waiting for others."""

    beat: int = -1
    step: int = 0
    doing: str = ""
    waits: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.beat < 0:
            return "never heard of"
        verb = "waiting for" if self.waits else "at"
        return f"in step {self.step}, for {self.seconds:.0f} s {verb} {self.doing}"


class Watch:
    """The notes of this process and of its peers. Every process of the launch makes one, at the same time.

    Args:
        device: where a tensor must lie for torch.distributed to send it.

    Attributes:
        store: where the notes lie.
        step: the training step, written into the notes.
        waiting: what the process waits for; "" where it does not.
        closing: called when the process ends.

    Raises:
        MeshwrightError: rank 0 cannot be reached at MASTER_ADDR.
    """

    def __init__(self, device: torch.device, beat: float = BEAT):
        self.rank, self.world, self.beat = dist.get_rank(), dist.get_world_size(), beat
        self.step, self.waiting = 0, ""
        self.store = _store(self.rank, device)
        self.closing: list[Callable[[], None]] = []
        self._ended = self._left = False
        self._main = threading.get_ident()
        self._write(Note(0, 0, self._position(), False))
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beats, daemon=True, name="meshwright watch")
        self._beating.start()
        atexit.register(self._exits)

    # -- writing
    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error that leaves the block is written down for the others; if the program goes on, it is taken back."""
        if self._ended and not self._left:
            self._ended = False
            _trying(self.store.delete_key, f"end {self.rank}")
        try:
            yield
        except BaseException as error:
            self.raised(error)
            raise

    def raised(self, error: BaseException) -> None:
        """Write down that this rank fails; only its first error, and none that a peer is the cause of."""
        if isinstance(error, PeerError):
            self._end("left", error.why)
        else:
            self._end("raised", _text(error))

    def leave(self, error: BaseException) -> None:
        """The same, for good: what the others wait for is about to be closed."""
        self.raised(error)
        self._left = True

    def _exits(self) -> None:
        """At the end of the process: the others learn why, what they wait for ends, and rank 0 serves them a while.

        The notes end before the interpreter does: a thread that returns from the store after that aborts the process.
        """
        error = getattr(sys, "last_value", None)
        if error is None:
            self._end("ended", f"its script came to the end after step {self.step}")
        else:
            self._end("raised", _text(error))
        for close in self.closing:
            close()
        self._serves()
        self._over.set()
        self._beating.join(5)

    def _serves(self) -> None:
        """Rank 0 stays a while for those that have not read why something failed."""
        end = time.monotonic() + LINGER * self.beat
        while self.rank == 0 and time.monotonic() < end:
            over = self.ends()
            if len(over) == self.world or not any(kind != "ended" for kind, _ in over.values()):
                return
            time.sleep(self.beat / 5)

    def _end(self, kind: str, text: str) -> None:
        if self._ended:
            return
        self._ended = True
        _trying(self.store.set, f"end {self.rank}", json.dumps((kind, text)))

    def _beats(self) -> None:
        before, since = "", time.monotonic()
        for beat in range(1, sys.maxsize):
            if self._over.wait(self.beat):
                return
            waiting = self.waiting
            doing = waiting or self._position()
            if doing != before:
                before, since = doing, time.monotonic()
            note = Note(beat, self.step, doing, bool(waiting), time.monotonic() - since)
            if not self._write(note):
                return

    def _write(self, note: Note) -> bool:
        return _trying(self.store.set, f"note {self.rank}", json.dumps(asdict(note))) is not _FAILED

    def _position(self) -> str:
        """The line of a generated program, or else of the user's script, that the main thread is at."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith("<meshwright "):
                return linecache.getline(name, frame.f_lineno).strip()
            if not name.startswith(_NOT_THE_USERS) or frame.f_back is None:
                return _line(frame)
            frame = frame.f_back
        return "its end"

    # -- reading
    def blame(self) -> str:
        """Which ranks are the cause of a failure, a line each; takes up to `SILENT` beats."""
        before = self.notes()
        if before is None:
            return "rank 0 is gone: it kept the notes of all ranks"
        deadline = time.monotonic() + SILENT * self.beat
        while not (ended := self.ends()).keys() >= {r for r in before if r != self.rank}:
            if any(kind == "raised" for kind, _ in ended.values()) or time.monotonic() > deadline:
                break
            time.sleep(self.beat / 5)
        now = self.notes()
        if now is None:
            return "rank 0 is gone: it kept the notes of all ranks"
        return _verdict(self.rank, before, now, ended)

    def notes(self) -> dict[int, Note] | None:
        """Each rank's last note; None where rank 0 is gone."""
        found = {}
        for rank in range(self.world):
            text = _trying(self._read, f"note {rank}")
            if text is _FAILED:
                return None
            found[rank] = Note(**json.loads(text)) if text else Note()
        return found

    def ends(self) -> dict[int, tuple[str, str]]:
        """(kind, why) of the ranks that have ended."""
        found = {}
        for rank in range(self.world):
            text = _trying(self._read, f"end {rank}")
            if text and text is not _FAILED:
                kind, why = json.loads(text)
                found[rank] = (kind, why)
        return found

    def _read(self, key: str) -> bytes:
        return self.store.get(key) if self.store.check([key]) else b""


class Lookout:
    """Which ranks are gone, of those that one waits for."""

    def __init__(self, watch: Watch):
        self.watch = watch
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> its last note, and since when that is the last

    def gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Rank -> "raised", "left", "ended", or "silent" for one that has written no note for `SILENT` beats."""
        over, notes, now = self.watch.ends(), self.watch.notes(), time.monotonic()
        if notes is None:
            return {0: "silent"}
        found = {}
        for r in ranks:
            beat = notes[r].beat
            if r not in self._heard or self._heard[r][0] != beat:
                self._heard[r] = (beat, now)
            if r in over:
                found[r] = over[r][0]
            elif now - self._heard[r][1] > SILENT * self.watch.beat:
                found[r] = "silent"
        return found


def _verdict(me: int, before: dict[int, Note], now: dict[int, Note], ended: dict[int, tuple[str, str]]) -> str:
    others = [r for r in now if r != me]
    raised = [f"rank {r} raised: {ended[r][1]}" for r in others if ended.get(r, ("",))[0] == "raised"]
    silent = [r for r in others if r not in ended and now[r].beat == before[r].beat]
    gone = [f"rank {r} is gone or silent; last heard of {now[r]}" for r in silent]
    over = [f"rank {r}: {ended[r][1]}" for r in others if ended.get(r, ("",))[0] == "ended"]
    running = [r for r in others if r not in ended and r not in silent]
    behind = [f"rank {r} is behind: {now[r]}" for r in running if not now[r].waits]
    left = list(dict.fromkeys(ended[r][1] for r in others if ended.get(r, ("",))[0] == "left"))
    waits = _each_other([me, *(r for r in running if now[r].waits)], now)
    return "; ".join(next((found for found in (raised, gone, over, behind, left, waits) if found), []))


def _each_other(ranks: list[int], now: dict[int, Note]) -> list[str]:
    """Ranks that wait, none of which is gone or busy: they have come to different points of the program."""
    if len(ranks) < 2:
        return []
    apart = len({(now[r].step, now[r].doing) for r in ranks}) > 1
    why = "they are at different points: inputs of another shape on one of them, or a call that the others do not make"
    said = [f"rank {r} waits: {now[r]}" for r in sorted(ranks)]
    return [*said, why] if apart else said


_FAILED = object()


def _trying(call: Callable[..., Any], *args: Any) -> Any:
    """The call's answer, or `_FAILED` where the store cannot be reached: rank 0 is no more."""
    try:
        return call(*args)
    except RuntimeError:  # also torch.distributed.DistError
        return _FAILED


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _store(rank: int, device: torch.device) -> TCPStore:
    """A store that rank 0 serves at a port that it finds free."""
    host, wait = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=60)
    made = TCPStore(host, 0, None, True, timeout=wait, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([made.port if made else 0], dtype=torch.int64, device=device)
    dist.broadcast(port, 0)
    try:
        return made or TCPStore(host, int(port), None, False, timeout=wait)
    except RuntimeError as error:
        raise MeshwrightError(
            f"rank {rank} cannot reach rank 0 at {host}:{int(port)} ({error}); set MASTER_ADDR to the address of its "
            f"machine, and let its ports through"
        ) from error
