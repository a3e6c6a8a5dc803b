"""The plan: every decision, frozen. Only the planner writes one; passes read it.

A plan says for each call of the graph what it does on each mesh axis (see `strategies.Choice`) and how each parameter
rests between uses. Everything else (the layouts of all tensors, the reshards) follows from it and the rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import PlanError, ScheduleError
from .layout import Factor, Layout
from .mesh import Mesh
from .strategies import Choice

if TYPE_CHECKING:
    from .facts import Facts
    from .reasons import Reasons
    from .schedules.schedule import Schedule
    from .stages import Stages
    from .traffic import Traffic


@dataclass(frozen=True)
class Decision:
    """One call on one axis: what was chosen and what each legal choice would have cost, the others unchanged."""

    chosen: Choice
    seconds: tuple[tuple[Choice, float], ...]

    def ranked(self) -> list[tuple[Choice, float]]:
        return sorted(self.seconds, key=lambda pair: pair[1])


@dataclass(frozen=True)
class Plan:
    """All decisions for one captured program on one mesh.

    Attributes:
        mesh: the mesh.
        choices: {call: {axis: choice}}, by node name; an axis not named is None (whole).
        resting: {parameter: layout} between uses; optimizer state and gradients rest alike.
        zero: 0 | 1 | 2 | 3, the ZeRO stage that `resting` stands for.
        again: tensors whose copies in another layout are not kept for backward but made again there.
        recompute: values of forward that are not kept for backward: it makes them again (`twins.py`).
        offload: values of forward that are on the host until backward reads them (`away.py`).
        decomposed: calls replaced by simpler ops so that a factor could be split.
        micro_batches: parts of the batch that a step goes through one after another.
        stages: where forward is cut, and which stage every call belongs to; None without a pipeline.
        schedule: what each stage does in which order; None without a pipeline, or with one micro-batch.
        seconds: predicted seconds of compute and of communication in one step.
        precision: what is computed in, and how gradients are reduced; "" for the dtypes of the model itself.
        notes: what is less parallel than asked, or costs more than one would think.
        compared: the schedules that were compared for a pipeline, a line each: seconds of a step, bytes.
        decisions: per call and axis the `Decision`, worked out when asked for; None for a plan that was given.
        modules: per call its module, its op and the user's source line.
        gap: how far above the least the predicted cost can be, relative; None where that is not known.
        facts: costs and traffic, for reading; None until the plan has met its program.
    """

    mesh: Mesh
    choices: Mapping[str, Mapping[str, Choice]]
    resting: Mapping[str, Layout]
    zero: int = 0
    again: frozenset[str] = frozenset()
    recompute: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()
    decomposed: tuple[str, ...] = ()
    micro_batches: int = 1
    stages: Stages | None = None
    schedule: Schedule | None = None
    seconds: tuple[float, float] = (0.0, 0.0)
    precision: str = ""
    notes: tuple[str, ...] = ()
    compared: tuple[str, ...] = field(default=(), compare=False)
    decisions: Reasons | None = field(default=None, repr=False, compare=False)
    modules: Mapping[str, tuple[str, str, str]] = field(default_factory=dict, repr=False, compare=False)
    gap: float | None = field(default=None, compare=False)
    facts: Facts | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return self.summary()

    @property
    def grid(self) -> Mesh:
        """The mesh, and micro-batches as one more axis of it, in time."""
        return self.mesh if self.micro_batches == 1 else _in_time(self.mesh, self.micro_batches)

    @property
    def traffic(self) -> Traffic:
        """Collectives of one step: {(axes, kind): (count, bytes that a rank sends, seconds)}; {} if not known."""
        return self.facts.traffic if self.facts is not None else {}

    def summary(self) -> str:
        """One screen: mesh, seconds, what is sent, parameters at rest, what modules do, notes; layers folded."""
        from .summary import summary

        return summary(self)

    def diff(self, other: Plan) -> str:
        """What `other` does otherwise, layers folded; "" where the two decide the same."""
        from .diff import diff

        return diff(self, other)

    def explain(self, name: str) -> str:
        """Why a call, the calls of a module, or a parameter is as it is; `name` may be a glob.

        Raises:
            PlanError: nothing has that name.
        """
        from .explain import explain

        return explain(self, name)

    def to_text(self) -> str:
        """The plan as JSON: stable, one line a decision, made for review and for `plan=`."""
        body: dict[str, Any] = {
            "mesh": dict(self.mesh.axes),
            "zero": self.zero,
            "micro_batches": self.micro_batches,
            "resting": {name: layout_to_list(layout) for name, layout in sorted(self.resting.items())},
            "choices": {name: {a: _choice_text(c) for a, c in by.items()} for name, by in self.choices.items()},
            "again": sorted(self.again),
            "recompute": sorted(self.recompute),
            "decomposed": list(self.decomposed),
            "notes": list(self.notes),
        }
        body |= {"offload": sorted(self.offload)} if self.offload else {}
        body |= {"precision": self.precision} if self.precision else {}
        body |= self.stages.to_body() if self.stages is not None else {}
        body |= {"schedule": self.schedule.to_text().splitlines()} if self.schedule is not None else {}
        lines = [f"  {json.dumps(k)}: {_rows(v)}" for k, v in body.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_text(cls, text: str, mesh: Mesh) -> Plan:
        """Read `to_text`.

        Raises:
            PlanError: the text is no plan, or it was made for another mesh.
        """
        try:
            body = json.loads(text)
            axes = body["mesh"]
        except (ValueError, KeyError, TypeError) as fault:
            way_out = "save one with open(path, 'w').write(plan.to_text())"
            raise PlanError(f"this is no saved plan ({fault}); {way_out}") from fault
        if axes != dict(mesh.axes):
            here = dict(mesh.axes)
            raise PlanError(f"the plan was made for the mesh {axes}, this is {here}; plan again without plan=")
        from .schedules.schedule import from_text
        from .stages import Stages

        try:
            return cls(
                mesh,
                {name: {a: _choice_of(c) for a, c in by.items()} for name, by in body["choices"].items()},
                {name: layout_from_list(rows) for name, rows in body["resting"].items()},
                zero=body["zero"],
                micro_batches=int(body["micro_batches"]),
                again=frozenset(body["again"]),
                recompute=frozenset(body.get("recompute", ())),
                offload=frozenset(body.get("offload", ())),
                decomposed=tuple(body["decomposed"]),
                stages=Stages.from_body(body) if "cuts" in body else None,
                schedule=from_text("\n".join(body["schedule"])) if "schedule" in body else None,
                precision=str(body.get("precision", "")),
                notes=tuple(body["notes"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, ScheduleError) as fault:
            what = f"{type(fault).__name__}: {fault}"
            raise PlanError(f"this saved plan is damaged ({what}); plan again and save plan.to_text()") from fault


@lru_cache(maxsize=64)
def _in_time(mesh: Mesh, micro_batches: int) -> Mesh:
    return mesh.in_time(micro_batches)


def _rows(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n  }"


def _choice_text(choice: Choice) -> str:
    if choice is None:
        return ""
    return f"+{choice}" if isinstance(choice, int) else f"{choice[0]}.{choice[1]}"


def _choice_of(text: str) -> Choice:
    if not text:
        return None
    if text.startswith("+"):
        return int(text[1:])
    name, _, index = text.rpartition(".")
    return (name, int(index))


def layout_to_list(layout: Layout) -> list:
    """A layout as plain lists: per dim, per factor, [size, *axes]; parameters rest whole, never partial."""
    return [[[f.size, *f.axes] for f in dim] for dim in layout.dims]


def layout_from_list(rows: list) -> Layout:
    return Layout(tuple(tuple(Factor(f[0], tuple(f[1:])) for f in dim) for dim in rows))
