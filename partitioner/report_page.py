"""A plan as one HTML page that stands alone: what its texts say, folded, with a picture of the schedule.

No script, no style sheet and no font of others: it opens without a network. All that comes from the program is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from .doing import by_module, module_of
from .errors import PlanError
from .explain import explain
from .fold import Folder, pattern_of
from .plan import Plan
from .schedules.action import COMPUTE
from .schedules.schedule import Schedule, flow
from .schedules.send_recv import TICKS, start_ticks
from .stage_text import stage_lines
from .summary import gap_text, traffic_rows
from .units import bytes_text, seconds_text

COSTLIEST = 8
"""So many modules are explained."""

COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b", "BW": "#e45756"}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 0.5em 0; }
td, th { padding: 0.15em 0.8em; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: #f6f6f6; padding: 0.7em; overflow-x: auto; }
summary { cursor: pointer; }
.wide { overflow-x: auto; }
"""


def page(plan: Plan) -> str:
    """The page's text: well-formed XML too.

    Raises:
        PlanError: the plan has no facts: it was read from a text and not yet planned on its program.
    """
    if plan.facts is None:
        raise PlanError("the plan was read from a text; a report needs its program: compile with plan= and take that")
    title = f"Plan for {plan.mesh.world_size} ranks of {plan.mesh.device.name}"
    parts = (_head(plan, title), _stages(plan), _traffic(plan), _memory(plan), _layouts(plan), _why(plan))
    body = "\n".join(line for part in parts for line in part)
    head = f'<meta charset="utf-8"/><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _head(plan: Plan, title: str) -> Iterator[str]:
    assert plan.facts is not None
    compute, sent = plan.seconds
    mesh = plan.mesh
    rows = [
        ("mesh", ", ".join(f"{a}={n} ({mesh.role(a)}) over {mesh.link[a].name}" for a, n in mesh.axes)),
        ("a step, nothing overlapped", seconds_text(compute + sent)),
        ("compute", seconds_text(compute)),
        ("communication", seconds_text(sent)),
        ("ZeRO stage", str(plan.zero)),
        ("micro-batches", str(plan.micro_batches)),
        ("calls", str(len(plan.choices))),
        ("parameters", str(len(plan.resting))),
    ]
    rows += [("how far from the best", gap_text(plan.gap, len(plan.decomposed)))] if plan.gap is not None else []
    asked = {k: plan.facts.asked.get(k) for k in ("zero", "memory", "pin")}
    rows += [("a rank holds at most", str(plan.facts.peak))] if plan.facts.peak else []
    rows += [(f"asked: {k}", str(v)) for k, v in asked.items() if v not in (None, {})]
    yield f"<h1>{escape(title)}</h1>"
    yield _table((), rows)
    if plan.notes:
        yield "<h2>Notes</h2>"
        yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in plan.notes) + "</ul>"


def _stages(plan: Plan) -> Iterator[str]:
    if plan.stages is None:
        return
    yield "<h2>Stages and schedule</h2>"
    lines = [line.strip() for line in stage_lines(plan)]
    found = lines[lines.index("stages") + 1 :][: plan.stages.count]
    yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in found) + "</ul>"
    if plan.compared:
        yield "<p>Compared:</p><ul>" + "".join(f"<li>{escape(line)}</li>" for line in plan.compared) + "</ul>"
    if plan.schedule is not None:
        yield f"<p>{escape(plan.schedule.name)}; forward, backward and weight gradients drawn one column each:</p>"
        yield f'<div class="wide">{picture(plan.schedule)}</div>'


def picture(schedule: Schedule, width: int = 14, height: int = 22) -> str:
    """The computations of a schedule as SVG, a row a rank, each as early as it can be."""
    starts = start_ticks(schedule, flow(schedule.stages))
    boxes, end = [], 0
    for rank, (order, at) in enumerate(zip(schedule.orders, starts, strict=True)):
        for action, tick in zip(order, at, strict=True):
            if action.kind not in COMPUTE:
                continue
            ticks = TICKS[action.kind]
            end = max(end, tick + ticks)
            where = f'x="{60 + tick * width}" y="{rank * height}" width="{ticks * width - 1}" height="{height - 2}"'
            colour = COLOURS.get(action.kind, "#999")
            boxes.append(f'<rect {where} fill="{colour}"><title>{escape(str(action))}</title></rect>')
    names = [f'<text x="0" y="{r * height + 15}" font-size="12">rank {r}</text>' for r in range(schedule.ranks)]
    size = f'width="{60 + end * width}" height="{schedule.ranks * height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join((*names, *boxes))}</svg>'


def _traffic(plan: Plan) -> Iterator[str]:
    yield "<h2>What a rank sends in a step</h2>"
    rows = traffic_rows(plan.traffic)
    head = ("axes", "collective", "how many", "bytes", "seconds")
    yield _table(head, rows, numbers=(2, 3, 4)) if rows else "<p>Nothing.</p>"


def _memory(plan: Plan) -> Iterator[str]:
    assert plan.facts is not None
    facts = plan.facts
    held, whole = sum(facts.at_rest.values()), sum(facts.whole.values())
    yield "<h2>Parameters at rest</h2>"
    yield f"<p>A rank holds {escape(bytes_text(held))} of {escape(bytes_text(whole))}.</p>"
    rows = Folder(plan.resting).rows(
        (n, (str(plan.resting[n]), bytes_text(facts.at_rest[n]), bytes_text(facts.whole[n]))) for n in facts.whole
    )
    head = ("parameter", "layout", "a rank holds, each", "whole, each")
    yield _table(head, [(name, *cells) for name, cells in rows], numbers=(2, 3))


def _layouts(plan: Plan) -> Iterator[str]:
    yield "<h2>What calls split, by module</h2>"
    rows = by_module(plan)
    folded = Folder(module for module, _ in rows).rows(rows)
    yield _table(("module", *plan.mesh.names), [(name, *what) for name, what in folded])


def _why(plan: Plan) -> Iterator[str]:
    """The modules whose calls take longest, explained; layers that take as long are one."""
    assert plan.facts is not None
    took: dict[str, float] = {}
    for call, seconds in plan.facts.seconds.items():
        took[module_of(plan, call)] = took.get(module_of(plan, call), 0.0) + seconds
    kind = {name: (pattern_of(name), seconds_text(seconds)) for name, seconds in took.items() if name}
    alike = Counter(kind.values())
    dearest: dict[tuple[str, str], str] = {}
    for name in sorted(kind, key=lambda n: -took[n]):
        dearest.setdefault(kind[name], name)
    yield "<h2>The costliest modules</h2>"
    for one, name in list(dearest.items())[:COSTLIEST]:
        more = f", and {alike[one] - 1} like it" if alike[one] > 1 else ""
        said = f"{name}: {seconds_text(took[name])} of compute{more}"
        yield f"<details><summary>{escape(said)}</summary><pre>{escape(explain(plan, name))}</pre></details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    top = "<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>" if head else ""

    def cell(i: int, text: str) -> str:
        return f'<td class="n">{escape(text)}</td>' if i in numbers else f"<td>{escape(text)}</td>"

    body = "".join("<tr>" + "".join(cell(i, text) for i, text in enumerate(row)) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'
