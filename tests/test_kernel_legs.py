"""The Triton kernels without a GPU: their numbers in the interpreter, their machine code by compiling ahead of time.

Each leg is a process of its own, since triton decides at import which of the two it does.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def leg(name: str, *more: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/legs/{name}.py", "-p", "no:cacheprovider", *more]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"KERNELS": name}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@needs_triton
def test_numbers_in_the_interpreter():
    leg("interp")


@needs_triton
def test_no_spills_on_sm_90():
    leg("aot", "-m", "not slow")


@needs_triton
@pytest.mark.slow
def test_no_spills_elsewhere():
    leg("aot", "-m", "slow")
