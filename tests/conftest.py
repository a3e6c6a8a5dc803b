"""Golden texts: `assert golden("name.txt", text)` in a test; `pytest --update-golden` writes them anew.

Property tests draw the same examples in every run, so that only a change can make one fail. New examples are looked
for on purpose: `HYPOTHESIS_PROFILE=search pytest ...`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"

torch.set_num_threads(1)

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


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
