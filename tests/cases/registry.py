"""What a case is: a small model that brings out one fault people have reported, and what is asked of a run of it.

A theme file opens with `CASES, case = registry()` and adds each model with

    @case("tied-embed-head", "tied weights", "NVIDIA/Megatron-LM#6500", "what people saw", [TP, PP], steps=3)
    def tied_embed_head() -> Built:
        return model, args, kwargs, loss_fn

`loss_fn` is a callable(output), or None when the model returns its own 0-d loss. `expect` is "match", "error: words"
or "match|error: words": a silently different number is never right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Axes = dict[str, int]
Built = tuple[nn.Module, tuple, dict[str, Any], Callable[[Any], torch.Tensor] | None]

DP, TP, PP, CP, EP = ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2})
SMALL_WORDS = {
    "a",
    "an",
    "and",
    "be",
    "by",
    "cannot",
    "from",
    "in",
    "into",
    "is",
    "no",
    "not",
    "of",
    "on",
    "one",
    "or",
    "over",
    "the",
    "to",
}


@dataclass(frozen=True)
class Ask:
    """What a run of the case does beyond one step. A key that is not listed here is refused at registration."""

    batch_dims: dict[int | str, int | None] | None = None  # where the batch lies, when it is not dim 0 of every tensor
    microbatches: int | None = None  # micro-batches of a mesh with stages
    accumulate: int | None = None  # backward on this many equal slices of the batch before one optimizer step
    batches: Callable[[], list[tuple[tuple, dict]]] | None = None  # one training step on each, in order
    steps: int = 1  # repeats of the example batch
    optim: Callable[[Any], torch.optim.Optimizer] | None = None
    sched: Callable[[Any], Any] | None = None  # scheduler of the optimizer, stepped once a step
    clip: tuple[float, float] | None = None  # (max_norm, norm_type)
    zero: int | None = None
    recompute: bool = False  # everything recomputed
    offload: bool = False
    autocast: str | None = None
    scaler: float | None = None  # initial loss scale
    save_resume: dict[str, Any] | None = None  # {"after": steps, "from": mesh, "to": mesh}
    damage: str | None = None  # what is done to the checkpoint before it is loaded
    fault: dict[str, str] | None = None  # what goes wrong at run time, where, and what the error then says
    check: Callable[[Any], list[str]] | None = None  # run -> complaints; holds on one device and on every mesh
    tol: tuple[float, float] = (1e-4, 1e-5)  # rtol, atol
    random: bool = False  # the numbers depend on the random stream
    mode: str = "train"  # "eval", or "train-eval-train"
    static: str = ""  # a remark


@dataclass(frozen=True)
class Expect:
    """`expect`, read."""

    match: bool
    error: str | None

    @classmethod
    def of(cls, text: str) -> Expect:
        head, _, words = text.partition("error:")
        if head.rstrip("| ") not in ("", "match") or not (head or words):
            raise ValueError(f"expected 'match', 'error: words' or 'match|error: words', got {text!r}")
        return cls(head.startswith("match"), words.strip() or None)

    def missing_words(self, message: str) -> list[str]:
        """The words an expected error must say and does not."""
        wanted = re.findall(r"[\w.:'=-]+", (self.error or "").lower())
        said = message.lower()
        return [w for w in (w.strip("'") for w in wanted) if w not in SMALL_WORDS and w not in said]


@dataclass(frozen=True, eq=False)
class Case:
    id: str
    kind: str
    source: str  # public threads that report this kind of fault: "owner/name#number; ..."
    symptom: str
    meshes: tuple[Axes, ...]
    expect: Expect
    build: Callable[[], Built]  # freshly built and seeded at every call
    ask: Ask

    @property
    def links(self) -> list[str]:
        """The source threads as markdown links."""
        threads = [t.strip().partition("#") for t in self.source.split(";")]
        return [f"[{r.split('/')[1]}#{n}](https://github.com/{r}/issues/{n})" for r, _, n in threads]


def registry() -> tuple[list[Case], Callable]:
    """A fresh list, and the decorator that fills it."""
    cases: list[Case] = []

    def case(
        id: str, kind: str, source: str, symptom: str, meshes: list[Axes], expect: str = "match", **ask: Any
    ) -> Callable:
        def add(build: Callable[[], Built]) -> Callable[[], Built]:
            cases.append(Case(id, kind, source, symptom, tuple(meshes), Expect.of(expect), build, Ask(**ask)))
            return build

        return add

    return cases, case
