"""A schedule: what each rank does, in order, for one step of a pipeline. Plain data, with a text that reads back.

    schedule name=1f1b micro_batches=2 placement=0,1
    0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0BW0 0RECV_B1<1 0BW1
    1: 1RECV_F0<0 1F0 1BW0 1SEND_B0>0 1RECV_F1<0 1F1 1BW1 1SEND_B1>0

A transfer stands where it is *started*: a rank goes on after it, and an action waits for what it receives. An order
that survives even if every transfer blocks its rank is what `validate` asks for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from ..errors import ScheduleError
from .action import COMPUTE, TRANSFERS, Action, parse_action

Edge = tuple[int, int]
"""(source stage, target stage): forward of the target uses a value that forward of the source computes."""


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order.

    Attributes:
        name: of the generator, or the user's.
        placement: per virtual stage the rank that holds it.
        micro_batches: how many the batch is cut into.
        orders: per rank its actions.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of a rank, in forward order."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    @cached_property
    def trains(self) -> bool:
        """Whether there is a backward; a forward-only schedule saves nothing."""
        return any(a.kind in COMPUTE and a.kind != "F" for order in self.orders for a in order)

    @cached_property
    def has_transfers(self) -> bool:
        return any(a.kind in TRANSFERS for order in self.orders for a in order)

    def to_text(self) -> str:
        """A head, then one line a rank; `from_text` reads it back."""
        places = ",".join(map(str, self.placement))
        lines = [f"schedule name={self.name} micro_batches={self.micro_batches} placement={places}"]
        lines += [" ".join([f"{rank}:", *map(str, order)]) for rank, order in enumerate(self.orders)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Flow:
    """Which stages hand values to which, by stage.

    Attributes:
        sources, targets: of forward's values: those that a stage takes values from, and gives values to.
        gradients_from, gradients_to: the same of the way back: whose gradients a stage takes, and to whom it gives one.
    """

    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    gradients_from: tuple[tuple[int, ...], ...]
    gradients_to: tuple[tuple[int, ...], ...]


def chain(stages: int) -> set[Edge]:
    """Each stage hands its values to the next."""
    return {(s, s + 1) for s in range(stages - 1)}


def flow(stages: int, edges: Collection[Edge] | None = None, gradients: Collection[Edge] | None = None) -> Flow:
    """How values go among stages.

    Args:
        stages: how many there are.
        edges: the pairs of stages that a value goes between; a plain chain by default.
        gradients: those edges along which a gradient comes back; all by default. A mask has none.

    Raises:
        ScheduleError: an edge that names no stage or does not go forward, a gradient along no edge.
    """
    edges = chain(stages) if edges is None else set(edges)
    gradients = edges if gradients is None else set(gradients)
    bad = sorted(e for e in edges if not 0 <= e[0] < e[1] < stages)
    if bad:
        raise ScheduleError(f"edges go from a stage to a later one, of {stages} stages; got {_pairs(bad)}")
    if gradients - edges:
        raise ScheduleError(f"gradients come back along edges only, and there is no edge {_pairs(gradients - edges)}")
    return Flow(
        sources=tuple(tuple(sorted(a for a, b in edges if b == s)) for s in range(stages)),
        targets=tuple(tuple(sorted(b for a, b in edges if a == s)) for s in range(stages)),
        gradients_from=tuple(tuple(sorted(b for a, b in gradients if a == s)) for s in range(stages)),
        gradients_to=tuple(tuple(sorted(a for a, b in gradients if b == s)) for s in range(stages)),
    )


def _pairs(edges: Collection[Edge]) -> str:
    return ", ".join(f"{a}>{b}" for a, b in sorted(edges))


def from_text(text: str, name: str = "user") -> Schedule:
    """A schedule from its text. `#` starts a comment, commas count as blanks.

    The head may be left out: then stages lie where they compute, and there are as many micro-batches as are named.

    Raises:
        ScheduleError: a line or a word that cannot be read, with its place and what was expected.
    """
    head: dict[str, str] | None = None
    orders: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if line.startswith("schedule "):
            if head is not None or orders:
                raise ScheduleError(f"line {number}: the head stands first, and once")
            head = _head(number, line)
        elif line:
            orders.append(_order(number, line, len(orders)))
    if not any(orders):
        raise ScheduleError("a schedule has a line a rank, such as '0: 0F0 0BW0'; this text has no action")
    head = head or {}
    return Schedule(
        name=head.get("name", name),
        placement=_numbers(head["placement"]) if "placement" in head else _placement(orders),
        micro_batches=int(head["micro_batches"]) if "micro_batches" in head else _micro_batches(orders),
        orders=tuple(orders),
    )


def _head(number: int, line: str) -> dict[str, str]:
    head: dict[str, str] = {}
    for word in line.split()[1:]:
        key, _, value = word.partition("=")
        good = {
            "name": bool(value),
            "micro_batches": value.isdecimal() and int(value) > 0,
            "placement": all(v.isdecimal() for v in value.split(",")),
        }
        if not good.get(key) or key in head:
            raise ScheduleError(
                f"line {number}, word {word!r}: the head is 'schedule name=1f1b micro_batches=8 placement=0,1,2,3', "
                "each word at most once"
            )
        head[key] = value
    return head


def _order(number: int, line: str, rank: int) -> tuple[Action, ...]:
    first, colon, rest = line.partition(":")
    if not colon or first.strip() != str(rank):
        raise ScheduleError(
            f"line {number}, word {line.split()[0]!r}: expected '{rank}:', then the actions of rank {rank}"
        )
    actions = []
    for place, word in enumerate(rest.replace(",", " ").split(), 1):
        try:
            actions.append(parse_action(word))
        except ScheduleError as error:
            raise ScheduleError(f"line {number}, rank {rank}, word {place}: {error}") from None
    return tuple(actions)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(v) for v in text.split(","))


def _placement(orders: list[tuple[Action, ...]]) -> tuple[int, ...]:
    """Where stages compute, where the text does not say where they lie."""
    ranks: dict[int, set[int]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if action.kind in COMPUTE:
                ranks.setdefault(action.stage, set()).add(rank)
    faults = [f"stage {s} computes on ranks {sorted(on)}" for s, on in sorted(ranks.items()) if len(on) > 1]
    faults += [f"stage {s} computes nowhere" for s in range(max(ranks, default=-1) + 1) if s not in ranks]
    if faults or not ranks:
        wrong = "; ".join(faults) or "nothing computes"
        raise ScheduleError(f"each stage computes on one rank, but {wrong}; placement= in a head says where stages lie")
    return tuple(min(ranks[s]) for s in range(len(ranks)))


def _micro_batches(orders: list[tuple[Action, ...]]) -> int:
    return 1 + max((a.micro for order in orders for a in order if a.micro is not None), default=0)
