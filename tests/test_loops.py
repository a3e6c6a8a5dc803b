"""The loops that a plan tells of are those that its program is cut into."""

from collections.abc import Callable

import meshwright as mw
import pytest
import torch
from pipeline_models import MODELS
from torch import nn


class Normed(nn.Module):
    """Two batch norms, whose statistics are those of the whole batch."""

    def __init__(self):
        super().__init__()
        self.a, self.n, self.b, self.m = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.m(self.b(self.n(self.a(x)).relu())), y)


ALL = MODELS | {"normed": lambda rows: (Normed(), {"x": torch.randn(rows, 6), "y": torch.randn(rows, 6)})}


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("name,waits", [("twice", ""), ("gpt", "sum"), ("normed", "mean"), ("encoder-decoder", "sum")])
def test_a_plan_tells_of_its_loops_and_why(
    name: str, waits: str, mesh: dict[str, int], golden: Callable[[str, str], bool]
):
    torch.manual_seed(0)
    model, batch = ALL[name](8)
    schedule = "1f1b" if "pp" in mesh else "auto"
    compiled = mw.compile(model, mw.Mesh(**mesh, device="cpu"), micro_batches=2, schedule=schedule)  # type: ignore[arg-type]
    program = compiled.trace(**batch)
    facts = program.plan.facts
    assert facts is not None
    assert len(facts.loops) == len({s.phase for s in program.segments if s.phase % 2})
    assert facts.loops[0] == () and all(facts.loops[1:])
    said = program.plan.summary()
    told = [line for line in said.splitlines() if line.startswith("  loop 2 needs whole over the batch: ")]
    assert f"a step goes through 2 micro-batches in {len(facts.loops)} loop" in said
    assert all(waits in line for line in told) and len(told) == bool(waits)
    if mesh == {"pp": 2} and name in ("gpt", "normed"):
        assert golden(f"{name}_pp2_summary.txt", said + "\n")
