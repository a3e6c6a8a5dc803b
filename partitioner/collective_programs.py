"""Collectives as data: rounds of messages between the members of a group, over numbered chunks of a flat buffer.

    ring             k - 1 rounds of n/k to one neighbour scatter the sums, k - 1 more gather them
    bidirectional    both ways round at once, each with half of every chunk
    hierarchical     a ring on the fastest level, then on the next with what is left; gathered in the opposite order
    halving          recursive halving, then doubling; members beyond a power of two hand theirs to another first
                     (Thakur, Rabenseifner, Gropp, 2005)
    tree             up a binary tree and down again
    server           everything to one member and back; sharded, chunk s to member s ("server:4")

    bytes that the busiest member sends in an all-reduce of n:   ring, bidirectional, hierarchical, halving (k a power
    of two) 2 n (k - 1) / k;  tree at most 3 n;  server n (k - 1), and as much comes in;  S servers n (k + S - 2) / S

A message's chunks are added to those of its receiver, or replace them. What a member sends and what another receives
are read off the same message, so they pair. `check` proves that every member's part is in every sum exactly once.

Chunks of an all-reduce are equal cuts of the buffer; of the other kinds chunk c belongs to member c // parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

ALGORITHMS = ("ring", "bidirectional", "hierarchical", "halving", "tree", "server")
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, slots=True)
class Message:
    """Chunks from one member to another; `add`: to what it holds, otherwise in place of it."""

    source: int
    to: int
    chunks: tuple[int, ...]
    add: bool


Rounds = tuple[tuple[Message, ...], ...]


@dataclass(frozen=True)
class HandProgram:
    """A collective of `members`. A round begins for a member when its messages of the round before are done.

    Attributes:
        chunks: pieces of the buffer.
        parts: of a gather or scatter, chunks that belong to each member.
    """

    name: str
    kind: str
    members: int
    chunks: int
    parts: int
    rounds: Rounds

    def of(self, member: int) -> tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...]:
        """Of each round that a member takes part in, what it sends and what it receives."""
        out = []
        for each in self.rounds:
            sends = tuple(m for m in each if m.source == member)
            receives = tuple(m for m in each if m.to == member)
            if sends or receives:
                out.append((sends, receives))
        return tuple(out)

    def sent(self, sizes: tuple[int, ...]) -> dict[tuple[int, int], int]:
        """(source, to) -> what goes that way, from the size of each chunk."""
        found: dict[tuple[int, int], int] = {}
        for m in itertools.chain.from_iterable(self.rounds):
            found[m.source, m.to] = found.get((m.source, m.to), 0) + sum(sizes[c] for c in m.chunks)
        return found


def even(n: int, parts: int) -> tuple[int, ...]:
    """Sizes of n elements cut in equal parts, the first ones longer by one where it does not divide."""
    return tuple(n // parts + (i < n % parts) for i in range(parts))


@lru_cache(maxsize=1024)
def hand_program(name: str, kind: str, dims: tuple[int, ...], order: tuple[int, ...] = ()) -> HandProgram:
    """A checked program.

    Args:
        name: one of `ALGORITHMS`, or "server:S".
        kind: one of `KINDS`.
        dims: ranks of each axis of the group, the last fastest, as members are numbered.
        order: indices of dims, the fastest link first; only "hierarchical" looks at it.

    Raises:
        ValueError: no such name or kind, or more servers than members.
    """
    members = 1
    for k in dims:
        members *= k
    if kind not in KINDS:
        raise ValueError(f"no collective {kind!r} by hand; there are {', '.join(KINDS)}")
    servers = servers_of(name)
    chunks, parts = members, 1
    if name == "ring":
        rounds = _levels(kind, (members,), (0,))
    elif name == "hierarchical":
        rounds = _levels(kind, dims, order or tuple(reversed(range(len(dims)))))
    elif name == "bidirectional":
        chunks, parts, rounds = 2 * members, 2, _both_ways(kind, members)
    elif name == "halving":
        chunks = 1 << (members.bit_length() - 1) if kind == "all_reduce" else members
        rounds = _halving(kind, members, chunks)
    elif name == "tree":
        chunks = 1 if kind == "all_reduce" else members
        rounds = _tree(kind, members, chunks)
    elif servers:
        if servers > members:
            raise ValueError(f"{servers} servers among {members} members; at most one each")
        chunks = servers if kind == "all_reduce" else members
        rounds = _server(kind, members, chunks, servers)
    else:
        raise ValueError(f"no collective program {name!r}; there are {', '.join(ALGORITHMS)}, server:S")
    made = HandProgram(name, kind, members, chunks, parts, tuple(r for r in rounds if r))
    check(made)
    return made


def servers_of(name: str) -> int:
    """Of "server" 1, of "server:4" 4, of any other name 0."""
    word, _, count = name.partition(":")
    return 0 if word != "server" else 1 if not count else int(count) if count.isdigit() else 0


def _levels(kind: str, dims: tuple[int, ...], order: tuple[int, ...]) -> Rounds:
    """A ring on one level after another; chunks are numbered as members, so that chunk m ends at member m."""
    places = list(itertools.product(*(range(k) for k in dims)))
    number = {place: i for i, place in enumerate(places)}

    def on(level: int, done: tuple[int, ...], lag: int, add: bool) -> Iterator[tuple[Message, ...]]:
        """Chunks that agree with a member on the levels `done`, and lie (lag + s) places behind it on this one."""
        k = dims[level]
        for s in range(k - 1):
            messages = []
            for i, m in enumerate(places):
                to = (*m[:level], (m[level] + 1) % k, *m[level + 1 :])
                behind = (m[level] - s - lag) % k
                chunks = [j for j, c in enumerate(places) if c[level] == behind and all(c[d] == m[d] for d in done)]
                messages.append(Message(i, number[to], tuple(chunks), add))
            yield tuple(messages)

    steps = [(level, order[:i]) for i, level in enumerate(order)]
    rounds: list[tuple[Message, ...]] = []
    if kind != "all_gather":
        rounds += itertools.chain.from_iterable(on(level, done, 1, True) for level, done in steps)
    if kind != "reduce_scatter":
        rounds += itertools.chain.from_iterable(on(level, done, 0, False) for level, done in reversed(steps))
    return tuple(rounds)


def _both_ways(kind: str, k: int) -> Rounds:
    """Two rings at once: chunk 2 i of each pair goes up, chunk 2 i + 1 goes down."""
    rounds = []
    for add, lag in ((True, 1), (False, 0)):
        if kind == ("all_gather" if add else "reduce_scatter"):
            continue
        for s in range(k - 1):
            up = [Message(m, (m + 1) % k, (2 * ((m - s - lag) % k),), add) for m in range(k)]
            down = [Message(m, (m - 1) % k, (2 * ((m + s + lag) % k) + 1,), add) for m in range(k)]
            rounds.append(tuple(up + down))
    return tuple(rounds)


def _halving(kind: str, k: int, chunks: int) -> Rounds:
    """Among the largest power of two of cores; the first cores have a guest, the member after them."""
    cores = 1 << (k.bit_length() - 1)
    guests = k - cores
    member = [2 * j if j < guests else j + guests for j in range(cores)]
    if kind == "all_reduce":
        owned: list[tuple[int, ...]] = [(j,) for j in range(cores)]
    else:
        owned = [(2 * j, 2 * j + 1) if j < guests else (j + guests,) for j in range(cores)]
    everything = tuple(range(chunks))

    def half(j: int, d: int) -> tuple[int, ...]:
        """What the cores of j's half of a block own together, at distance d."""
        return tuple(itertools.chain.from_iterable(owned[p] for p in range(cores) if p // d == j // d))

    distances = [1 << i for i in range(cores.bit_length() - 1)]
    rounds: list[tuple[Message, ...]] = []
    if kind == "all_gather":
        rounds.append(tuple(Message(2 * j + 1, 2 * j, (2 * j + 1,), False) for j in range(guests)))
    else:
        rounds.append(tuple(Message(2 * j + 1, 2 * j, everything, True) for j in range(guests)))
        for d in reversed(distances):
            rounds.append(tuple(Message(member[j], member[j ^ d], half(j ^ d, d), True) for j in range(cores)))
    if kind != "reduce_scatter":
        for d in distances:
            rounds.append(tuple(Message(member[j], member[j ^ d], half(j, d), False) for j in range(cores)))
    back = {
        "all_reduce": lambda guest: everything,
        "reduce_scatter": lambda guest: (guest,),
        "all_gather": lambda guest: tuple(c for c in everything if c != guest),
    }[kind]
    rounds.append(tuple(Message(2 * j, 2 * j + 1, back(2 * j + 1), False) for j in range(guests)))
    return tuple(rounds)


def _tree(kind: str, k: int, chunks: int) -> Rounds:
    """The root of members [a, b) is a; its children are the roots of the halves of [a + 1, b)."""
    links: list[tuple[int, int, int, int]] = []  # depth, parent, child, end of the child's members

    def grow(a: int, b: int, depth: int) -> None:
        middle = (a + 1 + b + 1) // 2
        for start, stop in ((a + 1, middle), (middle, b)):
            if start < stop:
                links.append((depth, a, start, stop))
                grow(start, stop, depth + 1)

    grow(0, k, 0)
    depths = range(1 + max((link[0] for link in links), default=-1))
    everything = tuple(range(chunks))

    def below(child: int, stop: int) -> tuple[int, ...]:
        return tuple(range(child, stop))

    rounds = []
    for depth in reversed(depths):
        here = [link for link in links if link[0] == depth]
        if kind == "all_gather":
            rounds.append(tuple(Message(c, p, below(c, stop), False) for _, p, c, stop in here))
        else:
            rounds.append(tuple(Message(c, p, everything, True) for _, p, c, _ in here))
    for depth in depths:
        messages = []
        for _, p, c, stop in (link for link in links if link[0] == depth):
            own = below(c, stop)
            chosen = {"all_reduce": everything, "reduce_scatter": own}.get(kind)
            messages.append(Message(p, c, chosen or tuple(x for x in everything if x not in own), False))
        rounds.append(tuple(messages))
    return tuple(rounds)


def _server(kind: str, k: int, chunks: int, servers: int) -> Rounds:
    """Members 0 to servers - 1 are the servers, member s of the chunks c with c % servers = s."""
    served = [tuple(range(s, chunks, servers)) for s in range(servers)]
    there, back = [], []
    for s, m in itertools.product(range(servers), range(k)):
        if kind == "all_gather":
            own = (m,) if m % servers == s else ()
            there += [Message(m, s, own, False)] if own and m != s else []
            others = tuple(c for c in served[s] if c != m)
            back += [Message(s, m, others, False)] if others and m != s else []
        elif m != s:
            there.append(Message(m, s, served[s], True))
            due = served[s] if kind == "all_reduce" else tuple(c for c in served[s] if c == m)
            back += [Message(s, m, due, False)] if due else []
    return tuple(there), tuple(back)


def check(program: HandProgram) -> None:
    """Prove a program: every part is in every sum once, nothing is sent that is not there, and what is on its way is
    only overwritten by a value that could not be known before it had arrived.

    Raises:
        ValueError: naming round, members and chunk.
    """
    k, full = program.members, (1 << program.members) - 1
    gathers = program.kind == "all_gather"
    holds = [[_own(program, m, c, gathers) for c in range(program.chunks)] for m in range(k)]
    gone = [[False] * program.chunks for _ in range(k)]
    for at, messages in enumerate(program.rounds):
        before = [list(row) for row in holds]
        for m in messages:
            for c in m.chunks:
                gone[m.source][c] |= before[m.source][c] != full
        for m in messages:
            for c in m.chunks:
                got, has = before[m.source][c], holds[m.to][c]
                late = gone[m.to][c] or not got or not has or got & has
                wrong = late if m.add else got != full or has == full
                if wrong or m.source == m.to or len(set(m.chunks)) < len(m.chunks):
                    what = "added twice, or after it was sent on" if m.add else "not final, or there already"
                    raise ValueError(
                        f"{program.name} {program.kind}, round {at}, member {m.source} to {m.to}: chunk {c} is {what}"
                    )
                holds[m.to][c] = has | got
    for m, c in itertools.product(range(k), range(program.chunks)):
        if holds[m][c] != full and (program.kind != "reduce_scatter" or c // program.parts == m):
            raise ValueError(f"{program.name} {program.kind}: member {m} ends without all of chunk {c}")


def _own(program: HandProgram, member: int, chunk: int, gathers: bool) -> int:
    """Whose parts a member has of a chunk to begin with, as bits; a gathered chunk is whole where it is at all."""
    if not gathers:
        return 1 << member
    return (1 << program.members) - 1 if chunk // program.parts == member else 0
