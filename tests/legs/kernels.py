"""Every Triton kernel at the configurations that its launcher uses."""

from __future__ import annotations

from meshwright.kernels import dropout, gated, logit_rows, rms_norm

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

_BLOCK = {"BLOCK": logit_rows.BLOCK}
_WARPS = logit_rows.warps(logit_rows.BLOCK)
KERNELS["logits, lse"] = Case(
    logit_rows.rows_kernel, "*bf16 *i64 *fp32 *fp32 i32", {"top": None, "GIVEN": False} | _BLOCK, _WARPS
)
KERNELS["logits, sums"] = Case(
    logit_rows.rows_kernel, "*bf16 *i64 *fp32 *fp32 *fp32 i32", {"GIVEN": True} | _BLOCK, _WARPS
)
KERNELS["logits, gradient"] = Case(logit_rows.gradient_kernel, "*bf16 *i64 *i1 *fp32 *fp32 *fp32 i32", _BLOCK, _WARPS)
for _together in (True, False):
    KERNELS[f"dropout {'by counters' if _together else 'by elements'}"] = Case(
        dropout.dropout_kernel,
        "*bf16 *bf16 *bf16 *bf16 *i1 i32 i32 fp32 i64 i64 i32 i32 i32 i32 i32 i32 i32 i32 i32",
        {"BIAS": True, "RESIDUAL": True, "TOGETHER": _together, "BLOCK": dropout.BLOCK},
    )
for _act in gated.ACTS:
    _gate = {"ACT": _act, "BLOCK": gated.BLOCK}
    KERNELS[f"gated {_act}"] = Case(gated.forward_kernel, "*bf16 *bf16 *bf16 i32 i32 i32", _gate)
    KERNELS[f"gated_backward {_act}"] = Case(
        gated.backward_kernel, "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32", _gate
    )
