"""Per-rank graphs as generated Python: values, requests, freeing, and faults that name node and source line."""

from __future__ import annotations

import math
import operator
import time
import traceback
import weakref

import pytest
import torch
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.transfer import Transfer, pause, start, wait
from meshwright.runtime.comm import Pause, Start, Wait
from meshwright.runtime.execute import compile_rank
from meshwright.runtime.faults import DeadlockError, MismatchError, RankError
from meshwright.runtime.inprocess import InProcessComm
from torch import fx

aten = torch.ops.aten
MESH = Mesh(p=2, device="cpu")
SUM = Transfer("all_reduce", ("p",), (4,), (4,))


def call(graph, target, *args, where="", **kwargs):
    node = graph.call_function(target, args, kwargs)
    node.meta["where"] = where
    return node


def reduced(graph, *values, transfers=None, where="model.py:7", **kwargs):
    """start, wait and the results of one bucket."""
    handle = call(graph, start, transfers or (SUM,) * len(values), *values, where=where, **kwargs)
    results = call(graph, wait, handle, len(values), where=where)
    return [call(graph, operator.getitem, results, i) for i in range(len(values))]


def run(*programs):
    return InProcessComm(MESH).run(list(programs))


def test_calls_constants_and_keywords():
    graph = fx.Graph()
    x, unused = graph.placeholder("x"), graph.placeholder("unused")
    a = call(graph, aten.add.Tensor, x, 1.5, alpha=2)
    b = call(graph, aten.to.dtype, a, torch.float64)
    c = call(graph, aten.view.default, b, [2, 2])
    d = call(graph, aten.clamp.default, c, -math.inf, math.inf)
    low, high = call(graph, aten.aminmax.default, d), call(graph, operator.getitem, d, (slice(None), 1))
    graph.output((call(graph, operator.getitem, low, 1), high, [d], None, 3))
    program = compile_rank(graph)
    inputs = [torch.arange(4.0), torch.zeros(1)]
    with pytest.raises(StopIteration) as stop:
        next(program(inputs))
    top, column, whole, nothing, three = stop.value.value
    assert inputs == [] and (nothing, three) == (None, 3) and unused.name in program.source
    assert top.item() == 6.0 and top.dtype == torch.float64
    assert column.tolist() == [4.0, 6.0] and whole[0].shape == (2, 2)


def test_names_of_nodes_and_globals_do_not_collide():
    graph = fx.Graph()
    names = ["inputs", "aten_add_Tensor", "Exception_1", "error", "Start", "rank_error"]
    values = [graph.placeholder(n) for n in names]
    total = values[0]
    for v in values[1:]:
        total = call(graph, aten.add.Tensor, total, v)
    graph.output((total,))
    with pytest.raises(StopIteration) as stop:
        next(compile_rank(graph, "rank 3/x")([torch.ones(1)] * 6))
    assert stop.value.value[0].item() == 6.0


def test_constants_are_bound_and_missing_ones_are_named():
    graph = fx.Graph()
    graph.output((graph.create_node("get_attr", "layer.mask"),))
    mask = torch.ones(3)
    with pytest.raises(StopIteration) as stop:
        next(compile_rank(graph, constants={"layer.mask": mask})([]))
    assert stop.value.value[0] is mask
    with pytest.raises(ValueError, match=r"layer\.mask"):
        compile_rank(graph)


def test_collectives_become_requests():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(tuple(reduced(graph, x, y, consume=True)))
    program = compile_rank(graph)
    assert program.axes == {("p",)}
    running = program([torch.ones(4), torch.ones(4)])
    request = next(running)
    assert isinstance(request, Start) and request.transfers == (SUM, SUM)
    assert request.where == "model.py:7" and request.consume
    waiting = running.send("handle")
    assert isinstance(waiting, Wait) and waiting.handle == "handle"
    with pytest.raises(StopIteration) as stop:
        running.send([1, 2])
    assert stop.value.value == (1, 2)
    for a, b in run(*(program([torch.ones(4), torch.full((4,), 3.0)]) for _ in range(2))):
        assert a.tolist() == [2.0] * 4 and b.tolist() == [6.0] * 4


def test_source_shows_the_users_lines_and_frees_after_last_use():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = call(graph, aten.neg.default, x, where="model.py:3")
    graph.output((call(graph, aten.abs.default, a, where="model.py:4"),))
    lines = compile_rank(graph).source.splitlines()
    assert "        neg_default = aten_neg(x); del x  # model.py:3" in lines
    assert "        abs_default = aten_abs(neg_default); del neg_default  # model.py:4" in lines


def test_values_are_freed_while_the_program_runs_on():
    alive, checked = {}, []

    def remember(name, x):
        alive[name] = weakref.ref(x)
        return x

    def check(expected):
        checked.append(sorted(n for n, r in alive.items() if r() is not None))
        assert checked[-1] == expected

    graph = fx.Graph()
    x = graph.placeholder("x")
    call(graph, remember, "x", x)
    a = call(graph, remember, "a", call(graph, aten.neg.default, x))
    call(graph, check, ["a"])
    (r,) = reduced(graph, a)
    r = call(graph, remember, "r", r)
    call(graph, check, ["r"])
    b = call(graph, remember, "b", call(graph, aten.abs.default, r))
    call(graph, check, ["b"])
    (s,) = reduced(graph, b)
    graph.output((s,))

    def one_rank_group():
        inputs = [torch.ones(4)]
        return compile_rank(graph)(inputs)

    comm = InProcessComm(Mesh(p=1, device="cpu"))
    (out,) = comm.run([one_rank_group()])
    assert checked == [["a"], ["r"], ["b"]]
    assert out[0].tolist() == [1.0] * 4


def test_a_started_tensor_is_freed_once_the_group_has_met():
    refs, alive = [], []
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = call(graph, lambda x: refs.append(weakref.ref(y := x * 2)) or y, x)
    (r,) = reduced(graph, a)
    call(graph, lambda: alive.append([q() is not None for q in refs]))
    graph.output((r,))
    run(*(compile_rank(graph)([torch.ones(4)]) for _ in range(2)))
    assert alive == [[False, False]] * 2


def test_pause_hands_values_out_and_takes_values_in():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    out = call(graph, aten.mul.Tensor, x, w)
    sent = call(graph, pause, (out,))
    grad = call(graph, operator.getitem, sent, 0)
    (total,) = reduced(graph, call(graph, aten.mul.Tensor, grad, x))
    graph.output((total,))
    program, comm = compile_rank(graph), InProcessComm(MESH)
    ranks = [program([torch.full((4,), r + 1.0), torch.full((4,), 3.0)]) for r in range(2)]
    outs = comm.run_until_pause(ranks)
    assert [o[0][0].item() for o in outs] == [3.0, 6.0]
    assert all(g[0].tolist() == [3.0] * 4 for g in comm.resume(ranks, [(torch.ones(4),)] * 2))
    abandoned = [program([torch.ones(4), torch.ones(4)]) for _ in range(2)]
    assert all(isinstance(p.send(None), Pause) for p in abandoned)


def test_a_fault_names_rank_node_and_source_line():
    def explode(x):
        raise ZeroDivisionError("no")

    graph = fx.Graph()
    x = graph.placeholder("x")
    (r,) = reduced(graph, x)
    graph.output((call(graph, explode, r, where="model.py:41"),))
    program = compile_rank(graph)
    with pytest.raises(RankError) as caught:
        run(*(program([torch.ones(4)]) for _ in range(2)))
    error = caught.value
    assert (error.rank, error.node, error.where) == (1, "explode", "model.py:41")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "rank 1, node explode, at model.py:41: ZeroDivisionError: no" in str(error)
    assert "explode_(getitem)" in "".join(traceback.format_exception(error.__cause__))


def test_a_deadlock_between_graphs_names_both_source_lines():
    graphs = []
    for rank in range(2):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((reduced(graph, x, where=f"model.py:{rank}")[0] if rank == 0 else x,))
        graphs.append(graph)
    with pytest.raises(
        DeadlockError, match=r"rank 0 waits for all_reduce\(sum\).* at model.py:0(.|\n)*rank 1 has ended"
    ):
        run(*(compile_rank(g, f"rank{i}")([torch.ones(4)]) for i, g in enumerate(graphs)))


def test_a_mismatch_between_graphs_names_both_source_lines():
    graphs = []
    for rank in range(2):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(
            tuple(reduced(graph, x, transfers=(Transfer("all_reduce", ("p",), (4,), (4,), ("sum", "max")[rank]),)))
        )
        graphs.append(graph)
    with pytest.raises(MismatchError, match=r"all_reduce\(sum\)(.|\n)*all_reduce\(max\)"):
        run(*(compile_rank(g, f"rank{i}")([torch.ones(4)]) for i, g in enumerate(graphs)))


def test_markers_do_not_run_by_themselves():
    for marker in (lambda: start((SUM,), torch.ones(4)), lambda: wait(None, 1), lambda: pause(())):
        with pytest.raises(RuntimeError, match="marker"):
            marker()


def test_a_long_graph_compiles_in_little_time():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(3000):
        x = call(graph, operator.add, x, 1)
    graph.output((x,))
    begin = time.process_time()
    program = compile_rank(graph)
    with pytest.raises(StopIteration) as stop:
        next(program([0]))
    assert stop.value.value == (3000,) and time.process_time() - begin < 10
