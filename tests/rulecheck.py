"""Prove the rule of a call on real tensors; see `partitioner/rules/proof.py`.

`check_call` returns how many splits it has proved, so that a test can also ask that there were some.
"""

from __future__ import annotations

from meshwright.partitioner.rules.every import rule_of
from meshwright.partitioner.rules.proof import prove
from meshwright.partitioner.rules.split import Call


def check_call(target, args, kwargs=None, rtol=1e-4, atol=1e-5, ranks=(2, 3)) -> int:
    call = Call(target, args, kwargs or {}, target(*args, **(kwargs or {})))
    return prove(call, rule_of(call), rtol, atol, ranks)
