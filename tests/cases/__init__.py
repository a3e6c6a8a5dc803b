"""Small models, each bringing out one fault that users of distributed training have reported."""

from . import batch, blocks, failures, families, inputs, ops, shapes, state, structure, weights

THEMES = (weights, batch, state, failures, shapes, inputs, ops, structure, blocks, families)
ALL = [c for theme in THEMES for c in theme.CASES]
BY_ID = {c.id: c for c in ALL}
if len(BY_ID) != len(ALL):
    raise ValueError("two cases have one id")
