"""What every process has, read by all of them: each writes a text into the store of notes, rank 0 passes all texts on.

This goes beside the process groups: a process that is in a collective of its step, while others compare something, is
not answered by them by accident, and none waits for one that has died.
"""

from __future__ import annotations

import json
import time
from typing import Any

from .faults import DivergedError, PeerError
from .watch import Lookout, Watch

LOOK = 0.5
"""Seconds after which a process that waits looks whether those it waits for are still there."""

LIMIT = 1800.0
"""Seconds that it waits where no timeout is given, as torch.distributed does."""


class RollCall:
    """Compares what processes have. All processes make one, and call it alike.

    Args:
        watch: of this process; its store carries the texts.
        timeout: seconds to wait for the others.
    """

    def __init__(self, watch: Watch, timeout: float | None):
        self.watch, self.timeout, self.number = watch, timeout or LIMIT, 0
        self._store = watch.store

    def everyones(self, what: str, mine: Any) -> list[Any]:
        """What each process has, by rank.

        Args:
            what: its name, the same in all processes.
            mine: plain numbers, texts, lists and dicts.

        Raises:
            PeerError: a process did not come within the timeout, or is gone.
            DivergedError: processes are at different things.
        """
        here, world = self.watch.rank, self.watch.world
        keys = [f"roll {self.number} {r}" for r in range(world)]
        every = f"roll {self.number} all"
        self.number += 1
        try:
            self.watch.waiting = what
            self._store.set(keys[here], json.dumps((what, mine)))
            if here == 0:
                texts = self._wait(what, keys, list(range(world)))
                self._store.set(every, json.dumps([json.loads(t) for t in texts]))
                for old in (*keys, f"roll {self.number - 2} all"):
                    self._store.delete_key(old)
            found = json.loads(self._wait(what, [every], [0])[0])
        except RuntimeError as error:
            raise PeerError(f"rank {here}: {what} failed", self.watch.blame()) from error
        finally:
            self.watch.waiting = ""
        if len({text for text, _ in found}) > 1:
            at = "; ".join(f"rank {r} is {text}" for r, (text, _) in enumerate(found))
            raise DivergedError(f"the processes do different things: {at}", odd([text for text, _ in found]))
        return [value for _, value in found]

    def _wait(self, what: str, keys: list[str], ranks: list[int]) -> list[bytes]:
        """The values of keys that these ranks write."""
        begin, looked, pause = time.monotonic(), 0.0, 0.001
        lookout = Lookout(self.watch)
        while not self._store.check(keys):
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
            waited = time.monotonic() - begin
            if waited - looked < LOOK:
                continue
            looked = waited
            late = [r for k, r in zip(keys, ranks, strict=True) if not self._store.check([k])]
            gone = lookout.gone(late)
            why = next(iter(gone.values()), f"within {self.timeout:g} s" if waited > self.timeout else "")
            if late and why:
                text = f"rank {self.watch.rank}: {what} failed, {ranks_text(late)} did not come ({why})"
                raise PeerError(text, self.watch.blame())
        return self._store.multi_get(keys)


def odd(values: list[Any]) -> tuple[int, ...]:
    """The indices whose value is not the commonest one; of equally common ones the first value's counts as that."""
    counts: dict[str, list[int]] = {}
    for i, value in enumerate(values):
        counts.setdefault(json.dumps(value), []).append(i)
    most = max(counts.values(), key=lambda which: (len(which), -which[0]))
    return tuple(i for i in range(len(values)) if i not in most)


def ranks_text(ranks: tuple[int, ...] | list[int]) -> str:
    """ "rank 1", or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
