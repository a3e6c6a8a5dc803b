"""That all processes captured the same program and made the same plan, before any of them runs it.

Each process captures and plans by itself. What could make two differ (another model, another library, a rule found on
one and timed out on another) would show as a hang or a wrong number; digests of program, plan and options show it.
"""

from __future__ import annotations

import hashlib

from ..partitioner.program import Program
from .faults import DivergedError
from .roll_call import RollCall, odd, ranks_text

_VERBS = {"program": "captured another program", "plan": "made another plan", "options": "was given other options"}


def check_agreement(program: Program, call: RollCall | None, options: str, shapes: str) -> None:
    """Compare with the other processes.

    Args:
        options: of running the program.
        shapes: of the call, for the message.

    Raises:
        DivergedError: the processes' programs, plans, or options differ.
    """
    if call is None:
        return
    mine = {"program": _digest(_text(program)), "plan": _digest(program.plan.to_text())}
    mine |= {"options": options, "call": shapes}
    every = call.everyones("comparing programs and plans", mine)
    for what, verb in _VERBS.items():
        out = odd([e[what] for e in every])
        if not out:
            continue
        fellow = next(r for r in range(len(every)) if r not in out)
        a, b = (every[r]["options" if what == "options" else "call"] for r in (out[0], fellow))
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
