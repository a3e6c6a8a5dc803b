"""The simulator: published bubbles, closed forms, bounds, memory, and a second, slower way to the same times."""

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.errors import ScheduleError
from meshwright.partitioner.schedules.action import COMPUTE, SENDS
from meshwright.partitioner.schedules.generate import NAMES, generate, in_flight_bound
from meshwright.partitioner.schedules.grid import grid
from meshwright.partitioner.schedules.post_ahead import post_ahead
from meshwright.partitioner.schedules.reductions import with_reductions
from meshwright.partitioner.schedules.schedule import Schedule, chain, flow, from_text
from meshwright.partitioner.schedules.send_recv import needs, with_transfers
from meshwright.partitioner.schedules.simulate import simulate
from meshwright.partitioner.schedules.stage_cost import Costs, StageCost, even_costs
from meshwright.partitioner.schedules.timeline import Event, trace_events, write_trace
from pipelines_page import page, rate, rows, timed, transferred

PUBLISHED = rows()
times = st.floats(0.1, 3.0)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model}-{row.micro_batches}")
def test_published_bubbles(row):
    for name, published in row.rates:
        if name == "interleaved":
            assert abs(rate(name, row) - published) < 0.004
        else:
            assert f"{rate(name, row):.4f}" == f"{published:.4f}"


@given(st.integers(1, 6), st.integers(1, 13), times, times, times)
def test_gpipe_and_1f1b_have_their_closed_form(ranks, micro_batches, forward, backward, weight):
    for name in ("gpipe", "1f1b"):
        timeline = timed(transferred(name, ranks, micro_batches), (forward, backward, weight))
        assert timeline.seconds == pytest.approx((micro_batches + ranks - 1) * (forward + backward + weight))
        assert timeline.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
        assert timeline.idle == pytest.approx([(ranks - 1) * (forward + backward + weight)] * ranks)


@given(st.integers(1, 4), st.integers(0, 12), st.integers(1, 4), times, times)
def test_interleaved_has_its_closed_form(ranks, more, virtual, forward, backward):
    """(p-1)/(v m) of the ideal, whether p divides the number of micro-batches or not."""
    timeline = timed(transferred("interleaved", ranks, ranks + more, virtual), (forward, backward, 0.0))
    ideal = (ranks + more) * (forward + backward)
    assert timeline.seconds - ideal == pytest.approx((ranks - 1) / virtual * (forward + backward))


@given(st.integers(1, 6), st.integers(0, 8), times, times, st.floats(0.1, 1.0))
def test_zb_h1_has_its_closed_form(ranks, more, forward, backward, share):
    """(p-1) (T_F + T_B - T_W), where W takes no longer than F and B."""
    weight, micro_batches = share * min(forward, backward), 2 * ranks + more
    timeline = timed(transferred("zb-h1", ranks, micro_batches), (forward, backward, weight))
    ideal = micro_batches * (forward + backward + weight)
    assert timeline.seconds - ideal == pytest.approx((ranks - 1) * (forward + backward - weight))


@pytest.mark.parametrize("ranks", range(1, 7))
def test_zb_v_has_no_bubble(ranks):
    """For T_F = T_B = T_W no rank waits once it has begun; what is left is that they begin one after another."""
    for micro_batches in range(2 * ranks - 1, 3 * ranks + 2):
        timeline = timed(transferred("zb-v", ranks, micro_batches), (1.0, 1.0, 1.0))
        assert timeline.span == pytest.approx([3.0 * micro_batches] * ranks)
        assert timeline.seconds == pytest.approx(3.0 * micro_batches + (ranks - 1) / 2)


@pytest.mark.parametrize("ranks", range(1, 7))
def test_schedules_in_order_of_their_bubbles(ranks):
    """For F = B = W, few micro-batches included."""
    for micro_batches in range(1, 2 * ranks + 3):
        names = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
        times = {name: timed(transferred(name, ranks, micro_batches), (1, 1, 1)).seconds for name in names}
        assert times["gpipe"] == times["1f1b"] >= max(times["interleaved"], times["zb-h1"])
        assert times["zb-h1"] >= times["zb-v"] >= 3 * micro_batches + (ranks - 1) / 2


@pytest.mark.parametrize("name", NAMES)
def test_in_flight_and_peak(name):
    """Bytes follow pairs in flight, whatever the times are."""
    for ranks, micro_batches in ((1, 1), (2, 3), (4, 8), (4, 12), (5, 11), (6, 2)):
        schedule = transferred(name, ranks, micro_batches)
        virtual = schedule.stages // ranks
        timeline = simulate(schedule, even_costs(schedule, 1.0, 1.3, 0.4, hop=0.1, saved=100 * virtual))
        bound = in_flight_bound(name, ranks, micro_batches)
        assert timeline.peak == tuple(100 * n for n in timeline.in_flight)
        assert all(a <= b for a, b in zip(timeline.in_flight, bound, strict=True))
        if micro_batches >= 2 * ranks or name not in ("zb-v", "dualpipe-v"):
            assert timeline.in_flight == bound
        assert [steps[-1][1] for steps in timeline.memory] == [0] * ranks


def relaxed(schedule: Schedule, costs: Costs) -> float:
    """The step's seconds by relaxation: ends of actions grow until every rule holds."""
    ways, ends = flow(schedule.stages), defaultdict[object, float](float)
    changed = True
    while changed:
        changed = False
        links = defaultdict[tuple[int, int], float](float)
        for rank, order in enumerate(schedule.orders):
            now = 0.0
            for action in order:
                stage, kind, micro, other = action
                cost = costs.stages[stage]
                if kind in SENDS:
                    assert other is not None
                    link = rank, schedule.placement[other]
                    end = links[link] = max(now, links[link], ends[action.partner]) + costs.hop(stage, other)
                    key = kind[-1], stage, micro, schedule.placement[other]
                elif kind in COMPUTE:
                    arrived = [ends[(*value, rank)] for value in needs(action, ways)]
                    seconds = {"F": cost.forward, "B": cost.backward, "W": cost.weight}
                    now = end = max([now, *arrived]) + sum(seconds[part] for part in kind)
                    key = kind[0], stage, micro, rank
                else:
                    end, key = now, action
                changed |= ends[key] != end
                ends[key] = end
    return max(ends.values())


@settings(deadline=None)
@given(st.data())
def test_simulator_equals_relaxation(data):
    """Unequal stages, unequal hops, links that queue."""
    name, ranks, micro_batches = data.draw(st.tuples(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 5)))
    schedule = with_transfers(generate(name, ranks, micro_batches))
    if ahead := data.draw(st.integers(0, 2)):
        schedule = post_ahead(schedule, ahead)
    stages = tuple(StageCost(*data.draw(st.tuples(times, times, times))) for _ in range(schedule.stages))
    hops = {edge: data.draw(times) for edge in sorted(chain(schedule.stages))}
    costs = Costs(stages, hops | {(b, a): data.draw(times) for a, b in hops})
    timeline = simulate(schedule, costs)
    assert timeline.seconds == pytest.approx(relaxed(schedule, costs))
    for rank in range(schedule.ranks):
        for stream in {e.stream for e in timeline.events}:
            own = [e for e in timeline.events if (e.rank, e.stream) == (rank, stream)]
            assert all(a.end <= b.start for a, b in zip(own, own[1:], strict=False))


@pytest.mark.parametrize("name", NAMES)
def test_receives_posted_ahead(name):
    """One computation ahead is in time: more gives next to nothing."""
    for forward, backward, weight, hop in ((1, 1, 1, 0.1), (1, 2, 0.5, 0.3), (2, 1, 1, 0.5)):
        late = with_transfers(generate(name, 4, 8))
        costs = even_costs(late, forward, backward, weight, hop)
        seconds = [simulate(schedule, costs).seconds for schedule in (late, post_ahead(late), post_ahead(late, 3))]
        assert seconds[0] > seconds[1] >= seconds[2] > 0.998 * seconds[1]


def test_memory_of_one_micro_batch():
    stage = StageCost(1.0, 2.0, 3.0, resident=1000, until_backward=1, until_weight=10, between=100, transient=(5, 7, 9))
    apart = simulate(from_text("0: 0F0 0B0 0W0"), Costs((stage,)))
    assert apart.memory == (
        ((0.0, 1000), (0.0, 1016), (1.0, 1011), (1.0, 1118), (3.0, 1110), (3.0, 1119), (6.0, 1000)),
    )
    assert apart.peak == (1119,)
    both = simulate(from_text("0: 0F0 0BW0"), Costs((stage,)))
    assert both.memory == (((0.0, 1000), (0.0, 1016), (1.0, 1011), (1.0, 1120), (6.0, 1000)),)
    assert simulate(from_text("0: 0F0 0F1"), Costs((stage,))).peak == (1005,)  # without a backward nothing is saved


def spans(text: str, stage: StageCost) -> dict[str, tuple[float, float]]:
    return {e.name: (e.start, e.end) for e in simulate(from_text(text), Costs((stage,))).events}


def test_what_runs_beside():
    stage = StageCost(1.0, 1.0, 1.0, reduce=5.0, unshard=2.0, offload=3.0)
    got = spans("0: 0UNSHARD 0F0 0OFFLOAD0 0F1 0RELOAD0 0BW1 0BW0 0REDUCE", stage)
    assert got["0F0"] == (2.0, 3.0)  # waits for its weights
    assert got["0OFFLOAD0"] == (3.0, 6.0)
    assert got["0BW1"] == (4.0, 6.0)
    assert got["0RELOAD0"] == (6.0, 9.0)
    assert got["0BW0"] == (9.0, 11.0)  # waits for what it reads
    assert got["0REDUCE"] == (11.0, 16.0)


def test_reduction_runs_under_the_cool_down():
    text = "0: 0F0 0F1 0BW0 0BW1\n1: 1F0 1BW0 1F1 1BW1"
    costs = Costs((StageCost(1.0, 1.0, 1.0), StageCost(1.0, 1.0, 1.0, reduce=2.0)))
    schedule = with_reductions(with_transfers(from_text(text)))
    assert simulate(schedule, costs).seconds == 9.0
    assert simulate(schedule, Costs((costs.stages[0], StageCost(1.0, 1.0, 1.0, reduce=4.0)))).seconds == 11.0


def test_memory_of_what_is_away():
    stage = StageCost(1.0, 1.0, 1.0, until_weight=100, offload=1.0, offloaded=80, unsharded=1000)
    timeline = simulate(
        from_text("0: 0UNSHARD 0F0 0RESHARD 0OFFLOAD0 0RELOAD0 0UNSHARD 0BW0 0RESHARD"), Costs((stage,))
    )
    assert timeline.memory == (
        ((0.0, 0), (0.0, 1000), (0.0, 1100), (1.0, 100), (1.0, 1100), (2.0, 1020), (2.0, 1100), (5.0, 1000), (5.0, 0)),
    )


@pytest.mark.parametrize(
    ("schedule", "costs", "message"),
    [
        (generate("1f1b", 2, 2), Costs((StageCost(1.0),) * 2), "has no transfers: simulate"),
        (generate("1f1b", 2, 2), Costs((StageCost(1.0),)), "has 2 stages, the costs 1"),
        (
            with_transfers(generate("1f1b", 2, 2)),
            Costs((StageCost(1.0),) * 2, {}),
            "no seconds for the hop from stage 0 to 1",
        ),
        (from_text("0: 0F0 0RECV_B0<1\n1: 1RECV_F0<0 1F0"), Costs((StageCost(1.0),) * 2), "never ends: rank 1 at 1F0"),
    ],
)
def test_errors(schedule, costs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule, costs)


def test_gradient_hops_as_its_value():
    costs = Costs((StageCost(1.0),) * 2, {(0, 1): 2.0})
    assert costs.hop(0, 1) == costs.hop(1, 0) == 2.0
    assert Costs(costs.stages, {(0, 1): 2.0, (1, 0): 3.0}).hop(1, 0) == 3.0


def test_trace(tmp_path):
    """The simulated and the measured run of a rank stand next to each other."""
    simulated = [Event(1, "1F0", 0.5, 0.75), Event(0, "0SEND_F0>1", 0.25, 0.5, "0>1"), Event(0, "0F0", 0.0, 0.25)]
    runs = {"simulated": simulated, "measured": [Event(0, "0F0", 0.0, 0.5)]}
    memory = {"simulated": [((0.0, 7),)]}
    write_trace(tmp_path / "step.json", runs, memory)
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"] == trace_events(runs, memory)
    assert trace_events(runs, memory) == [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0 simulated"}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "compute"}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "0>1"}},
        {"name": "process_name", "ph": "M", "pid": 2, "tid": 0, "args": {"name": "rank 1 simulated"}},
        {"name": "thread_name", "ph": "M", "pid": 2, "tid": 0, "args": {"name": "compute"}},
        {"name": "1F0", "cat": "compute", "ph": "X", "ts": 5e5, "dur": 2.5e5, "pid": 2, "tid": 0},
        {"name": "0SEND_F0>1", "cat": "0>1", "ph": "X", "ts": 2.5e5, "dur": 2.5e5, "pid": 0, "tid": 1},
        {"name": "0F0", "cat": "compute", "ph": "X", "ts": 0.0, "dur": 2.5e5, "pid": 0, "tid": 0},
        {"name": "bytes", "ph": "C", "ts": 0.0, "pid": 0, "args": {"bytes": 7}},
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "rank 0 measured"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "compute"}},
        {"name": "0F0", "cat": "compute", "ph": "X", "ts": 0.0, "dur": 5e5, "pid": 1, "tid": 0},
    ]


def test_grid_of_values_that_skip():
    schedule = from_text("0: 0F0 0BW0\n1: 1F0 1BW0\n2: 2F0 2BW0")
    assert grid(schedule).splitlines() == [
        "rank 0 | F0 .  .  .  .  .  .  BW0",
        "rank 1 | .  F0 .  .  .  BW0   .  .",
        "rank 2 | .  .  F0 BW0   .  .  .  .",
    ]
    assert grid(schedule, edges=[(0, 2)]).splitlines() == [
        "rank 0 | F0 .  .  .  BW0",
        "rank 1 | F0 BW0   .  .  .",
        "rank 2 | .  F0 BW0   .  .",
    ]


def test_page(golden):
    assert golden("docs/pipelines.md", page())
