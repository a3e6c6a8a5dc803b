"""Values of optimizers and schedulers as JSON: numbers, texts, tuples, dicts with keys that are no texts, 0-d tensors.

    (0.9, 0.999)         {"~": "tuple", "of": [0.9, 0.999]}
    {3: 1}               {"~": "dict", "of": [[3, 1]]}
    torch.tensor(0.1)    {"~": "tensor", "of": 0.1, "dtype": "float32"}
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ..partitioner.errors import MeshwrightError

KINDS = {"tuple": tuple, "Counter": Counter, "dict": dict}


def to_plain(value: Any, where: str) -> Any:
    """Raises:
    MeshwrightError: it cannot be written without pickling; names where it is.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [to_plain(v, where) for v in value]
    if isinstance(value, tuple):
        return {"~": "tuple", "of": [to_plain(v, where) for v in value]}
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"~": "tensor", "of": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict):
        if type(value) is dict and all(isinstance(k, str) and k != "~" for k in value):
            return {k: to_plain(v, f"{where}.{k}") for k, v in value.items()}
        items = [[to_plain(k, where), to_plain(v, f"{where}.{k}")] for k, v in value.items()]
        return {"~": "Counter" if isinstance(value, Counter) else "dict", "of": items}
    raise MeshwrightError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold (nothing is pickled): give "
        f"numbers, texts, lists and dicts of them"
    )


def from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("~")
    if kind is None:
        return {k: from_plain(v) for k, v in value.items()}
    if kind == "tensor":
        return torch.tensor(value["of"], dtype=getattr(torch, value["dtype"]))
    if kind == "tuple":
        return tuple(from_plain(v) for v in value["of"])
    return KINDS[kind]({from_plain(k): from_plain(v) for k, v in value["of"]})
