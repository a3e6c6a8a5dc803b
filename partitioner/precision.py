"""Mixed precision: which tensors a program sees in bfloat16 or float16, while its parameters rest in float32.

    parameters        rest as the model has them (master weights, float32); the program is given a working copy in the
                      compute dtype, made of a rank's own shard before anything is gathered, and freed at its last use
    kept              parameters named by `keep`, and those of batch norms, have no copy: they are used as they rest
    floating inputs   cast to the compute dtype; targets, whole numbers and buffers are not
    products          of operands in several dtypes: in that of the weight, or in the compute dtype (`islands.py`)
    norms, softmax    computed in float32 inside their kernels, as PyTorch's own do; their results in the compute dtype
    losses            of torch.nn.functional: their operands are cast to float32
    outputs           floating outputs in the compute dtype are cast to float32, and so is what `loss=` is given
    gradients         of a working copy: cast to the dtype of the parameter, and reduced in `reduce`

This is FSDP2's MixedPrecisionPolicy(param_dtype, reduce_dtype=float32, output_dtype=float32, cast_forward_inputs=True),
with losses in float32 wherever they are written.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree

from .errors import PlanError
from .graph import Role
from .islands import islands
from .outputs import as_trees

aten = torch.ops.aten

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LossScale:
    """How the loss of a step is scaled so that small gradients are not lost in float16; DeepSpeed's keys and defaults.

    Attributes:
        loss_scale: a fixed scale; 0 for one that is found while training (the others are about that one).
        initial_scale_power: the first scale is 2 to this power.
        loss_scale_window: after so many steps without overflow the scale is doubled.
        hysteresis: the scale is halved at the overflow of this number since it was last doubled, and at every further
            one; all are skipped.
        min_loss_scale: it is never halved below this; an overflow there is an error.
    """

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0

    def faults(self) -> Iterator[str]:
        """What is wrong with the values."""
        for name in ("loss_scale", "min_loss_scale"):
            x = getattr(self, name)
            if not isinstance(x, (int, float)) or isinstance(x, bool) or not 0 <= x < float("inf"):
                yield f"LossScale({name}={x!r}): give a number of at least 0"
        for name, least in (("initial_scale_power", 0), ("loss_scale_window", 1), ("hysteresis", 1)):
            x = getattr(self, name)
            if not isinstance(x, int) or isinstance(x, bool) or not least <= x <= (100 if least == 0 else x):
                most = " and at most 100" if least == 0 else ""
                yield f"LossScale({name}={x!r}): give a whole number of at least {least}{most}"


@dataclass(frozen=True)
class Precision:
    """What a program computes in.

    Attributes:
        compute: "bf16" or "fp16"; None for the dtypes of the model itself (or of torch.autocast around the call).
        reduce: "fp32", or as `compute`: the dtype in which gradients are added up over ranks. Over micro-batches they
            are always added up in float32.
        keep: names or globs of parameters that are used as they rest, such as ("*.router.weight",).
        loss_scale: of `step`; "auto" scales dynamically under "fp16" and not otherwise, None never.
    """

    compute: str | None = None
    reduce: str = "fp32"
    keep: tuple[str, ...] = ()
    loss_scale: LossScale | str | None = "auto"

    @property
    def dtype(self) -> torch.dtype | None:
        return DTYPES[self.compute] if self.compute else None

    @property
    def scaling(self) -> LossScale | None:
        """How the loss is scaled; None for not at all."""
        if isinstance(self.loss_scale, LossScale):
            return self.loss_scale
        return LossScale() if self.loss_scale == "auto" and self.compute == "fp16" else None

    def __str__(self) -> str:
        said = [f"{self.compute} of float32 weights, gradients reduced in {self.reduce}"] if self.compute else []
        said += [f"kept: {', '.join(self.keep)}"] if self.keep else []
        said += ["loss scaled"] if self.scaling else []
        return "; ".join(said)

    def faults(self) -> Iterator[str]:
        """What is wrong with the values."""
        if self.compute not in (None, *DTYPES):
            yield f"precision={self.compute!r}: it is None, 'bf16', 'fp16' or a Precision"
            return
        ways = ("fp32", self.compute) if self.compute else ("fp32",)
        if self.reduce not in ways:
            yield f"Precision(reduce={self.reduce!r}): gradients are reduced in {' or '.join(map(repr, ways))} here"
        if isinstance(self.keep, str) or not all(isinstance(x, str) for x in self.keep):
            yield f"Precision(keep={self.keep!r}): give a tuple of names or globs, such as ('*.router.weight',)"
        elif self.keep and not self.compute:
            yield f"Precision(keep={self.keep!r}) without compute='bf16' or 'fp16': all parameters are kept as they are"
        if isinstance(self.loss_scale, LossScale):
            yield from self.loss_scale.faults()
            if self.compute == "bf16":
                yield (
                    "Precision('bf16', loss_scale=...): bfloat16 has the range of float32, its gradients need no "
                    "scale; leave loss_scale= out, or compute in 'fp16'"
                )
        elif self.loss_scale not in ("auto", None):
            yield f"Precision(loss_scale={self.loss_scale!r}): it is 'auto', None or a LossScale"


def precision_of(given: Any) -> Precision | None:
    """The option of `compile` as a value; None where all stays as it is.

    Raises:
        PlanError: it is none that there is.
    """
    if given is None:
        return None
    made = given if isinstance(given, Precision) else Precision(given)
    if faults := list(made.faults()):
        raise PlanError("; ".join(faults))
    return made if made.compute or made.scaling else None


def lowered(precision: Precision | None, model: nn.Module) -> dict[str, torch.dtype]:
    """{parameter: the dtype of its working copy}, of those that have one.

    Raises:
        PlanError: a name to be kept that no parameter has; or a trained parameter that rests in no more bits than the
            program computes in, so that there is no master weight.
    """
    low = precision.dtype if precision else None
    if precision is None or low is None:
        return {}
    params = dict(model.named_parameters())
    if unknown := [k for k in precision.keep if not any(fnmatch.fnmatchcase(n, k) for n in params)]:
        raise PlanError(f"Precision(keep=...): no parameter has the name {unknown[0]!r}; there are {list(params)[:4]}")
    half = [n for n, p in params.items() if p.requires_grad and p.dtype in DTYPES.values()]
    if half:
        raise PlanError(
            f"precision={precision.compute!r} needs master weights in float32, and {len(half)} trained parameters are "
            f"{params[half[0]].dtype}, such as {half[0]}: load the model in float32, or leave precision= out to train "
            f"it as it is"
        )
    own = {f"{m}.{n}" if m else n for m, module in model.named_modules() if _is_batch_norm(module)
           for n, _ in module.named_parameters(recurse=False)}  # fmt: skip
    kept = own | {n for n in params if any(fnmatch.fnmatchcase(n, k) for k in precision.keep)}
    wide = {n: p for n, p in params.items() if p.is_floating_point() and p.dtype.itemsize > low.itemsize}
    return {n: low for n in wide if n not in kept}


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether its parameters go with running statistics, which are not cast."""
    return isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))


def cast_tree(x: Any, to: torch.dtype, only: torch.dtype | None = None) -> Any:
    """A tree of arguments with its floating tensors in another dtype; `only`: those of this dtype."""

    def cast(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.dtype == to:
            return t
        return t.to(to) if only is None or t.dtype == only else t

    return pytree.tree_map(cast, x)


def call(
    precision: Precision | None,
    program: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    target: Any,
    loss: Callable[[Any, Any], Any] | None,
) -> Any:
    """The program's output, or its loss, with inputs and outputs cast and the islands of float32 in it.

    `program`: a function that has the working copies of its parameters.
    """
    low = precision.dtype if precision else None
    if low is None:
        out = program(*args, **kwargs)
        return out if loss is None else loss(out, target)
    with islands(low):
        args, kwargs = cast_tree((args, kwargs), low)
        out = cast_tree(as_trees(program(*args, **kwargs)), torch.float32, only=low)
        return out if loss is None else loss(out, target)


def raise_gradients(
    graph: fx.Graph, outputs: tuple[Role, ...], precision: Precision | None, masters: dict[str, torch.dtype]
) -> None:
    """Gradients of working copies leave the graph in the dtype of their parameter; those that are reduced in a
    narrower one are cast when they arrive. `masters`: {parameter: the dtype it rests in}, where that is another."""
    if precision is None or precision.reduce != "fp32":
        return
    out = graph.output_node()
    values: list[Any] = [*out.args[0]]  # type: ignore[misc]
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for i, role in enumerate(outputs):
        value: Any = values[i]
        to = masters.get(str(role.name)) if role.kind == "grad" else None
        if to is None or value is None or value.meta["val"].dtype == to:
            continue
        if (value, to) not in made:
            last = _after(value)
            with graph.inserting_after(last):
                node = graph.call_function(aten._to_copy.default, (value,), {"dtype": to})
            with value.meta["val"].fake_mode:
                val = value.meta["val"].to(to)
            node.meta = dict(value.meta) | {"val": val, "seq": None}
            made[value, to] = node
        values[i] = made[value, to]
    out.args = (tuple(values),)


def _after(value: fx.Node) -> fx.Node:
    """The node after which a new reader of a value stands: what a call gives comes right after the call."""
    while value.next.op == "call_function" and value.next.target is operator.getitem:
        value = value.next
    return value





def raised(precision: Precision | None, values: tuple[fx.Node | None, ...], outputs: tuple[Role, ...]) -> set[fx.Node]:
    """The casts that `raise_gradients` made: gradients are reduced after them, and not before."""
    if precision is None or precision.dtype is None or precision.reduce != "fp32":
        return set()
    pairs = zip(values, outputs, strict=True)
    grads = {v for v, role in pairs if v is not None and role.kind == "grad"}
    return {v for v in grads if v.target is aten._to_copy.default and v.kwargs.keys() == {"dtype"} and _from_low(v)}


def _from_low(cast: fx.Node) -> bool:
    read = cast.args[0]
    return isinstance(read, fx.Node) and read.meta["val"].dtype in DTYPES.values()


__all__ = ["LossScale", "Precision", "call", "cast_tree", "lowered", "precision_of", "raise_gradients", "raised"]
