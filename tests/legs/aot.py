"""The kernels compiled ahead of time, without a GPU: registers, shared memory, and no spills at the configurations that
the launchers use. Run by `test_kernel_legs.py` in a process of its own, or

    KERNELS=aot python -m pytest tests/legs/aot.py [-m "not slow"]      the quick ones: sm_90 alone
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("KERNELS") != "aot":
    pytest.skip("runs with KERNELS=aot", allow_module_level=True)

from legs.kernels import KERNELS
from legs.machine_code import ARCHITECTURES, compiled

assert os.environ.get("TRITON_INTERPRET") != "1"
MARKED = [pytest.param(a, marks=[] if a == "sm_90" else pytest.mark.slow) for a in ARCHITECTURES]


@pytest.mark.parametrize("arch", MARKED)
@pytest.mark.parametrize("name", KERNELS)
def test_no_spills(name, arch):
    made = compiled(KERNELS[name], arch)
    print(f"\nTABLE {name} | {arch} | {made.registers} | {made.shared}")
    assert made.spills == 0, made
    assert made.shared <= ARCHITECTURES[arch].shared, made
