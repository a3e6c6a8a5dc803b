"""Prints how big the code is: lines by file, the longest functions, and what is past the bars. It never fails."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("partitioner", "passes", "runtime", "kernels", "examples", "benchmarks", "tests")
FILE_BAR, FUNCTION_BAR = 400, 40
Function = tuple[int, str]  # lines, place


def files() -> list[Path]:
    rooms = [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))]
    return [ROOT / "__init__.py", *rooms]


def functions(path: Path) -> list[Function]:
    """Every function of a file, the nested ones counted on their own too."""
    tree = ast.parse(path.read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    name = path.relative_to(ROOT)
    return [((n.end_lineno or n.lineno) - n.lineno + 1, f"{name}:{n.lineno} {n.name}") for n in found]


def main() -> None:
    lines = {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in files()}
    sizes = sorted((f for p in files() for f in functions(p)), reverse=True)
    for name, count in lines.items():
        print(f"{count:6d}  {name}{'  <- past the bar' if count > FILE_BAR else ''}")
    print(f"{sum(lines.values()):6d}  in all, {len(lines)} files\n")
    for count, place in sizes[:10]:
        print(f"{count:6d}  {place}")
    over = [s for s in sizes if s[0] > FUNCTION_BAR]
    long_files = [n for n in lines.values() if n > FILE_BAR]
    median = statistics.median(n for n, _ in sizes) if sizes else 0
    print(f"\n{len(sizes)} functions, median {median:g} lines, {len(over)} over {FUNCTION_BAR}")
    print(f"{len(long_files)} of {len(lines)} files over {FILE_BAR} lines")


if __name__ == "__main__":
    main()
