"""Every Triton kernel at the configurations that its launcher uses."""

from __future__ import annotations

from meshwright.kernels import rms_norm

from legs.machine_code import Case

KERNELS: dict[str, Case] = {}
for _n in (rms_norm.SUMMED, rms_norm.WIDEST):
    _more = {"WEIGHT": True, "BLOCK": _n}
    KERNELS[f"rms_norm {_n}"] = Case(
        rms_norm.forward_kernel, "*bf16 *bf16 *bf16 *fp32 i32 fp32", _more, rms_norm.warps(_n)
    )
    KERNELS[f"rms_norm_backward {_n}"] = Case(
        rms_norm.backward_kernel,
        "*bf16 *bf16 *bf16 *fp32 *bf16 *fp32 i32 i32 i32",
        _more | {"SUMS": _n <= rms_norm.SUMMED},
        rms_norm.warps(_n),
        1,
    )
