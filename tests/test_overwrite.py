"""Results that are written over what nobody reads any more."""

from __future__ import annotations

import meshwright as mw
import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from meshwright.kernels.cross_entropy import nll_backward_
from meshwright.partitioner.errors import LawError
from meshwright.partitioner.transfer import start, wait
from meshwright.passes.overwrite import check_overwritten, overwrite
from torch import nn

OPS = torch.ops.meshwright


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


X, Y = torch.randn(8, 6), torch.tensor([0, 4, 2, 1, -100, 3, 3, 0])


def both(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The logits are read by the loss and by what backward of the square reads."""
    return F.cross_entropy(out, target) + out.square().mean()


def written_over(program) -> list[bool]:
    """Of the calls that can, in what ranks run, whether they write over their operand."""
    ranks = range(2) if program.segments else ()
    runs = [(act.segment, rank) for rank in ranks for act in program.acts(rank) if act.kind == "run"]
    graphs = [program.segments[s].rank_graph(r) for s, r in runs] or [program.rank_graph(r) for r in range(2)]
    targets = [n.target for g in graphs for n in g.nodes]
    return [t is nll_backward_ for t in targets if t in (nll_backward_, OPS.nll_backward.default)]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2}, {}),
        ({"dp": 2}, {"zero": 3}),
        ({"dp": 2}, {"micro_batches": 2}),
        ({"pp": 2}, {"micro_batches": 4, "schedule": "1f1b"}),
        ({"pp": 2}, {"micro_batches": 4, "schedule": "zb-h1"}),
    ],
    ids=lambda x: "-".join(map(str, x.values())) or "plain",
)
def test_gradients_lie_where_the_logits_lay(mesh, options):
    compiled = mw.compile(model(), mw.Mesh(**mesh), loss=F.cross_entropy, **options)
    assert compiled.verify(X, target=Y).compared > 10
    over = written_over(compiled.trace(X, target=Y))
    assert over and all(over)
    eager = model()
    F.cross_entropy(eager(X), Y).backward()
    compiled.step(X, target=Y)
    for name, grad in compiled.gather("grads").items():
        torch.testing.assert_close(grad, eager.get_parameter(name).grad)


def test_logits_that_are_read_later_stay():
    compiled = mw.compile(model(), mw.Mesh(dp=2), loss=both)
    eager = model()
    both(eager(X), Y).backward()
    compiled.step(X, target=Y)
    for name, grad in compiled.gather("grads").items():
        torch.testing.assert_close(grad, eager.get_parameter(name).grad)


def _graph(late: bool, sent: bool = False) -> tuple[fx.Graph, fx.Node]:
    """Logits by an op; the gradient; a read of the logits afterwards, or a collective of them still under way."""
    graph = fx.Graph()
    x, w, grad, target, lse = (graph.placeholder(n) for n in ("x", "w", "grad", "target", "lse"))
    logits = graph.call_function(torch.ops.aten.mm.default, (x, w))
    began = graph.call_function(start, ((), logits)) if sent else None
    dz = graph.call_function(OPS.nll_backward.default, (grad, logits, target, lse, -100, 0))
    end = graph.call_function(wait, (began,)) if sent else None
    more = graph.call_function(torch.ops.aten.sum.default, (logits,)) if late else None
    graph.output((dz, end, more))
    return graph, dz


@pytest.mark.parametrize(("late", "sent", "over"), [(False, False, True), (True, False, False), (False, True, False)])
def test_only_what_is_dead_is_written_over(late, sent, over):
    graph, dz = _graph(late, sent)
    overwrite(graph)
    assert (dz.target is nll_backward_) == over


def test_inputs_are_not_written_over_unless_they_are_the_segments_own():
    graph = fx.Graph()
    grad, logits, target, lse = (graph.placeholder(n) for n in ("grad", "logits", "target", "lse"))
    dz = graph.call_function(OPS.nll_backward.default, (grad, logits, target, lse, -100, 0))
    graph.output((dz,))
    overwrite(graph)
    assert dz.target is OPS.nll_backward.default
    logits.meta["own"] = True
    overwrite(graph)
    assert dz.target is nll_backward_


def test_the_law_names_who_reads_what_is_gone():
    graph, dz = _graph(late=True)
    dz.target = nll_backward_
    said = "law overwritten-is-dead broken after pass overwrite at nll_backward_default .*which sum_default reads"
    with pytest.raises(LawError, match=said):
        check_overwritten(graph)
