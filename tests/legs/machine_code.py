"""A Triton kernel compiled for an architecture that need not be there, and what its machine code takes."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton  # pyright: ignore[reportMissingImports]  # noqa: E402
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]  # noqa: E402
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]  # noqa: E402

TOOLS = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Architecture:
    """`shared`: bytes of shared memory that a block may use."""

    target: Any
    shared: int


ARCHITECTURES = {
    "sm_80": Architecture(GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": Architecture(GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": Architecture(GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": Architecture(GPUTarget("hip", "gfx942", 64), 64 << 10),
}


@dataclass(frozen=True)
class Case:
    """A kernel at one configuration. `types`: per argument that is no constexpr its Triton type, "*bf16" or "i32"."""

    kernel: Any
    types: str
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Made:
    """Registers a thread, bytes of shared memory a block, spilled registers."""

    registers: int
    shared: int
    spills: int


def compiled(case: Case, arch: str) -> Made:
    """The kernel, as a launch with aligned pointers and sizes that 16 divides would make it."""
    names = list(case.kernel.arg_names)
    plain = [n for n in names if n not in case.constants]
    types = case.types.split()
    assert len(plain) == len(types), (plain, types)
    signature = dict(zip(plain, types, strict=True)) | dict.fromkeys(case.constants, "constexpr")
    signature = {n: signature[n] for n in names}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=even)
    target = ARCHITECTURES[arch].target
    warps = case.warps if target.backend == "cuda" else max(1, case.warps // 2)
    made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": case.stages})
    if target.backend == "hip":
        return _amd(made.asm["amdgcn"], made.metadata.shared)
    return _nvidia(made.asm["cubin"], made.metadata.shared)


def _amd(text: str, shared: int) -> Made:
    found = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", text)}
    return Made(found["vgpr_count"], shared, found["vgpr_spill_count"])  # scalar registers spill to vector ones


def _nvidia(cubin: bytes, shared: int) -> Made:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [str(TOOLS / "cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run([str(TOOLS / "nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True)
    registers = int(re.findall(r"REG:(\d+)", usage.stdout + usage.stderr)[0])
    return Made(registers, shared, len(re.findall(r"\b(?:STL|LDL)\b", code.stdout)))
