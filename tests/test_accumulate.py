"""What a segment makes for a micro-batch is added to the sum so far where it is made."""

from __future__ import annotations

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from meshwright.kernels.in_place import ADDING, ADDING_ONE, add_embedding_backward_
from meshwright.partitioner.errors import LawError
from meshwright.partitioner.program import Collect
from meshwright.passes.accumulate import check_added
from torch import fx, nn

aten = torch.ops.aten


class Words(nn.Module):
    """A product, a product of batches, an embedding; the bias is summed by an op that cannot add."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 8)
        self.experts, self.head = nn.Parameter(torch.randn(2, 4, 5)), nn.Linear(10, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(self.words(ids)))
        x = torch.bmm(x.view(-1, 2, 4).transpose(0, 1), self.experts).transpose(0, 1)
        return self.head(x.reshape(len(ids), -1, 10)).flatten(0, 1)


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, target.flatten())


IDS = torch.randint(0, 11, (10, 3), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("mesh", "chunked"), [({"pp": 2}, False), ({"dp": 1}, True)], ids=str)
def test_weights_are_added_to_as_they_are_made(mesh, chunked: bool, monkeypatch: pytest.MonkeyPatch):
    """Of 10 rows 4 micro-batches are unequal."""
    if chunked:
        monkeypatch.setattr("meshwright.passes.chunk_loss.LEAST_BYTES", 0)
    compiled = mw.compile(Words(), mw.Mesh(**mesh), loss=loss, micro_batches=4)
    assert compiled.verify(IDS, target=IDS).compared > 20
    eager = Words()
    expected = loss(eager(IDS), IDS)
    expected.backward()
    for _ in range(2):  # what was summed in one step is not added to in the next
        torch.testing.assert_close(compiled.step(IDS, target=IDS), expected.detach())
    for name, grad in compiled.gather("grads").items():
        torch.testing.assert_close(grad, eager.get_parameter(name).grad)
    segments = compiled.program.segments
    made = {n.target for s in segments for n in s.graph.fx.nodes if n.name in {c.part for c in s.sums}}
    assert set(ADDING) <= made
    ran = {n.target for s in segments if s.sums for n in s.graph_at(1, compiled.mesh.world_size, 0).nodes}
    assert set(ADDING.values()) <= ran
    assert ({add for _, add in ADDING_ONE.values()} <= ran) == chunked


@pytest.mark.parametrize("padding", [-1, 3])
def test_rows_of_an_embedding_are_added(padding):
    grad, total = torch.randn(5, 2, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    ids = torch.randint(0, 7, (5, 2))
    expected = total + aten.embedding_dense_backward(grad, ids, 7, padding, False)
    assert add_embedding_backward_(total, grad, ids, 7, padding, False) is total
    torch.testing.assert_close(total, expected)


def test_the_law_names_who_else_reads_a_part():
    graph = fx.Graph()
    part = graph.call_function(aten.mm.default, (graph.placeholder("x"), graph.placeholder("y")))
    graph.output((part, graph.call_function(aten.neg.default, (part,))))
    with pytest.raises(LawError, match="law added-once broken after pass accumulate at mm_default"):
        check_added(graph, [Collect(part.name, "whole", None)])  # type: ignore[arg-type]
