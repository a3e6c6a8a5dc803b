"""Golden texts: `assert golden("name.txt", text)` in a test; `pytest --update-golden` writes them anew."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], bool]:
    """Compares a text with a file: `tests/golden/NAME`, or a path from the root of the repository."""

    def same(name: str, text: str) -> bool:
        path = Path(__file__).parents[1] / name if "/" in name else GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        have = path.read_text() if path.exists() else ""
        changes = "\n".join(difflib.unified_diff(have.splitlines(), text.splitlines(), name, "now", lineterm=""))
        assert have == text, f"run pytest --update-golden if this is meant:\n{changes}"
        return True

    return same
