"""Discovered rules between processes: one JSON file a signature, in `$MESHWRIGHT_CACHE` or `~/.cache/meshwright`.

A file is named by a hash of all that its rule follows from: the op, its schema, its code, the call's shapes and plain
arguments, torch, and how rules are discovered. Ops whose code cannot be told apart from an older one's are not kept. A
folder that cannot be written, or a file that cannot be read, is as if it were not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..compat import python_of
from .split import Call

SOURCES = ("confirm", "found", "proof", "samples", "search", "discover")
"""The files that decide what is discovered."""


def signature(call: Call) -> str:
    """The op, and the shapes, dtypes and plain arguments of a call."""

    def text(x: Any) -> Any:
        return f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

    return f"{call.target.name()} {tree_map(text, (call.args, call.kwargs))} -> {tree_map(text, list(call.outputs))}"


def full_key(call: Call) -> str | None:
    """All that the rule of a call follows from, as text; None where the op's code is not known."""
    code = _code_of(call.target)
    if code is None:
        return None
    return "\n".join((signature(call), str(call.target._schema), code, str(torch.__version__), _own_code()))


def load(key: str) -> Any:
    """What was kept under a key, or None."""
    file = _file(key)
    try:
        body = json.loads(file.read_text()) if file else None
        return body["found"] if body and body["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(key: str, found: Any) -> None:
    """Keep a rule; a folder that cannot be written is left as it is."""
    file = _file(key)
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"key": key, "found": found}))
        os.replace(part, file)


def _file(key: str) -> Path | None:
    home = os.environ.get("HOME")
    folder = os.environ.get("MESHWRIGHT_CACHE", os.path.join(home, ".cache", "meshwright") if home else "")
    return Path(folder, "rules", hashlib.sha256(key.encode()).hexdigest() + ".json") if folder else None


@cache
def _own_code() -> str:
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / f"{name}.py").read_bytes() for name in SOURCES)).hexdigest()


def _code_of(op: Any) -> str | None:
    """What tells one version of an op's code from another: torch's own by torch's version, a Python op by its code."""
    if op.namespace in ("aten", "prims"):
        return ""
    functions = python_of(op)
    if functions is None:
        return None
    digest = hashlib.sha256()
    seen: set[int] = set()
    for fn in functions:
        _digest(fn, digest, seen)
    return digest.hexdigest()


def _digest(x: Any, digest: Any, seen: set[int]) -> None:
    """Take in a function: its code, what it holds, and the functions beside it that it names."""
    if isinstance(x, types.FunctionType):
        if id(x) in seen or (x.__module__ or "").partition(".")[0] == "torch":
            return
        seen.add(id(x))
        _digest(x.__code__, digest, seen)
        held = [c.cell_contents for c in x.__closure__ or () if _is_filled(c)]
        named = [x.__globals__[n] for n in _names(x.__code__) if n in x.__globals__]
        for y in (*held, *named, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            _digest(y, digest, seen)
    elif isinstance(x, types.CodeType):
        digest.update(x.co_code + repr((x.co_names, x.co_varnames)).encode())
        for y in x.co_consts:
            _digest(y, digest, seen)
    elif isinstance(x, (int, float, str, bytes, bool, complex, type(None), tuple, torch.dtype)):
        digest.update(repr(x).encode())
    elif isinstance(x, frozenset):
        digest.update(repr(sorted(map(repr, x))).encode())
    elif isinstance(held := getattr(x, "__dict__", None), dict):  # a function in a wrapper, such as a compiled kernel
        for name in ("fn", "__wrapped__"):
            _digest(held.get(name), digest, seen)


def _names(code: types.CodeType) -> list[str]:
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in _names(c)]
    return [*code.co_names, *inner]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
