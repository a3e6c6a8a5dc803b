"""Writes docs/cases.md: every case, where it was reported, and how each of its meshes ends.

    python tests/cases_page.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from cases import ALL
from cases.harness import outcome
from cases.registry import Axes, Case

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cases.md"
HEAD = """# Cases

Faults that users of distributed training have reported, each with a small model of our own (`tests/cases/`) that brings
it out. *match*: outputs, loss, every gradient, buffer and parameter equal the one-device run. *error as expected*: it
stops with a clear error that says what the case allows. Meshes are ranks in one process; a case that kills a rank also
runs as one process a rank, and must then end, name the rank, and go on from its checkpoint. This page is written by
`python tests/cases_page.py`; the same runs are tests in `tests/test_cases.py`.
"""


def label(axes: Axes) -> str:
    return " ".join(f"{a}{n}" for a, n in axes.items())


def result(case: Case, axes: Axes) -> str:
    try:
        return outcome(case, axes)
    except Exception as error:  # a page about failures shows them all
        return f"wrong: {type(error).__name__}: {error}"


def cell(text: str) -> str:
    return text.replace("|", "\\|").splitlines()[0][:160]


def section(kind: str, results: dict[Case, dict[str, str]]) -> list[str]:
    lines = ["", f"## {kind}", "", "| case | reported in | what people saw | result |", "|---|---|---|---|"]
    for case, by_mesh in results.items():
        meshes: dict[str, list[str]] = {}
        for mesh, text in by_mesh.items():
            meshes.setdefault(cell(text), []).append(mesh)
        ends = "<br>".join(f"{text}: {', '.join(names)}" for text, names in meshes.items())
        lines.append(f"| `{case.id}` | {', '.join(case.links)} | {case.symptom} | {ends} |")
    return lines


def main() -> None:
    results = {c: {label(a): result(c, a) for a in c.meshes} for c in ALL}
    count = Counter(text.partition(":")[0] for by_mesh in results.values() for text in by_mesh.values())
    total = ", ".join(f"{n} {what}" for what, n in sorted(count.items()))
    lines = [HEAD + f"\n{len(ALL)} cases, {sum(count.values())} runs: {total}."]
    for kind in dict.fromkeys(c.kind for c in ALL):
        lines += section(kind, {c: r for c, r in results.items() if c.kind == kind})
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
