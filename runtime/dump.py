"""`compiled.dump(folder)`: everything that was decided and written, as files."""

from __future__ import annotations

from pathlib import Path

import torch.fx as fx

from ..partitioner.program import Program
from .runner import Runner


def write(runners: dict, program: Program, folder: Path) -> None:
    """plan.txt, plan.json, the program after each pass, program.dot, and each held rank's generated Python."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(str(program.plan) + "\n")
    (folder / "plan.json").write_text(program.plan.to_text())
    (folder / "program.dot").write_text(dot(program))
    for name, body in program.dumps().items():
        (folder / f"{name}.txt").write_text(body)
    runner: Runner | None = next((r for r in runners.values() if r.program is program), None)
    for rank in runner.ranks if runner else ():
        (folder / f"{rank.name}.py").write_text(rank.source)


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
