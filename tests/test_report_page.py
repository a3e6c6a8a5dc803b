"""`compiled.report`: a well-formed page that needs no network, escapes what it quotes, and holds the figures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.report_page import page
from meshwright.partitioner.units import bytes_text, seconds_text
from torch import nn

CASES = {"tp": ({"dp": 2, "tp": 2}, {}), "stages": ({"dp": 2, "pp": 2}, {"micro_batches": 2, "schedule": "1f1b"})}


def compiled(axes: dict[str, int], **options: object) -> mw.Compiled:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    mesh = mw.Mesh(**axes, device="h100")  # type: ignore[arg-type]
    return mw.compile(model, mesh, args=(torch.ones(8, 6),), loss=lambda y: y.square().mean(), **options)  # type: ignore[arg-type]


def parsed(path: Path) -> ET.Element:
    text = path.read_text()
    assert text.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(text.partition("\n")[2])


@pytest.mark.parametrize("case", CASES)
def test_a_page_holds_the_figures_of_its_plan(case: str, tmp_path: Path):
    axes, options = CASES[case]
    made = compiled(axes, **options)
    made.report(tmp_path / "report.html")
    root = parsed(tmp_path / "report.html")
    said = "\n".join(root.itertext())
    plan = made.plan
    assert plan.facts is not None
    assert seconds_text(sum(plan.seconds)) in said and bytes_text(sum(plan.facts.at_rest.values())) in said
    for note in plan.notes:
        assert note in said
    for (names, kind), total in plan.traffic.items():
        assert "+".join(names) in said and kind in said and bytes_text(total.sent) in said
    for layout in plan.resting.values():
        assert str(layout) in said
    assert len(root.findall(".//details")) >= 1
    if plan.schedule is not None:
        svg = "{http://www.w3.org/2000/svg}"
        boxes = [r.findtext(f"{svg}title") for r in root.iter(f"{svg}rect")]
        computed = [str(a) for order in plan.schedule.orders for a in order if a.kind in ("F", "B", "W", "BW")]
        assert sorted(map(str, boxes)) == sorted(computed)
        assert plan.schedule.name in said


def test_a_page_needs_no_network():
    text = page(compiled({"tp": 2}).plan)
    assert not re.search(r"<script|<link|@import|url\(|src=|href=", text)


def test_what_comes_from_the_program_is_escaped(tmp_path: Path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<b>&amp;", nn.Linear(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules["<b>&amp;"](x)  # type: ignore[misc]

    made = mw.compile(Odd(), mw.Mesh(tp=2, device="cpu"), args=(torch.ones(4, 6),), loss=lambda y: y.square().mean())
    made.report(tmp_path / "odd.html")
    assert "<b>&amp;.weight" in "\n".join(parsed(tmp_path / "odd.html").itertext())


def test_a_plan_without_its_program_has_no_page():
    plan = mw.Plan.from_text(compiled({"tp": 2}).plan.to_text(), mw.Mesh(tp=2, device="h100"))
    with pytest.raises(mw.PlanError, match="a report needs its program"):
        page(plan)
