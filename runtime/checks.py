"""What `compile` was given, checked before anything is captured: every fault of the options at once."""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch.nn as nn
import torch.utils._pytree as pytree

from ..partitioner.collective_programs import ALGORITHMS, servers_of
from ..partitioner.errors import CaptureError, PlanError
from ..partitioner.graph import Graph
from ..partitioner.keep import WORDS
from ..partitioner.layout import parse
from ..partitioner.mesh import Mesh
from ..partitioner.offload import offload_faults
from ..partitioner.pipeline import STAGE
from ..partitioner.plan import Plan
from ..partitioner.precision import Precision
from .state import aliases_of

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_options(model: Any, mesh: Mesh, **given: Any) -> None:
    """Check the options of `compile`, by their own names.

    Raises:
        PlanError: some option is none that compile takes; the message names every such option.
    """
    faults = list(_faults(model, mesh, given))
    if faults:
        raise PlanError("; ".join(faults))


def check_search(devices: Any, per_node: Any, links: Any, args: Any, kwargs: Any) -> None:
    """Check what `auto_mesh` takes and `compile` does not.

    Raises:
        PlanError: some of it is wrong; the message names every fault.
    """
    faults = list(_search_faults(devices, per_node, links))
    if not args and not kwargs:
        faults.append("auto_mesh plans the program of a call: pass args=(x,) or kwargs={...}, tensors on meta will do")
    if faults:
        raise PlanError("; ".join(faults))


def _search_faults(devices: Any, per_node: Any, links: Any) -> Iterator[str]:
    whole = isinstance(devices, int) and not isinstance(devices, bool) and devices >= 2
    if not whole:
        yield f"devices={devices!r}: give a whole number of at least 2"
    if per_node is not None:
        if not isinstance(per_node, int) or isinstance(per_node, bool) or per_node < 1:
            yield f"per_node={per_node!r}: give the devices of a node, a whole number of at least 1"
        elif whole and devices % per_node:
            yield f"devices={devices} are no whole number of nodes of per_node={per_node}: change one of them"
    if not isinstance(links, (dict, type(None))) or set(links or ()) - {"gpu", "node"}:
        yield f"links={links!r}: give {{'gpu': the link inside a node, 'node': the link between nodes}}"


def check_target(loss: Callable | None, target: Any) -> None:
    """Raises:
    PlanError: there is a target that nobody takes, or none for a loss that needs one.
    """
    if loss is None and target is not None:
        raise PlanError(
            "target= is for loss=callable(output, target), which compile was not given: pass the loss, or give the "
            "model its labels under another name"
        )
    if loss is not None and target is not None and not takes(loss, 2):
        raise PlanError("the loss takes (output) alone, but there is a target: write loss=lambda output, target: ...")
    if loss is not None and target is None and not takes(loss, 1):
        raise PlanError("the loss takes (output, target), but there is no target: call step(..., target=labels)")


def check_call(model: nn.Module, args: tuple, kwargs: dict[str, Any], target: Any, loss: Callable | None) -> None:
    """Raises:
    PlanError: the model cannot be called so, or counts its own calls in a tensor that decides what it computes.
    """
    if why := _misfit(model, args, kwargs):
        named = loss is not None and target is None and takes(loss, 2) and not _misfit(model, args[:-1], kwargs)
        way = "the target of the loss goes by its name: step(x, target=labels)" if named else "see its signature"
        raise PlanError(f"{type(model).__name__}.forward cannot be called so: {why}; {way}")
    for path, x in pytree.tree_flatten_with_path((args, kwargs, target))[0]:
        if isinstance(x, np.ndarray):
            raise PlanError(f"{_named(path)} is an array of numpy: a model is captured on tensors, torch.from_numpy(x)")
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training and module.momentum is None:
            raise PlanError(
                f"{name or type(model).__name__}: BatchNorm with momentum=None weighs a step by how many there were, "
                f"which no one graph holds: give it a momentum, such as 0.1"
            )
    for name, p in model.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise PlanError(
                f"parameter {name} has a gradient hook, which a compiled step does not call: change the gradient in "
                f"the model (a hook of its module, or x * scale), or after backward(), which leaves it in parameters()"
            )


def _named(path: tuple) -> str:
    """What a path into (args, kwargs, target) leads to."""
    inner = pytree.keystr(path[1:])
    if path[0].idx == 2:
        return "the target" + inner
    return f"argument {inner[1:-1]}" if len(path) == 2 else f"argument {inner}"


def check_written(graph: Graph) -> None:
    """Raises:
    CaptureError: forward writes into a parameter.
    """
    for role in graph.outputs:
        if role.kind == "new_input" and isinstance(role.name, str):
            raise CaptureError(
                f"forward writes into parameter {role.name}: parameters change between steps alone. Weights that "
                f"follow others (a teacher's, an average) are buffers; limits to weights belong after the step, or in "
                f"a parametrization"
            )


def _misfit(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str:
    """Why forward does not take these arguments; "" where it does, or hooks may change them."""
    if model._forward_pre_hooks:
        return ""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as fault:
        return str(fault)
    except ValueError:  # no signature to read
        pass
    return ""


def under_first_names(model: Any, pin: dict[str, str]) -> dict[str, str]:
    """Pins with parameters under the first of their names, where a pin says another.

    Raises:
        PlanError: two pins say different things of one tensor.
    """
    aliases = aliases_of(model) if isinstance(model, nn.Module) else {}
    if not aliases:
        return pin
    first = {name for name, _ in (*model.named_parameters(), *model.named_modules())}
    out: dict[str, str] = {}
    for pattern, text in pin.items():
        known = "." not in pattern or any(fnmatch.fnmatchcase(name, pattern) for name in first)
        meant = {aliases[a] for a in aliases if fnmatch.fnmatchcase(a, pattern)}
        for name in (*([pattern] if known or not meant else []), *sorted(meant)):
            if out.setdefault(name, text) != text:
                raise PlanError(f"the pin {pattern!r}: {text!r} is of {name}, which is pinned to {out[name]!r} too")
    return out


def _schedule(name: Any, mesh: Mesh) -> Iterator[str]:
    if not isinstance(name, str):
        yield f"schedule={name!r}: give a name, or the text of a schedule"
    elif name != "auto" and not any(mesh.role(a) == "pipeline" for a in mesh.names):
        yield f"schedule={name[:40]!r} is of a pipeline; the mesh {mesh} has no axis pp"


def _faults(model: Any, mesh: Mesh, given: dict[str, Any]) -> Iterator[str]:
    if not isinstance(model, nn.Module):
        yield f"model must be a torch.nn.Module, not {type(model).__name__}; put a function in a module's forward"
    if not isinstance(given["args"], (tuple, list)):
        yield f"args= is a tuple of the call's arguments, not {type(given['args']).__name__}: write args=(x,)"
    loss = given["loss"]
    if callable(loss) and not (takes(loss, 1) or takes(loss, 2)):
        yield "loss= must take (output) or (output, target); give its other arguments defaults or bind them by a lambda"
    optimizer = given["optimizer"]
    if optimizer is not None and not callable(optimizer):
        yield (
            f"optimizer= must be a function that makes one, not {type(optimizer).__name__}: write "
            f"optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4), where m has this rank's shards"
        )
    if isinstance(given["zero"], bool) or given["zero"] not in (0, 1, 2, 3, "auto"):
        yield f"zero={given['zero']!r}: the ZeRO stage is 0, 1, 2, 3 or 'auto'"
    parts = given["micro_batches"]
    if parts != "auto" and (not isinstance(parts, int) or isinstance(parts, bool) or parts < 1):
        yield f"micro_batches={parts!r}: give a whole number of at least 1, or 'auto'"
    yield from _schedule(given["schedule"], mesh)
    yield from offload_faults(given["offload"], optimizer)
    if given["recompute"] not in ("auto", "none", "full"):
        what = f"recompute={given['recompute']!r}"
        yield f"{what}: say 'auto', 'none' or 'full'; pin={{'layers.*': 'recompute'}} names parts"
    if given["fuse"] not in ("auto", "none", "all"):
        yield f"fuse={given['fuse']!r}: say 'auto', 'none' or 'all'"
    precision = given["precision"]
    yield from (precision if isinstance(precision, Precision) else Precision(precision)).faults()
    yield from _clip(given["clip_grad_norm"])
    memory = given["memory"]
    if memory is not None and not (_is_number(memory) and memory > 0):
        yield f"memory={memory!r}: give the bytes a device may use, a positive number such as 80 * 2**30, or None"
    yield from _pins(given["pin"], mesh)
    if not isinstance(given["plan"], (str, Plan, type(None))):
        yield f"plan= is a Plan or the text of one (plan.to_text()), not {type(given['plan']).__name__}"
    yield from _batch_dims(model, given["batch_dims"])
    timeout = given["timeout"]
    if timeout is not None and not (_is_number(timeout) and timeout > 0):
        yield f"timeout={timeout!r}: give the seconds that a process may wait for another, a positive number, or None"
    often = given["check_every"]
    if often is not None and not (isinstance(often, int) and not isinstance(often, bool) and often > 0):
        yield f"check_every={often!r}: give the steps from one check of the ranks to the next, at least 1, or None"
    yield from _collectives(given["collectives"])
    if not isinstance(given["seed"], int):
        yield f"seed={given['seed']!r}: give a whole number"


def takes(fn: Callable, count: int) -> bool:
    """Whether a function can be called with so many arguments; True where its signature cannot be read."""
    try:
        shape = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):
        return True
    try:
        shape.bind(*range(count))
    except TypeError:
        return False
    return True


def _collectives(name: Any) -> Iterator[str]:
    known = isinstance(name, str) and (name in ("torch", "auto", *ALGORITHMS) or servers_of(name) > 0)
    if not known:
        said = ", ".join(repr(n) for n in ("torch", *ALGORITHMS, "server:4"))
        yield f"collectives={name!r}: say {said} or 'auto'"


def _clip(clip: Any) -> Iterator[str]:
    if clip is None:
        return
    pair: tuple[Any, Any] = clip if isinstance(clip, tuple) and len(clip) == 2 else (clip, 2.0)
    if not all(_is_number(n) and n > 0 for n in pair):
        yield f"clip_grad_norm={clip!r}: give the largest norm, or (largest norm, norm type), positive numbers"


def _batch_dims(model: Any, dims: Any) -> Iterator[str]:
    if not isinstance(dims, (dict, type(None))):
        yield f"batch_dims={dims!r}: give {{argument index or name: dim}}, such as {{0: 1}}"
        return
    forward = inspect.signature(model.forward).parameters if isinstance(model, nn.Module) else {}
    named = any(p.kind is p.VAR_KEYWORD for p in forward.values())
    for key in dims or ():
        if isinstance(key, str) and not named and key not in forward and key != "target":
            yield f"batch_dims names {key!r}, but {type(model).__name__}.forward takes {list(forward)}"


def _pins(pin: Any, mesh: Mesh) -> Iterator[str]:
    if not isinstance(pin, (dict, type(None))):
        yield f"pin={pin!r}: give {{name or glob: layout text}}, such as {{'*.mlp.up.weight': '[o:tp, i]'}}"
        return
    for name, text in (pin or {}).items():
        if not isinstance(text, str):
            yield f"pin {name!r}: {text!r} is no layout text; write one like '[o:tp, i]'"
            continue
        if text in WORDS:
            continue
        if STAGE.fullmatch(text):
            if not any(mesh.role(a) == "pipeline" and mesh.sizes[a] > 1 for a in mesh.names):
                yield f"pin {name!r}: {text!r} is of a pipeline; the mesh {mesh} has no axis pp of more than one rank"
            continue
        try:
            dims, partial = parse(text)
        except ValueError as fault:
            words = "" if "[" in text else f"; or one of {', '.join(map(repr, sorted(WORDS)))}, 'stage 1'"
            yield f"pin {name!r}: {fault}{words}"
            continue
        used = [a for dim in dims for axes in dim for a in axes] + [a for a, _ in partial]
        if unknown := sorted(set(used) - set(mesh.names)):
            yield f"pin {name!r}: {text!r} names the axes {unknown}; the mesh has {list(mesh.names)}"
        if twice := sorted({a for a in used if used.count(a) > 1}):
            yield f"pin {name!r}: {text!r} uses {twice} more than once; an axis splits one dim of a tensor"


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and not math.isnan(x)
