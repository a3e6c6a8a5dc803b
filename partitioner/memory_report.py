"""What a step holds, for reading: per stage the table of states, the peak, and what stands at it by module.

    bytes a parameter = (parameters + gradients + optimizer state of a rank) / trained and frozen elements of that rank
                        fp32 Adam 4 + 4 + 8 = 16
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .memory import MemoryTimeline, Model, first_ranks
from .summary import columns
from .units import bytes_text

LARGEST = 8
"""Modules listed of what stands at the peak."""


@dataclass(frozen=True)
class MemoryReport:
    """What ranks hold over a step; `str` of it is a page.

    Attributes:
        ranks: of each stage the rank that holds most (of a mesh without a pipeline, one).
        elements: per one of them its elements of parameters.
        room: bytes that a rank may hold: `memory=`, or what the device has.
        hints: what would make the peak smaller, the most bytes first.
    """

    ranks: tuple[MemoryTimeline, ...]
    elements: tuple[int, ...]
    room: int
    hints: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes of the rank that holds most."""
        return max(t.peak for t in self.ranks)

    @property
    def fits(self) -> bool:
        return self.peak <= self.room

    def __str__(self) -> str:
        most = max(self.ranks, key=lambda t: t.peak)
        verdict = "fits" if self.fits else "does not fit"
        lines = [f"peak {bytes_text(self.peak)} a rank, of {bytes_text(self.room)}: {verdict}"]
        lines += columns(self._table(), right=range(1, len(self.ranks) + 1))
        where = f" of {most.module}" if most.module else ""
        lines.append(f"rank {most.rank} holds most at {most.at}{where}:")
        lines += columns(_standing(most), right=(1,))
        lines += ["what would take less", *(f"  {hint}" for hint in self.hints)] if self.hints else []
        return "\n".join(lines)

    def _table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("", *(f"rank {t.rank}" for t in self.ranks))]
        for kind in ("parameters", "gradients", "optimizer"):
            rows.append((kind, *(bytes_text(_rests(t, kind)) for t in self.ranks)))
        pairs = zip(self.ranks, self.elements, strict=True)
        rows.append(("bytes a parameter", *(f"{_states(t) / max(1, n):.2f}" for t, n in pairs)))
        for kind in ("buffers", "inputs", "constants"):
            if any(kind in t.resident for t in self.ranks):
                rows.append((kind, *(bytes_text(t.resident.get(kind, 0)) for t in self.ranks)))
        for kind in ("activations", "gathered", "collectives", "transients"):
            rows.append((f"{kind} at the peak", *(bytes_text(t.by_kind.get(kind, 0)) for t in self.ranks)))
        rows.append(("peak", *(bytes_text(t.peak) for t in self.ranks)))
        return rows


def _rests(t: MemoryTimeline, kind: str) -> int:
    return t.gradients if kind == "gradients" else t.resident.get(kind, 0)


def _states(t: MemoryTimeline) -> int:
    return sum(_rests(t, kind) for kind in ("parameters", "gradients", "optimizer"))


def _standing(t: MemoryTimeline) -> list[tuple[str, ...]]:
    """The largest of what stands at the peak, by module and kind."""
    named = Counter({f"{kind} of {module or 'the model'}": n for (kind, module), n in t.standing.items() if n > 0})
    rows = [(what, bytes_text(n)) for what, n in named.most_common(LARGEST)]
    rest = sum(named.values()) - sum(n for _, n in named.most_common(LARGEST))
    return [*rows, ("all else", bytes_text(rest))] if rest else rows


def memory_report(model: Model, room: int) -> MemoryReport:
    """The report of a program. `room`: bytes that a rank may hold."""
    ranks = tuple(model.of(rank) for rank in first_ranks(model.program))
    elements = tuple(model.elements(t.rank) for t in ranks)
    most = max(ranks, key=lambda t: t.peak)
    return MemoryReport(ranks, elements, room, hints(model, most))


def hints(model: Model, most: MemoryTimeline) -> tuple[str, ...]:
    """What is not done yet and would take less, by the bytes that it is about."""
    plan, kinds = model.program.plan, most.by_kind
    data = [a for a in plan.mesh.names if plan.mesh.role(a) == "data" and plan.mesh.sizes[a] > 1]
    found = []
    if data and plan.zero < 3:
        share = 1 - 1 / plan.mesh.group_size(tuple(data))
        whole = _rests(most, "parameters") if plan.zero else _states(most)
        stage = 3 if plan.zero else 1
        less = share * whole
        found.append((less, f"zero={stage}: up to {bytes_text(less)} of what rests is split over {data[0]}"))
    passing = kinds.get("activations", 0) + kinds.get("transients", 0)
    if passing and plan.stages is None:
        count = 2 * plan.micro_batches
        found.append((passing / 2, f"micro_batches={count}: activations and transients of half the rows"))
    if kinds.get("activations"):
        kept = kinds["activations"]
        found.append((kept, f"recompute='full': up to {bytes_text(kept)} saved for backward can be made again"))
    if kinds.get("optimizer"):
        state = kinds["optimizer"]
        found.append((state, f"offload='full': {bytes_text(state)} of optimizer state can rest on the host"))
    return tuple(text for _, text in sorted(found, reverse=True))
