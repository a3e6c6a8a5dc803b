"""The proof of a rule run in reverse: try each split of an op's operands and see what puts its outputs together.

Runs in a child of `sandbox`. Splits are tried on small tensors, on 2 and 3 parts and two sets of values; what was found
is then proved as rules written by hand are, on sizes near those of the call too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_unflatten

from ..compat import fake_mode
from ..strategies_sizes import never_empty
from .found import CODES, NONE, REDUCED, SAME, Factor, Found, rule_from
from .proof import alone, compare, share, together
from .samples import HALF, SMALL, Sizes, ceilings, elements, sample, shrunk
from .sandbox import Attempt
from .split import Call, plain_shape
