"""That all processes were given the same options, captured the same program and made the same plan, before any runs it.

Each process captures and plans by itself. What could make two differ (another model, another library, a rule found on
one and timed out on another) would show as a hang or a wrong number; digests of program and plan show it.
"""

from __future__ import annotations

import hashlib

from ..partitioner.program import Program
from .faults import DivergedError
from .roll_call import RollCall, odd, ranks_text

_VERBS = {"program": "captured another program", "plan": "made another plan"}


def check_options_alike(call: RollCall | None, options: dict[str, str]) -> None:
    """Compare with the other processes what each was told, before they make process groups by it.

    Args:
        options: of running programs, by name.

    Raises:
        DivergedError: some process was given other options.
    """
    if call is None:
        return
    every = call.everyones("comparing options", options)
    if not (out := odd(every)):
        return
    fellow = next(r for r in range(len(every)) if r not in out)
    one, other = every[out[0]], every[fellow]
    names = [n for n in one if one[n] != other[n]]
    a, b = (", ".join(f"{n}={of[n]}" for n in names) for of in (one, other))
    raise DivergedError(
        f"{ranks_text(out)} was given other options ({a} beside {b} of rank {fellow}): give compile the same in all "
        f"processes",
        out,
    )


def check_agreement(program: Program, call: RollCall | None, shapes: str) -> None:
    """Compare with the other processes.

    Args:
        shapes: of the call, for the message.

    Raises:
        DivergedError: the processes' programs or plans differ.
    """
    if call is None:
        return
    mine = {"program": _digest(_text(program)), "plan": _digest(program.plan.to_text()), "call": shapes}
    every = call.everyones("comparing programs and plans", mine)
    for what, verb in _VERBS.items():
        out = odd([e[what] for e in every])
        if not out:
            continue
        fellow = next(r for r in range(len(every)) if r not in out)
        a, b = every[out[0]]["call"], every[fellow]["call"]
        beside = f" ({a} beside {b} of rank {fellow})" if a != b else f" than rank {fellow}"
        raise DivergedError(
            f"{ranks_text(out)} {verb}{beside}: all processes must run the same script on the same model with "
            f"the same versions of torch and meshwright. Compare compiled.dump(...) of two ranks, or give all the "
            f"same plan=",
            out,
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text(program: Program) -> str:
    """The captured program, one call a line."""
    lines = []
    for node in program.captured.fx.nodes:
        name = getattr(node.target, "__name__", None) or str(node.target)
        lines.append(f"{node.name} {name} {node.args} {dict(node.kwargs)}")
    return "\n".join(lines)
