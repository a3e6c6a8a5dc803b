"""Imports run down only, and private torch stays where it may be: read from the source, nothing is imported."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "": {"runtime", "passes", "partitioner", "kernels"},
    "runtime": {"runtime", "partitioner", "kernels"},
    "passes": {"passes", "partitioner", "kernels"},
    "partitioner": {"partitioner", "kernels"},
    "kernels": {"kernels"},
}
_STANDARD = {"__future__", "collections", "typing", "dataclasses", "functools", "math"}
KERNELS_MAY_USE = {"torch", "triton", "numpy"} | _STANDARD
PRIVATE_TORCH = {"partitioner/aot.py", "partitioner/compat.py"}
OPS = "torch._ops", "torch.utils._pytree"  # the type of an op, and the tree functions: stable for years, no public name
FILES = [p for room in MAY_IMPORT for p in sorted((ROOT / room).glob("*.py" if not room else "**/*.py"))]


def imported(path: Path) -> list[str]:
    """Absolute names of what a file imports; `meshwright.` stands for the repository root."""
    package = ["meshwright", *path.relative_to(ROOT).parent.parts]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            names += [".".join([*base, *([node.module] if node.module else []), a.name]) for a in node.names]
    return names


def attributes(path: Path) -> list[str]:
    """Dotted names used in a file, such as torch._C."""
    return [ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]


def private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_imports_down_only(path: Path):
    name = path.relative_to(ROOT)
    room = name.parts[0] if len(name.parts) > 1 else ""
    ours = [i.split(".") for i in imported(path) if i.startswith("meshwright.")]
    assert {i[1] for i in ours if i[1] in MAY_IMPORT} <= MAY_IMPORT[room]
    if room == "kernels":
        assert {i.split(".")[0] for i in imported(path)} - {"meshwright"} <= KERNELS_MAY_USE
    if str(name) not in PRIVATE_TORCH:
        used = [i for i in imported(path) if private(i)] + [a for a in attributes(path) if private(a)]
        assert not [u for u in used if not u.startswith(OPS) and ".ops." not in u]
