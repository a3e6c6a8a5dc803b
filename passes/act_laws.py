"""The laws of what ranks do in a program of segments: what each reads is there, sends are received, nobody is stuck.

    segments-chain   what an act reads is an input, or was made or received before it; what leaves is there in the end
    sends-pair       from one rank of the pipeline axis to another, the n-th send is the n-th receive
    no-deadlock      played through with receives that wait when they are read: every rank comes to its end
    collected-once   a rank puts together one part of each micro-batch, also where several of its stages make it

They are checked before anything runs (`lower`); a violation is a defect of the compiler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch.fx as fx

from ..partitioner.errors import LawError
from ..partitioner.graph import where
from ..partitioner.program import Act
from .draft import Draft
from .segments import Segmented

Key = tuple[str, int | None]
Message = tuple[tuple[str, ...], int | None]


def check_acts(draft: Draft, cut: Segmented) -> None:
    """Raises:
    LawError: one of the laws is broken; names law, ranks, act, value, and the user's source line.
    """
    nodes = {n.name: n for n in draft.graph.fx.nodes}
    laws = {"segments-chain": unread, "sends-pair": unpaired, "no-deadlock": endless, "collected-once": twice}
    for name, law in laws.items():
        for why, value in law(draft, cut):
            at = f" ({where(nodes[value])})" if value in nodes else ""
            raise LawError(f"law {name} broken after pass segments: {why}{at}")


def describe(act: Act, cut: Segmented) -> str:
    of = "" if act.micro_batch is None else f" of micro-batch {act.micro_batch}"
    if act.kind == "run":
        return f"{cut.parts[act.segment].name}{of}"
    if act.kind == "pause":
        return "the pause"
    return f"{act.kind} {', '.join(act.values)}{of} {'to' if act.kind == 'send' else 'from'} stage rank {act.peer}"


def _reads(act: Act, draft: Draft, cut: Segmented) -> list[Key]:
    if act.kind == "run":
        part = cut.parts[act.segment]
        names = (*part.reads, *(c.part for c in part.collects if c.part not in part.gives))
    else:
        names = act.values if act.kind == "send" else ()
    return [_key(name, act, draft, cut) for name in names]


def _makes(act: Act, draft: Draft, cut: Segmented) -> list[Key]:
    if act.kind == "run":
        return [_key(name, act, draft, cut) for name in cut.parts[act.segment].gives]
    return [_key(name, act, draft, cut) for name in act.values] if act.kind == "receive" else []


def _key(name: str, act: Act, draft: Draft, cut: Segmented) -> Key:
    """As `runtime.walk` keeps values: what is read after all micro-batches is that of the last."""
    if name not in cut.timed:
        return (name, None)
    return (name, draft.plan.micro_batches - 1 if act.micro_batch is None else act.micro_batch)


def _inputs(draft: Draft, cut: Segmented) -> set[Key]:
    found: set[Key] = set()
    for node in draft.graph.placeholders:
        often = range(draft.plan.micro_batches) if node.name in cut.timed else (None,)
        found |= {(node.name, i) for i in often}
    return found


def unread(draft: Draft, cut: Segmented) -> Iterator[tuple[str, str]]:
    """(what is wrong, the value) where something is read, or leaves the program, that is not there."""
    for rank, acts in enumerate(cut.acts):
        known, parts = _inputs(draft, cut), Counter()
        for act in acts:
            for key in _reads(act, draft, cut):
                if key not in known:
                    of = "" if key[1] is None else f" of micro-batch {key[1]}"
                    yield f"stage rank {rank}, {describe(act, cut)}: {key[0]}{of} is not there yet", key[0]
            known |= set(_makes(act, draft, cut))
            for c in cut.parts[act.segment].collects if act.kind == "run" else ():
                parts[c.whole] += 1  # whole when every micro-batch has given its part
                if parts[c.whole] == draft.plan.micro_batches:
                    known.add((c.whole, None))
        for value in _leaving(draft, rank):
            if (value.name, None) not in known and (value.name, draft.plan.micro_batches - 1) not in known:
                yield f"stage rank {rank} ends without {value.name}, which leaves the program", value.name


def twice(draft: Draft, cut: Segmented) -> Iterator[tuple[str, str]]:
    """(what is wrong, the value) where a rank puts parts of a micro-batch together that it already has."""
    for rank, acts in enumerate(cut.acts):
        seen: set[tuple[str, int | None]] = set()
        for act in (a for a in acts if a.kind == "run"):
            for c in cut.parts[act.segment].collects:
                if (c.whole, act.micro_batch) in seen:
                    yield f"stage rank {rank}, {describe(act, cut)}: {c.part} is already part of {c.whole}", c.part
                seen.add((c.whole, act.micro_batch))


def _leaving(draft: Draft, rank: int) -> Iterator[fx.Node]:
    stages = draft.plan.stages
    for value, role in zip(draft.graph.output_values, draft.graph.outputs, strict=True):
        away = role.kind == "grad" and stages and rank not in stages.homes[str(role.name)]
        if value is not None and not away and value.op != "get_attr":
            yield value


def unpaired(draft: Draft, cut: Segmented) -> Iterator[tuple[str, str]]:
    """(what is wrong, the value) where the two ends of a message differ."""
    for a in range(len(cut.acts)):
        for b in range(len(cut.acts)):
            sends = [x for x in cut.acts[a] if x.kind == "send" and x.peer == b]
            receives = [x for x in cut.acts[b] if x.kind == "receive" and x.peer == a]
            for n in range(max(len(sends), len(receives))):
                out = sends[n] if n < len(sends) else None
                into = receives[n] if n < len(receives) else None
                if out is None or into is None or _message(out) != _message(into):
                    told = [f"{describe(x, cut)}" if x else "nothing" for x in (out, into)]
                    value = (out or into).values[0] if out or into else ""  # type: ignore[union-attr]
                    yield f"message {n} from stage rank {a} to {b}: one end is {told[0]}, the other {told[1]}", value


def _message(act: Act) -> Message:
    return act.values, act.micro_batch


def endless(draft: Draft, cut: Segmented) -> Iterator[tuple[str, str]]:
    """(who waits for what, a value) if the acts, played through, do not end: a send goes on at once, a receive waits
    where its value is read."""
    at, sent = [0] * len(cut.acts), Counter()
    coming: list[dict[Key, tuple[int, int]]] = [{} for _ in cut.acts]  # value -> (from, the how-manieth message)
    begun: Counter[tuple[int, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, acts in enumerate(cut.acts):
            while at[rank] < len(acts):
                act = acts[at[rank]]
                if _waits(act, coming[rank], sent, rank, draft, cut):
                    break
                if act.kind == "send":
                    sent[rank, act.peer] += 1
                if act.kind == "receive":
                    number = begun[act.peer, rank] = begun[act.peer, rank] + 1
                    coming[rank] |= dict.fromkeys(_makes(act, draft, cut), (act.peer, number))
                at[rank], moved = at[rank] + 1, True
    stuck = [r for r, acts in enumerate(cut.acts) if at[r] < len(acts)]
    if stuck:
        lines, value = [], ""
        for rank in stuck:
            act = cut.acts[rank][at[rank]]
            key, peer = _waits(act, coming[rank], sent, rank, draft, cut) or (("", None), -1)
            value = value or key[0]
            lines.append(f"stage rank {rank} at {describe(act, cut)} waits for {key[0]} of stage rank {peer}")
        yield "; ".join(lines), value


def _waits(
    act: Act, coming: dict[Key, tuple[int, int]], sent: Counter, rank: int, draft: Draft, cut: Segmented
) -> tuple[Key, int] | None:
    """A value that the act reads and that its sender has not sent yet, and the sender."""
    for key in _reads(act, draft, cut):
        peer, number = coming.get(key, (-1, 0))
        if peer >= 0 and sent[peer, rank] < number:
            return key, peer
    return None
