"""The microscope: one step on one device and on the whole mesh in this process, every tensor of every op compared.

The captured graph is run on whole tensors; the rank graphs are run node by node (`values.py`), and each node's local
tensors, of all micro-batches, are put together by their layout. The first op whose tensor differs is named with its
source line, so that a wrong rule or a wrong reduction is seen where it happens and not where the loss is printed. Eager
PyTorch is compared too, where the program draws no random numbers: it tells a wrong capture from a wrong split.

Two tensors agree when |a - b| <= atol + rtol * max |b|, which allows for sums in another order. What is computed from
tensors in 16 bits has the tolerance of those, and a few of its elements may be far where rounding carries a value over
a step (a relu at zero): then ||a - b|| <= 4 (atol sqrt(n) + rtol ||b||), which a missing or double sum does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from ..partitioner.errors import MeshwrightError
from ..partitioner.layout import Layout
from ..partitioner.precision import call, lowered
from ..partitioner.program import Program
from ..partitioner.with_tensors import Changes, call_with, unchanged
from .values import Values, mesh_values, put_together, whole_values

TOLERANCE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (2e-4, 1e-6),
    torch.float16: (2e-2, 1e-3),
    torch.bfloat16: (6e-2, 1e-2),
}
"""dtype -> (rtol of the largest element, atol)."""

STEPS = 4.0
"""So many times these may the norm of the difference of two tensors in 16 bits be, of their norm."""


class VerifyError(MeshwrightError):
    """The mesh computes something else than one device."""


@dataclass(frozen=True)
class Report:
    """What `verify` compared: tensors equal, and the largest relative difference and its op."""

    compared: int
    largest: float
    where: str

    def __str__(self) -> str:
        return f"{self.compared} tensors equal; largest relative difference {self.largest:.1e} ({self.where})"


def verify(compiled: Any, args: tuple, kwargs: dict[str, Any], target: Any) -> Report:
    """See `Compiled.verify`. Nothing of the compiled model changes.

    Raises:
        VerifyError: the mesh and one device differ.
    """
    program: Program = compiled.trace(*args, target=target, **kwargs)
    values = compiled.gather("params") | compiled.gather("buffers")
    leaves = pytree.tree_leaves((args, kwargs, target))
    tensors = [t.detach() for t in leaves if isinstance(t, torch.Tensor)]
    scale = compiled.scaler.tensor(compiled.device) if compiled.scaler else None
    inputs = inputs_of(program, values, tensors, compiled.steps, scale)
    with torch.no_grad():
        want = whole_values(program.captured.fx, inputs, program.constants)
        got = mesh_values(program, inputs)
        report = compare(program, want, got)
    _against_eager(compiled, program, want, args, kwargs, target)
    return report


def inputs_of(
    program: Program, values: dict[str, Any], tensors: list[torch.Tensor], step: int, scale: torch.Tensor | None = None
) -> list[Any]:
    """What the captured program is given, whole: working copies of the parameters, the tensors of the call."""
    captured, found = program.captured, []
    for node, role in zip(captured.placeholders, captured.inputs, strict=True):
        if role.kind in ("param", "buffer"):
            found.append(values[str(role.name)].detach().to(node.meta["val"].dtype, copy=True))
        elif role.kind == "input":
            found.append(tensors[int(role.name)])
        else:
            found.append(scale if role.kind == "scale" else step)
    return found


def compare(program: Program, want: dict[str, Any], got: Values) -> Report:
    """Every captured tensor against the mesh's, in program order, and what leaves; on every stage that has it.

    Raises:
        VerifyError: naming the first op that differs.
    """
    count, largest, at, through = 0, 0.0, "none", _through(program)
    for node, name, layout in _compared(program):
        whole = want.get(node.name)
        if layout is None or not isinstance(whole, torch.Tensor):
            continue
        for stage, mesh_value in _on_mesh(program, node, name, layout, got):
            far = difference(whole, mesh_value, through[node])
            if far > 1.0:
                leaves = "" if name == node.name else f" as it leaves the program, {name}"
                raise VerifyError(_text(node, f"{layout}{stage}{leaves}", whole, mesh_value))
            count += 1
            if (relative := far * through[node][0]) > largest:
                largest = relative
                at = f"{node.name}, {node.meta.get('where') or node.meta.get('module') or node.target}"
    return Report(count, largest, at)


def _through(program: Program) -> dict[fx.Node, tuple[float, float]]:
    """Per captured node the largest tolerance of what it is computed from: a float32 gradient of bfloat16 products is
    no better than those."""
    found: dict[fx.Node, tuple[float, float]] = {}
    for node in program.captured.fx.nodes:
        own = TOLERANCE.get(getattr(node.meta.get("val"), "dtype", torch.float64), (0.0, 0.0))
        rests = node.op == "placeholder"
        found[node] = max([own, *(found[x] for x in node.all_input_nodes)]) if not rests else own
    return found


def _compared(program: Program) -> Iterator[tuple[fx.Node, str, Layout | None]]:
    """(captured node, its name on the mesh, its layout there): every node, then what leaves the program if it is put
    together, or moved, on its way out."""
    for node in program.captured.fx.nodes:
        yield node, node.name, program.layouts.get(node.name)
    outputs = zip(program.captured.output_values, program.graph.output_values, program.output_layouts, strict=True)
    for node, made, layout in outputs:
        if node is not None and made is not None and made.name != node.name:
            yield node, made.name, layout


def _on_mesh(
    program: Program, node: fx.Node, name: str, layout: Layout, got: Values
) -> Iterator[tuple[str, torch.Tensor]]:
    if all(isinstance(n, int) for n in node.meta["val"].shape):
        return put_together(program, name, layout, got)
    whole = next((v[name] for v in got if name in v), None)  # a size that depends on data: never split
    return iter([] if whole is None else [("", whole)])


def difference(want: torch.Tensor, got: torch.Tensor, allowed: tuple[float, float] = (0.0, 0.0)) -> float:
    """How far two tensors are apart, in units of what their dtype allows, or `allowed` if that is more; above 1 they
    differ."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(want, got) else float("inf")
    if not torch.equal(torch.isfinite(want), torch.isfinite(got)):
        return float("inf")
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = want.to(wide), got.to(wide)
    finite = torch.isfinite(a)
    a, b = a[finite], b[finite]
    rtol, atol = max(allowed, TOLERANCE.get(want.dtype, TOLERANCE[torch.float32]))
    if a.numel() == 0:
        return 0.0
    largest = float((a - b).abs().max() / (atol + rtol * a.abs().max()))
    if largest <= 1.0 or rtol < TOLERANCE[torch.float16][0]:
        return largest
    return min(largest, float((a - b).norm() / (STEPS * (atol * a.numel() ** 0.5 + rtol * a.norm()))))


def _text(node: fx.Node, layout: Any, want: torch.Tensor, got: torch.Tensor) -> str:
    line = node.meta.get("where") or "no source line"
    if want.shape != got.shape:
        why = f"shape {tuple(got.shape)}, on one device {tuple(want.shape)}"
    else:
        far = (want.double() - got.double()).abs() if not want.is_complex() else (want - got).abs()
        index = int(far.argmax())
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), want.shape)) if want.dim() else ()
        ours, theirs = got.flatten()[index], want.flatten()[index]
        why = f"largest difference {float(far.max()):.3g} at {at}: {ours} on the mesh, {theirs} on one device"
    return (
        f"the first op that differs is {node.name} = {node.target} in module "
        f"{node.meta.get('module') or '(root)'} at {line}; "
        f"it lies as {layout}; {why}"
    )


def _against_eager(
    compiled: Any, program: Program, want: dict[str, Any], args: tuple, kwargs: dict, target: Any
) -> None:
    """The loss of the captured graph against eager PyTorch, where no random numbers are drawn."""
    if any(r.kind == "step" for r in program.captured.inputs):
        return
    model, precision = compiled.model, compiled.settings.precision
    low = lowered(precision, model)
    swap = {n: p.to(low.get(n, p.dtype)) for n, p in compiled.gather("params").items()} | compiled.gather("buffers")
    loss, trained = compiled.settings.loss, {n for n, p in model.named_parameters() if p.requires_grad}

    def run(*args: Any, **kwargs: Any) -> Any:
        held = {name: t.detach().clone().requires_grad_(name in trained) for name, t in swap.items()}
        return call_with(model, held, args, kwargs)

    def finish(out: Any, target: Any) -> Any:
        if loss is not None:
            out = loss(out) if target is None else loss(out, target)
        return out if isinstance(out, torch.Tensor) else out.loss

    # with gradients, as in training: a model may hook the gradient of an activation, or ask for one
    with unchanged(model, Changes()), torch.enable_grad():
        eager = call(precision, run, args, kwargs, target, finish).detach()
    outputs = zip(program.captured.output_values, program.captured.outputs, strict=True)
    value = next(v for v, r in outputs if r.kind == "output")
    assert value is not None
    if difference(eager, want[value.name], _through(program)[value]) > 1.0:
        raise VerifyError(
            f"the captured loss is {float(want[value.name])}, eager PyTorch's is {float(eager)}: the capture differs"
        )


__all__ = ["Report", "VerifyError", "compare", "difference", "inputs_of", "verify"]
