"""The user's source lines: those of files that are neither torch's nor ours."""

from __future__ import annotations

import os
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OURS = tuple(_HERE + room for room in ("partitioner", "passes", "runtime", "kernels", "__init__"))
_SEEN: dict[CodeType, bool] = {}


def _of_user(code: CodeType) -> bool:
    known = _SEEN.get(code)
    if known is None:
        name = code.co_filename
        known = _SEEN[code] = not name.startswith((_TORCH, "<", *_OURS))
    return known


def user_line(frame: FrameType | None) -> str:
    """`file:line in function` of the nearest frame of the user, at or above `frame`; "" where there is none."""
    while frame is not None:
        code = frame.f_code
        if _of_user(code):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def line_of(fault: BaseException) -> str:
    """`file:line` of the innermost frame of the user that an error passed through."""
    tb, line = fault.__traceback__, "an unknown line"
    while tb is not None:
        if _of_user(tb.tb_frame.f_code):
            line = f"{tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}"
        tb = tb.tb_next
    return line
