"""One action of a pipeline schedule, and its word.

    2F0  2B0  2W0  2BW0          stage 2, micro-batch 0: forward; gradient of inputs, of weights, of both at one go
    0SEND_F0>3   3RECV_F0<0      what forward of stage 0 hands to stage 3, as both of its ends see it
    3SEND_B0>0   0RECV_B0<3      its gradient, on the way back
    2REDUCE                      the gradients of stage 2 are summed over its replicas
    2UNSHARD  2RESHARD           the weights of stage 2 are gathered, and let go
    2OFFLOAD0  2RELOAD0          what stage 2 saved of micro-batch 0 goes to the host, and comes back

The words are those of torch.distributed.pipelining where it has one, but for two. A transfer names both of its stages,
since a value may skip stages. B is the gradient of the inputs alone, as in the Zero Bubble paper (arXiv 2401.10241).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import ScheduleError

COMPUTE = frozenset({"F", "B", "W", "BW"})
SENDS = frozenset({"SEND_F", "SEND_B"})
RECEIVES = frozenset({"RECV_F", "RECV_B"})
TRANSFERS = SENDS | RECEIVES
WHOLE_STAGE = frozenset({"REDUCE", "UNSHARD", "RESHARD"})
"""Kinds that have no micro-batch."""

KINDS = COMPUTE | TRANSFERS | WHOLE_STAGE | {"OFFLOAD", "RELOAD"}

PARTNER = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}

_N = "(0|[1-9][0-9]*)"
_WORD = re.compile(
    f"{_N}(?:(F|BW|B|W|OFFLOAD|RELOAD){_N}|(REDUCE|UNSHARD|RESHARD)|(SEND_[FB]){_N}>{_N}|(RECV_[FB]){_N}<{_N})"
)
FORMS = (
    "2F0, 2B0, 2W0, 2BW0, 0SEND_F0>3, 3RECV_F0<0, 3SEND_B0>0, 0RECV_B0<3, 2REDUCE, 2UNSHARD, 2RESHARD, "
    "2OFFLOAD0, 2RELOAD0"
)


class Action(NamedTuple):
    """What a rank does next. A named tuple: a search makes and hashes tens of thousands.

    Attributes:
        stage: the virtual stage that acts.
        kind: what it does, one of `KINDS`.
        micro: the micro-batch; None for what concerns the whole stage.
        other: the stage at the other end of a transfer.
    """

    stage: int
    kind: str
    micro: int | None = None
    other: int | None = None

    def __str__(self) -> str:
        micro = "" if self.micro is None else self.micro
        if self.other is None:
            return f"{self.stage}{self.kind}{micro}"
        return f"{self.stage}{self.kind}{micro}{'>' if self.kind in SENDS else '<'}{self.other}"

    @property
    def partner(self) -> Action:
        """The other end of a transfer."""
        assert self.other is not None, f"{self} is no transfer"
        return Action(self.other, PARTNER[self.kind], self.micro, self.stage)


def parse_action(word: str) -> Action:
    """The action that a word names; the reverse of `str`.

    Raises:
        ScheduleError: no action has this word.
    """
    found = _WORD.fullmatch(word)
    if found is None:
        raise ScheduleError(f"{word!r} is no action; the forms are {FORMS}")
    stage, kind, micro, whole, send, sent, target, receive, received, source = found.groups()
    what, micro, other = kind or whole or send or receive, micro or sent or received, target or source
    return Action(int(stage), what, None if micro is None else int(micro), None if other is None else int(other))
