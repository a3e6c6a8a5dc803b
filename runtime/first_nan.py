"""Where the first NaN of a step came from: which rank made it, and what it was about to send.

A sum over ranks takes a NaN from one to all, so all end with the same. `followed` stands between a rank's program and
its comm and notes the first tensor with a NaN: one that the rank was about to send is its own, one that came is not.
An infinite value counts only when it has become NaN: masks are made of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .comm import Post, Program, Start, Wait
from .faults import DivergedError
from .in_step import of_all
from .roll_call import RollCall, ranks_text

log = logging.getLogger("meshwright")


@dataclass
class Origin:
    """What a rank saw first: `where` it was, "" for nothing; `own`: not from another rank."""

    where: str = ""
    own: bool = False

    def see(self, tensors: Sequence[Any], where: str, own: bool) -> None:
        if not self.where and any(isinstance(x, torch.Tensor) and has_nan(x) for x in tensors):
            self.where, self.own = where, own


def has_nan(x: torch.Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and bool(x.isnan().any())


def followed(program: Program, origin: Origin) -> Program:
    """The program; `origin` notes the first NaN."""
    answer: Any = None
    try:
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                origin.see(stop.value, "its own results", True)
                return stop.value
            answer = None
            if isinstance(request, (Start, Post)):
                origin.see(request.tensors, str(request), True)
            answer = yield request
            if isinstance(request, Wait):
                origin.see(answer, "what it received", False)
            del request
    finally:
        program.close()


def compare_origins(call: RollCall | None, origins: dict[int, Origin], spoilt: bool, step: int) -> None:
    """After a step. `spoilt`: whether the loss or gradients of a rank of this process hold a NaN.

    Raises:
        DivergedError: they do, and some ranks' own numbers were the first, not those of all.
    """
    mine = {r: {"spoilt": spoilt, "own": o.own, "where": o.where} for r, o in origins.items()}
    every = of_all(call, "comparing where a NaN came from", mine)
    out = tuple(r for r, e in every.items() if e["own"])
    if not out or not any(e["spoilt"] for e in every.values()):
        return
    where = every[out[0]]["where"]
    text = f"in step {step} the first value that is not a number was that of {ranks_text(out)}, in {where}"
    if len(out) == len(every):
        log.warning("%s: training diverges on all ranks", text)
        return
    raise DivergedError(
        f"{text}; the optimizer has not stepped. Look at that rank's part of the batch and at its memory, or load the "
        f"last checkpoint",
        out,
    )
