"""Seconds of a hand-written collective, and which one is cheapest.

    seconds = sum over rounds of  latency + max over members of max(bytes out, bytes in) / bandwidth

Of a round the slowest link that it uses counts, with the `latency` and `bandwidth` of `hardware.Link`. A wire carries
both directions at once. Where `mw.calibrate` measured messages, ranks of one machine may send and copy with the same
few cores, and a message is work as well as delay:

    seconds = buffer(n) + sum over rounds of  max(over members: message(bytes) of one of its messages out, or in, and
                                                              stream(bytes) of each of the others,
                                                  the sum of messages(bytes) of all messages / members)

`message`: one, from one rank to another, until it has arrived and been added, while nobody else sends; `stream`: the
same, one after another in one direction, nobody waiting for an answer; `messages`: one of each rank to the next at
once, so k of them; `buffer`: what a rank copies at the start into memory that messages may go from and to.
"""

from __future__ import annotations

from functools import lru_cache

from .collective_programs import ALGORITHMS, HandProgram, Message, hand_program, servers_of
from .hardware import Link
from .mesh import Mesh

Levels = tuple[tuple[int, Link], ...]
"""(ranks, link) of each axis of a group, the last fastest (`Mesh.levels`)."""


def hand_seconds(program: HandProgram, levels: Levels, nbytes: float) -> float:
    """Seconds of a program.

    Args:
        levels: (ranks, link) of each axis of the group, in the order in which its members are numbered.
        nbytes: of the whole buffer: what is reduced, or what a gather ends with.
    """
    if all(link.has_messages for _, link in levels):
        return _measured(program, levels, nbytes)
    fixed, rate = _line(program, levels)
    return fixed + rate * nbytes


def _measured(program: HandProgram, levels: Levels, nbytes: float) -> float:
    total = max(_seconds(link, "buffer", nbytes) for _, link in levels)
    for messages in program.rounds:
        busy, every = _Busy(program.members), 0.0
        for m in messages:
            link, share = levels[_level(m.source, m.to, levels)][1], nbytes * len(m.chunks) / program.chunks
            busy.add(m, _seconds(link, "message", share), _seconds(link, "stream", share))
            every += _seconds(link, "messages", share)
        total += max(busy.longest(), every / program.members)
    return total


class _Busy:
    """How long the members of a round take for what they send, and for what they receive."""

    def __init__(self, members: int):
        self.more = [[0.0] * members for _ in range(2)]
        self.first = [[0.0] * members for _ in range(2)]

    def add(self, message: Message, alone: float, further: float) -> None:
        for way, member in enumerate((message.source, message.to)):
            self.more[way][member] += further
            self.first[way][member] = max(self.first[way][member], alone - further)

    def longest(self) -> float:
        both = [(self.first[way], self.more[way]) for way in range(2)]
        return max(a + b for first, more in both for a, b in zip(first, more, strict=True))


def _seconds(link: Link, kind: str, nbytes: float) -> float:
    return min(line.base + line.hop + nbytes / line.bandwidth for line in link.lines_of(kind))


@lru_cache(maxsize=1024)
def _line(program: HandProgram, levels: Levels) -> tuple[float, float]:
    """Seconds at 0 bytes, and seconds a byte of the whole buffer."""
    links = [link for _, link in levels]
    fixed = rate = 0.0
    for messages in program.rounds:
        way = [_level(m.source, m.to, levels) for m in messages]
        fixed += max(links[w].latency for w in way)
        slowest = 0.0
        for w in set(way):
            out, into = [0.0] * program.members, [0.0] * program.members
            for m, on in zip(messages, way, strict=True):
                if on == w:
                    share = len(m.chunks) / program.chunks
                    out[m.source] += share
                    into[m.to] += share
            slowest = max(slowest, max(*out, *into) / links[w].bandwidth)
        rate += slowest
    return fixed, rate


def _level(a: int, b: int, levels: Levels) -> int:
    """The slowest link between two members: of the axes on which they differ."""
    differ = []
    for i in reversed(range(len(levels))):
        k = levels[i][0]
        if a % k != b % k:
            differ.append(i)
        a, b = a // k, b // k
    return min(differ, key=lambda i: levels[i][1].bandwidth)


def fastest_first(levels: Levels) -> tuple[int, ...]:
    """The axes in the order in which "hierarchical" reduces over them."""
    return tuple(sorted(range(len(levels)), key=lambda i: (-levels[i][1].bandwidth, -i)))


@lru_cache(maxsize=4096)
def cheapest(kind: str, levels: Levels, nbytes: int) -> str:
    """What "auto" means: the name of the program with the least seconds; of equal ones the first of `ALGORITHMS`."""
    order = fastest_first(levels)
    dims = tuple(k for k, _ in levels)
    return min(ALGORITHMS, key=lambda name: hand_seconds(hand_program(name, kind, dims, order), levels, nbytes))


def program_for(name: str, kind: str, axes: tuple[str, ...], mesh: Mesh, nbytes: int) -> HandProgram:
    """The program of a group of `axes`: "auto" is the cheapest at this size, "server:S" has a server a rank at most."""
    levels = mesh.levels(axes)
    chosen = cheapest(kind, levels, nbytes) if name == "auto" else name
    if servers_of(chosen) > 1:
        chosen = f"server:{min(servers_of(chosen), mesh.group_size(axes))}"
    return hand_program(chosen, kind, tuple(k for k, _ in levels), fastest_first(levels))
