"""Every Triton kernel at the configurations that its launcher uses."""

from __future__ import annotations

from typing import Any

from meshwright.kernels import dropout, gated, logit_rows, merge, norm_rows, rope

from legs.machine_code import Case

KERNELS: dict[str, Case] = {}
_OPTIONAL = {"residual": "RESIDUAL", "total": "RESIDUAL", "dsum": "DSUM", "mean": "CENTERED", "b": "BIAS"}
_OPTIONAL |= {"w": "WEIGHT", "dw": "SUMS", "db": "SUMS"}
_OF_ROWS = {"mean": "*fp32", "rstd": "*fp32", "dw": "*fp32", "db": "*fp32", "rows": "i32", "n": "i32", "per": "i32"}
_OF_ROWS |= {"eps": "fp32"}


def _rows(kernel: Any, n: int, stages: int = 3, **on: bool) -> Case:
    """A case of the norms' kernels at rows of n; what is not `on` but the weight is not there."""
    flags = dict.fromkeys(("RESIDUAL", "DSUM", "CENTERED", "BIAS"), False) | {"WEIGHT": True} | on
    flags["SUMS"] = n <= norm_rows.SUMMED
    constants: dict[str, Any] = {k: v for k, v in flags.items() if k in kernel.arg_names} | {"BLOCK": n}
    if "SUMS" in constants:
        flags["BIAS"] = constants["BIAS"] = flags["BIAS"] and flags["SUMS"]
        constants |= {} if flags["BIAS"] else {"db": None}
    gone = [k for k, flag in _OPTIONAL.items() if k in kernel.arg_names and not flags[flag]]
    constants |= dict.fromkeys(gone)
    types = " ".join(_OF_ROWS.get(k, "*bf16") for k in kernel.arg_names if k not in constants)
    return Case(kernel, types, constants, norm_rows.warps(n), stages)


_ALL = dict.fromkeys(("RESIDUAL", "DSUM", "CENTERED", "BIAS"), True)
for _n in (norm_rows.SUMMED, norm_rows.WIDEST):
    for _name, _on in (("rms_norm", {}), ("add_layer_norm", _ALL)):
        KERNELS[f"{_name} {_n}"] = _rows(norm_rows.forward_kernel, _n, **_on)
        KERNELS[f"{_name}_backward {_n}"] = _rows(norm_rows.backward_kernel, _n, 1, **_on)

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

KERNELS["rope"] = Case(
    rope.rope_kernel,
    "*bf16 *bf16 *bf16 *bf16 " + " ".join(["i32"] * 13),
    {"TRANSPOSED": False, "ROWS": rope.ELEMENTS // 64, "HALF": 64},
)
KERNELS["merge"] = Case(
    merge.merge_kernel, "*bf16 *fp32 *bf16 *fp32 *bf16 *fp32 i32 i32", {"ROWS": merge.ELEMENTS // 128, "BLOCK": 128}
)
KERNELS["merge_backward"] = Case(
    merge.merge_backward_kernel,
    "*bf16 *fp32 *bf16 *fp32 *bf16 *fp32 *bf16 *fp32 *bf16 *fp32 i32 i32",
    {"LSE": True, "ROWS": merge.ELEMENTS // 128, "BLOCK": 128},
)
