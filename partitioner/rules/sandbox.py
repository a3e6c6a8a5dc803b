"""Run trials of unknown code in a forked child: what crashes, hangs or corrupts memory there harms nobody.

    work(attempt)        runs in the child and calls `attempt(key, trial)` for each thing it tries
    attempt(key, trial)  the trial's value; None where it raised, crashed the child, or took too long

A trial that ends the child is noted, and a new child does the work over, taking the values of earlier trials from the
record. Values are JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..compat import no_modes

Attempt = Callable[[str, Callable[[], Any]], Any]
SILENCE = 10.0
"""Seconds a trial may take."""
PATIENCE = 30.0
"""Seconds after which no further child is started."""
CRASHES = 24
"""Trials that may end their child."""


class Unfinished(Exception):
    """The work came to no end; says why."""


def in_child(work: Callable[[Attempt], Any]) -> Any:
    """The value of `work`, run in forked children.

    Raises:
        Unfinished: it raised, too many of its trials crashed, or it took too long.
    """
    known: dict[str, Any] = {}
    began = time.monotonic()
    for _ in range(CRASHES):
        last, ended = None, None
        for kind, key, value in _messages(work, known):
            if kind == "begin":
                last = key
            elif kind == "end":
                known[key], last = value, None
            else:
                ended = (kind, value)
        if ended and ended[0] == "done":
            return ended[1]
        if ended:
            raise Unfinished(ended[1])
        if last is None:
            raise Unfinished("it ends the process")
        known[last] = None
        if time.monotonic() - began > PATIENCE:
            raise Unfinished("it takes too long to try")
    raise Unfinished("it ends the process again and again")


def _messages(work: Callable[[Attempt], Any], known: dict[str, Any]):
    """Fork a child that does the work; its messages as (kind, key, value), until it ends or falls silent."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs on one thread and only calls the op
        pid = os.fork()
    if pid == 0:
        os.close(reads)
        _child(work, known, writes)
    os.close(writes)
    buffer = b""
    try:
        while select.select([reads], [], [], SILENCE)[0]:
            block = os.read(reads, 1 << 16)
            if not block:
                break
            *lines, buffer = (buffer + block).split(b"\n")
            for line in lines:
                yield json.loads(line)
    finally:
        os.close(reads)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(work: Callable[[Attempt], Any], known: dict[str, Any], pipe: int) -> NoReturn:
    def send(kind: str, key: str, value: Any = None) -> None:
        os.write(pipe, json.dumps([kind, key, value]).encode() + b"\n")

    def attempt(key: str, trial: Callable[[], Any]) -> Any:
        if key in known:
            return known[key]
        send("begin", key)
        try:
            value = trial()
        except Exception:
            value = None
        send("end", key, value)
        return value

    try:
        _quiet()
        with no_modes():
            send("done", "", work(attempt))
    except BaseException as fault:
        with contextlib.suppress(BaseException):
            send("fault", "", f"{type(fault).__name__}: {fault}"[:500])
    os._exit(0)


def _quiet() -> None:
    """No output, no traces of crashes, one thread, and an end even if the parent is gone."""
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(2 * PATIENCE))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
