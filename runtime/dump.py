"""`compiled.dump(folder)`: everything that was decided and written, as files."""

from __future__ import annotations

from pathlib import Path

import torch.fx as fx

from ..partitioner.program import Act, Program
from ..partitioner.schedules.grid import grid
from .runner import Runner, sources


def write(runners: dict, program: Program, folder: Path) -> None:
    """plan.txt, plan.json, the program after each pass, program.dot, and each held rank's generated Python.

    With micro-batches or stages also acts.txt, what each rank does in order, and schedule.txt, with its grid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(str(program.plan) + "\n")
    (folder / "plan.json").write_text(program.plan.to_text())
    (folder / "program.dot").write_text(dot(program))
    for name, body in program.dumps().items():
        (folder / f"{name}.txt").write_text(body)
    if program.segments:
        (folder / "acts.txt").write_text("".join(_acts(program, rank) for rank in range(program.mesh.world_size)))
    if (schedule := program.plan.schedule) is not None:
        (folder / "schedule.txt").write_text(f"{schedule.to_text()}\n{grid(schedule)}")
    runner: Runner | None = next((r for r in runners.values() if r.program is program), None)
    for rank in runner.ranks if runner else ():
        for name, source in sources(rank).items():
            (folder / f"{name.replace(' ', '_')}.py").write_text(source)


def _acts(program: Program, rank: int) -> str:
    """What a rank does, a line each: `0 phase 1 stage 0 F`, `0 send tanh -> pp 1`, with the micro-batch in front."""
    return "\n".join([f"rank {rank}", *(f"  {_act(program, act)}" for act in program.acts(rank))]) + "\n"


def _act(program: Program, act: Act) -> str:
    at = "-" if act.micro_batch is None else str(act.micro_batch)
    if act.kind == "run":
        return f"{at} {program.segments[act.segment].name}"
    end = {"send": f" -> stage rank {act.peer}", "receive": f" <- stage rank {act.peer}"}.get(act.kind, "")
    return f"{at} {act.kind} {', '.join(act.values)}".rstrip() + end


def dot(program: Program) -> str:
    """The mesh-wide graph in Graphviz' DOT: forward nodes boxes, backward nodes ellipses, collectives filled."""
    lines = ["digraph program {", "  rankdir=TB; node [fontsize=9];"]
    for node in program.graph.fx.nodes:
        if node.op == "output":
            continue
        lines.append(f'  "{node.name}" [{_style(node, program)}];')
        lines += [f'  "{used.name}" -> "{node.name}";' for used in node.all_input_nodes]
    return "\n".join([*lines, "}"]) + "\n"


def _style(node: fx.Node, program: Program) -> str:
    op = getattr(node.target, "__name__", node.target)
    label = f"{node.name}\\n{op}" if node.op == "call_function" else node.name
    layout = program.layouts.get(node.name)
    shape = "ellipse" if node.meta.get("backward") else "box"
    talks = ", style=filled, fillcolor=lightblue" if getattr(node.target, "__name__", "") in ("start", "wait") else ""
    return f'label="{label}\\n{layout if layout else ""}", shape={shape}{talks}'
