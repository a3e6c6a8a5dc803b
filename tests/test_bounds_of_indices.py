"""An index outside a dim that ranks hold parts of is an error, not a row of zeros."""

from __future__ import annotations

from collections.abc import Callable

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.rules import masked
from meshwright.runtime.faults import RankError
from torch import nn

X, IDS = torch.arange(24.0).reshape(8, 3), torch.tensor([0, 7, 3])


@pytest.mark.parametrize("bad", [8, -1])
def test_an_embedding_split_over_its_vocabulary(bad: int):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    compiled = mw.compile(model, mw.Mesh(tp=2, device="cpu"), loss=lambda y: y.sum(), pin={"0": "[b, h] +tp"})
    compiled.step(IDS)
    with pytest.raises(RankError, match=rf"node embedding.*index {bad} is out of bounds: there are rows 0 to 7"):
        compiled.step(torch.tensor([0, bad, 3]))


def test_no_ids_at_all():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    compiled = mw.compile(model, mw.Mesh(tp=2, device="cpu"), loss=lambda y: y.sum(), pin={"0": "[b, h] +tp"})
    assert compiled.step(IDS[:0]) == 0
    assert not compiled.gather("grads")["0.weight"].any()


WRITES: dict[str, Callable] = {
    "take": lambda x, ids: masked.take_rows(x, 0, ids, 0, 8),
    "index": lambda x, ids: masked.take_rows(x, 0, ids, 0, 8, -8),
    "gather": lambda x, ids: masked.gather_rows(x, 0, ids.unsqueeze(1), 0, 8),
    "put": lambda x, ids: masked.put_rows(x, 0, ids, X[:3], 0, 8, False, True),
    "add": lambda x, ids: masked.add_rows(x, 0, ids, X[:3], 0, 8, 1, True),
    "scatter": lambda x, ids: masked.scatter_rows(x, 0, ids.unsqueeze(1), X[:3, :1], 0, 8, False, True),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_lookup_and_write(name: str):
    here = X[:4].clone()
    WRITES[name](here, IDS)
    wraps = name in ("index", "put")
    if wraps:
        WRITES[name](here, IDS - 8)
    for bad in (8, -9 if wraps else -1):
        with pytest.raises(IndexError, match=f"index {bad} is out of bounds"):
            WRITES[name](here, torch.tensor([0, bad, 3]))


def test_a_pin_that_no_split_gives_says_which_do():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(mw.PlanError, match=r"no such split; over tp it may lie as \[4, 4:tp\]"):
        mw.compile(
            model, mw.Mesh(tp=2, device="cpu"), args=(torch.ones(4, 8),), loss=lambda y: y.sum(), pin={"2": "[b:tp, q]"}
        )
