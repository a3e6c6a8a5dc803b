"""Runs a case on one device and on a mesh by the same program, and says where the two differ.

A case is run up to four ways, each on freshly built models:

    steps    every step of the case by `step`: losses, gradients, buffers, parameters, norms
    forward  one call as the model, then the caller's own backward: outputs, gradients, gradients of the inputs
    resumed  the steps of the case, the first of them on another mesh and saved there; with damage, the load must fail
    slices   backward on each of `accumulate` slices of the batch, then one optimizer step

and, where it asks for a fault, once more with that (`faults.py`).
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import meshwright as mw
import torch
from torch.utils import _pytree as pytree

from .oracle import Eager, loss_of
from .registry import Axes, Built, Case

SEED = 1234


@dataclass
class Run:
    """What one run left behind, whole tensors throughout."""

    output: Any = None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    params: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor | None] = field(default_factory=dict)
    input_grads: list[torch.Tensor | None] = field(default_factory=list)

    def gathered(self, trainer: Any) -> Run:
        self.grads, self.params, self.buffers = (trainer.gather(w) for w in ("grads", "params", "buffers"))
        return self


# -- the two kinds of trainer
def options(case: Case, built: Built) -> dict[str, Any]:
    return {"loss": built[3], "optimizer": case.ask.optim, "clip_grad_norm": case.ask.clip}


def on_one_device(case: Case, built: Built) -> Eager:
    return Eager(built[0], **options(case, built), scale=case.ask.scaler)


def on_mesh(axes: Axes, **more: Any) -> Callable[[Case, Built], Any]:
    def make(case: Case, built: Built) -> Any:
        asked = {"zero": case.ask.zero, "batch_dims": case.ask.batch_dims}
        if "pp" in axes:
            asked["micro_batches"] = case.ask.microbatches
        if case.ask.recompute:
            asked["recompute"] = "full"
        if case.ask.offload:
            asked["offload"] = "full"
        if case.ask.scaler:
            power = int(math.log2(case.ask.scaler))
            asked["precision"] = mw.Precision(loss_scale=mw.LossScale(initial_scale_power=power, hysteresis=1))
        given = {k: v for k, v in asked.items() if v is not None}
        return mw.compile(built[0], mw.Mesh(**axes), **options(case, built), **given, **more)

    return make


# -- the programs
def steps(make: Callable, case: Case, built: Built) -> Run:
    ask, run, trainer = case.ask, Run(), make(case, built)
    sched = trainer.scheduler(ask.sched) if ask.sched else None

    def step(args: tuple, kwargs: dict[str, Any]) -> None:
        with cast(case):
            run.losses.append(float(trainer.step(*args, **kwargs)))
        if ask.clip:
            run.norms.append(float(trainer.grad_norm))
        if sched:
            sched.step()

    example = (built[1], built[2])
    for args, kwargs in ask.batches() if ask.batches else [example] * ask.steps:
        step(args, kwargs)
    if ask.mode == "train-eval-train":
        trainer.eval()
        with torch.no_grad():
            run.output = trainer(*built[1], **built[2])
        trainer.train()
        step(*example)
    return run.gathered(trainer)


def forward(make: Callable, case: Case, built: Built) -> Run:
    _, args, kwargs, loss_fn = built
    run, trainer = Run(), make(case, built)
    with cast(case):
        run.output = trainer(*args, **kwargs)
        loss = loss_of(run.output, loss_fn)
    loss.backward()
    run.losses.append(float(loss.detach()))
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    run.input_grads = [x.grad for x in inputs]
    return run.gathered(trainer)


def slices(make: Callable, case: Case, built: Built) -> Run:
    _, args, kwargs, loss_fn = built
    run, trainer, count = Run(), make(case, built), case.ask.accumulate or 1
    cut = [x.tensor_split(count) for x in args]
    for _ in range(case.ask.steps):
        if trainer.optimizer:
            trainer.optimizer.zero_grad()
        for part in zip(*cut, strict=True):
            loss = loss_of(trainer(*part, **kwargs), loss_fn) / count
            loss.backward()
            run.losses.append(float(loss.detach()))
        if trainer.optimizer:
            trainer.optimizer.step()
    return run.gathered(trainer)


def resumed(make: Callable, case: Case, built: Built) -> Run:
    """Saved after some steps on the mesh `from`, loaded by a new trainer, which does the rest."""
    asked = case.ask.save_resume
    assert asked is not None
    run, first = Run(), on_mesh(asked["from"])(case, case.build())
    with tempfile.TemporaryDirectory() as folder:
        run.losses += [float(first.step(*built[1], **built[2])) for _ in range(asked["after"])]
        saved = first.save(folder).path
        trainer = make(case, built)
        if case.ask.damage:
            DAMAGE[case.ask.damage](saved)
            run.losses.append(float(trainer.step(*built[1], **built[2])))
            unchanged_by_failure(trainer, saved)
        trainer.load(folder)
        run.losses += [float(trainer.step(*built[1], **built[2])) for _ in range(case.ask.steps - asked["after"])]
    return run.gathered(trainer)


def cut_a_shard(saved: Path) -> None:
    shard = min(saved.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-64])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut the last 64 bytes off one shard file": cut_a_shard,
    "delete one shard file": lambda saved: max(saved.glob("*.safetensors")).unlink(),
}


def unchanged_by_failure(trainer: Any, saved: Path) -> None:
    """Raises:
    AssertionError: a load that fails has changed something.
    """
    before = trainer.state_dict()
    with contextlib.suppress(mw.MeshwrightError):
        trainer.load(saved)
    assert all(torch.equal(x, before[n]) for n, x in trainer.state_dict().items())


def cast(case: Case) -> contextlib.AbstractContextManager:
    if case.ask.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, case.ask.autocast))


def programs(case: Case) -> list[Callable]:
    return [steps, forward, slices] if case.ask.accumulate else [steps, forward]


def run_fresh(program: Callable, make: Callable, case: Case) -> Run:
    built = case.build()
    built[0].train(case.ask.mode != "eval")
    torch.manual_seed(SEED)
    return program(make, case, built)


# -- the comparison
def unequal(name: str, want: Any, got: Any, tol: tuple[float, float]) -> str | None:
    """How `got` differs from `want`; None when it does not."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return None if want is got or want == got else f"{name}: want {want!r}, got {got!r}"
    want, got = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (want, got))
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{name}: want {want.dtype} {list(want.shape)}, got {got.dtype} {list(got.shape)}"
    exact = not (want.is_floating_point() or want.is_complex())
    if torch.equal(want, got) if exact else torch.allclose(got, want, *tol, equal_nan=True):
        return None
    far = (got != want).sum() if exact else (got - want).abs().max()
    return f"{name}: differs by {far.item():.3g}, largest value {want.abs().max().item():.3g}"


def differences(want: Run, got: Run, tol: tuple[float, float]) -> list[str]:
    found = []
    for kind in ("grads", "params", "buffers"):
        left, right = getattr(want, kind), getattr(got, kind)
        found += [unequal(f"{kind} {n}", left[n], right.get(n), tol) for n in left]
    for kind in ("losses", "norms", "input_grads"):
        left, right = getattr(want, kind), getattr(got, kind)
        found += [unequal(f"number of {kind}", len(left), len(right), tol)]
        found += [
            unequal(f"{kind} {i}", *map(torch.as_tensor, pair), tol)
            if None not in pair
            else unequal(f"{kind} {i}", *pair, tol)
            for i, pair in enumerate(zip(left, right, strict=False))
        ]
    return [f for f in found + unequal_outputs(want.output, got.output, tol) if f]


def unequal_outputs(want: Any, got: Any, tol: tuple[float, float]) -> list[str | None]:
    left, right = pytree.tree_leaves(want), pytree.tree_leaves(got)
    if len(left) != len(right) or type(want) is not type(got):
        return [f"output: want {len(left)} leaves of {type(want).__name__}, got {len(right)} of {type(got).__name__}"]
    return [unequal(f"output {i}", a, b, tol) for i, (a, b) in enumerate(zip(left, right, strict=True))]


# -- one case on one mesh
def complaints(case: Case, axes: Axes) -> list[str]:
    """Everything that is wrong with the case on this mesh."""
    reference = on_mesh({"dp": 1}) if case.ask.random else on_one_device
    found = []
    for program in programs(case):
        want, got = run_fresh(program, reference, case), run_fresh(program, on_mesh(axes), case)
        problems = differences(want, got, case.ask.tol)
        if case.ask.random:
            problems += [f"second run: {d}" for d in differences(got, run_fresh(program, on_mesh(axes), case), (0, 0))]
        if case.ask.check and program is forward:
            problems += case.ask.check(got)
        found += [f"{program.__name__}: {p}" for p in problems]
    if case.ask.save_resume:
        want, got = run_fresh(steps, reference, case), run_fresh(resumed, on_mesh(axes), case)
        found += [f"resumed: {p}" for p in differences(want, got, case.ask.tol)]
    return found


def outcome(case: Case, axes: Axes) -> str:
    """ "match", "error as expected", or what is wrong."""
    from .faults import with_fault

    try:
        spoilt = with_fault(case, axes)
        found = complaints(case, axes) + spoilt
    except mw.MeshwrightError as error:
        missing = case.expect.missing_words(str(error))
        if case.expect.error is None or missing:
            raise
        return "wrong: " + "; ".join(spoilt) if spoilt else "error as expected"
    if not found and not case.expect.match:
        return f"wrong: expected an error that says {case.expect.error!r}"
    return "wrong: " + "; ".join(found) if found else "match"
