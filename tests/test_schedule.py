"""Schedules as data: words, texts, generators, transfers. What the laws refuse is in test_schedule_laws."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.errors import ScheduleError
from meshwright.partitioner.schedules.action import COMPUTE, SENDS, TRANSFERS, Action, parse_action
from meshwright.partitioner.schedules.generate import NAMES, generate, in_flight_bound
from meshwright.partitioner.schedules.post_ahead import post_ahead
from meshwright.partitioner.schedules.reductions import with_reductions
from meshwright.partitioner.schedules.schedule import Schedule, chain, from_text
from meshwright.partitioner.schedules.send_recv import with_transfers
from meshwright.partitioner.schedules.validate import validate

numbers = st.integers(0, 300)
nothing = st.none()
actions = st.one_of(
    st.tuples(numbers, st.sampled_from(["F", "B", "W", "BW", "OFFLOAD", "RELOAD"]), numbers, nothing),
    st.tuples(numbers, st.sampled_from(["REDUCE", "UNSHARD", "RESHARD"]), nothing, nothing),
    st.tuples(numbers, st.sampled_from(sorted(TRANSFERS)), numbers, numbers),
).map(Action._make)


@given(actions)
def test_word_reads_back(action):
    assert parse_action(str(action)) == action


def test_words():
    words = "2F0 2B0 2W0 2BW0 0SEND_F0>3 3RECV_F0<0 3SEND_B0>0 0RECV_B0<3 2REDUCE 2UNSHARD 2RESHARD 2OFFLOAD0 2RELOAD0"
    assert " ".join(str(parse_action(w)) for w in words.split()) == words


@pytest.mark.parametrize(
    "word", ["", "F0", "2F", "02F0", "2F0 ", "2f0", "2I0", "0SEND_F0", "0SEND_F0<3", "3RECV_F0>0", "2REDUCE0"]
)
def test_what_is_no_word(word):
    with pytest.raises(ScheduleError, match="is no action; the forms are 2F0"):
        parse_action(word)


@given(actions.filter(lambda a: a.kind in TRANSFERS))
def test_partner_of_partner(action):
    assert action.partner.partner == action
    assert (action.kind in SENDS) != (action.partner.kind in SENDS)


@pytest.mark.parametrize("name", NAMES)
def test_text_reads_back(name):
    for schedule in (generate(name, 3, 5), with_transfers(generate(name, 2, 3))):
        assert from_text(schedule.to_text()) == schedule


def test_text_without_head():
    text = """
        # two ranks
        0: 0F0, 0F1, 0BW0, 0BW1
        1: 1F0 1BW0 1F1 1BW1   # 1F1B
    """
    schedule = from_text(text, name="mine")
    assert schedule == Schedule("mine", (0, 1), 2, schedule.orders)
    validate(with_transfers(schedule))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this text has no action"),
        ("0: 0F0\n1: 1F0 1G0", r"line 2, rank 1, word 2: '1G0' is no action; the forms are 2F0"),
        ("0: 0F0\n2: 1F0", r"line 2, word '2:': expected '1:', then the actions of rank 1"),
        ("0F0 0BW0", r"line 1, word '0F0': expected '0:'"),
        ("0: 0F0\nschedule name=a", "line 2: the head stands first, and once"),
        ("schedule micro_batches=0\n0: 0F0", "line 1, word 'micro_batches=0': the head is"),
        ("schedule placement=0,a\n0: 0F0", "line 1, word 'placement=0,a': the head is"),
        ("schedule size=3\n0: 0F0", "line 1, word 'size=3': the head is"),
        ("0: 0F0 0BW0\n1: 0F1 0BW1", r"stage 0 computes on ranks \[0, 1\]"),
        ("0: 0F0 2F0", "stage 1 computes nowhere"),
        ("0: 0REDUCE", "nothing computes"),
    ],
)
def test_text_errors(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_text(text)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("1f2b", 2, 2), "no schedule '1f2b'; there are gpipe, 1f1b, zb-h1"),
        (("1f1b", 0, 2), "ranks is a whole number of at least 1; got 0"),
        (("1f1b", 2, 2.0), "micro_batches is a whole number of at least 1; got 2.0"),
        (("interleaved", 2, 2, 0), "virtual is a whole number of at least 1; got 0"),
        (("1f1b", 2, 2, 2), "1f1b has 1 virtual stage a rank, not 2; schedule='interleaved' takes any number"),
        (("zb-v", 2, 2, 3), "zb-v has 2 virtual stages a rank, not 3"),
    ],
)
def test_generate_errors(call, message):
    with pytest.raises(ScheduleError, match=message):
        generate(*call)


def order(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.orders[rank]))


def test_published_orders():
    assert order(generate("1f1b", 3, 4), 0) == "0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3"
    assert order(generate("1f1b", 3, 4), 2) == "2F0 2BW0 2F1 2BW1 2F2 2BW2 2F3 2BW3"
    assert order(generate("zb-h1", 3, 4), 1) == "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3"
    assert order(generate("interleaved", 2, 4), 0) == (
        "0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 2BW2 2BW3 0BW2 0BW3"
    )
    assert generate("interleaved", 3, 4, 3).placement == (0, 1, 2, 0, 1, 2, 0, 1, 2)
    assert generate("zb-v", 3, 4).placement == generate("dualpipe-v", 3, 4).placement == (0, 1, 2, 2, 1, 0)


def held(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most pairs between F and W, counted."""
    most = []
    for line in schedule.orders:
        count, top = 0, 0
        for action in line:
            count += (action.kind == "F") - (action.kind in ("W", "BW"))
            top = max(top, count)
        most.append(top if schedule.trains else 0)
    return tuple(most)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", range(1, 7))
def test_in_flight_equals_bound(name, ranks):
    for micro_batches in range(1, 20):
        counted, bound = held(generate(name, ranks, micro_batches)), in_flight_bound(name, ranks, micro_batches)
        full = micro_batches >= 2 * ranks or name not in ("zb-v", "dualpipe-v")
        assert counted == bound if full else all(a <= b for a, b in zip(counted, bound, strict=True))
    if name == "dualpipe-v":
        assert max(bound) / 2 <= ranks + 1  # published: p + 1 micro-batches


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_legal(name):
    for ranks in range(1, 7):
        for micro_batches in range(1, 14):
            for virtual in (1, 2, 3) if name == "interleaved" else (None,):
                schedule = with_transfers(generate(name, ranks, micro_batches, virtual))
                bound = in_flight_bound(name, ranks, micro_batches, virtual)
                validate(schedule, bound=bound, mode="blocking")
                validate(schedule, bound=bound, mode="batched")
                validate(post_ahead(schedule), bound=bound, mode="async")


@settings(deadline=None)
@given(st.data())
def test_any_edges_are_legal(data):
    """Skip connections, masks without gradients, stages that nothing connects."""
    name = data.draw(st.sampled_from(NAMES))
    computed = generate(name, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
    pairs = [(a, b) for b in range(computed.stages) for a in range(b)]
    edges = chain(computed.stages) | set(data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else [])
    gradients = {e for e in sorted(edges) if data.draw(st.booleans())}
    schedule = with_transfers(computed, edges, gradients)
    validate(schedule, edges, gradients)
    validate(schedule, edges, gradients, mode="batched")
    validate(post_ahead(schedule, 2), edges, gradients, mode="async")
    assert [[a for a in o if a.kind in COMPUTE] for o in schedule.orders] == [list(o) for o in computed.orders]


def test_send_stands_right_after_its_producer():
    schedule = with_transfers(generate("interleaved", 4, 8))
    for line in schedule.orders:
        last = line[0]
        for action in line:
            if action.kind in SENDS:
                assert (last.stage, last.kind[0], last.micro) == (action.stage, action.kind[-1], action.micro)
            last = action if action.kind in COMPUTE else last


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_wrong_action_is_named(data):
    """One action dropped, doubled, on another rank, or with one of its fields changed: refused, and named."""
    schedule = with_transfers(generate(data.draw(st.sampled_from(NAMES)), 3, data.draw(st.integers(1, 4))))
    rank = data.draw(st.integers(0, 2))
    line = list(schedule.orders[rank])
    place = data.draw(st.integers(0, len(line) - 1))
    right = line.pop(place)
    others = {
        "stage": st.integers(0, schedule.stages),
        "kind": st.sampled_from(sorted(TRANSFERS if right.kind in TRANSFERS else COMPUTE)),
        "micro": st.integers(0, schedule.micro_batches),
        "other": st.integers(0, schedule.stages) if right.kind in TRANSFERS else st.just(0),
    }
    orders = [*schedule.orders]
    what = data.draw(st.sampled_from(["dropped", "doubled", "moved", *others]))
    wrong = right
    if what in others:
        wrong = right._replace(**{what: data.draw(others[what].filter(lambda value: value != getattr(right, what)))})
    if what == "moved":
        to = (rank + 1) % 3
        orders[to] = (right, *orders[to])
    else:
        line[place:place] = {"dropped": [], "doubled": [right, right]}.get(what, [wrong])
    orders[rank] = tuple(line)
    with pytest.raises(ScheduleError) as error:
        validate(replace(schedule, orders=tuple(orders)))
    assert str(right) in str(error.value) or str(wrong) in str(error.value)


def test_a_backward_call_in_a_schedule_without_any_is_named():
    """What it makes missing in all other stages does not push it out of the error."""
    schedule = with_transfers(generate("forward-only", 3, 4))
    line = tuple(Action(2, "B", 1) if a == Action(2, "F", 1) else a for a in schedule.orders[2])
    with pytest.raises(ScheduleError, match="rank 2, 2F1: missing"):
        validate(replace(schedule, orders=(*schedule.orders[:2], line)))


def test_receives_are_posted_ahead():
    """In the steady state both ranks come to receive before they send: what blocks would never end."""
    schedule = post_ahead(with_transfers(generate("1f1b", 2, 3)))
    assert order(schedule, 0) == (
        "0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0BW0 0RECV_B1<1 0F2 0SEND_F2>1 0RECV_B2<1 0BW1 0BW2"
    )
    assert order(schedule, 1) == (
        "1RECV_F0<0 1RECV_F1<0 1F0 1BW0 1SEND_B0>0 1F1 1RECV_F2<0 1BW1 1SEND_B1>0 1F2 1BW2 1SEND_B2>0"
    )
    validate(schedule, mode="async")
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(schedule)
    with pytest.raises(ScheduleError, match="at least 1 computation ahead; got 0"):
        post_ahead(schedule, 0)


@pytest.mark.parametrize("mode", ["blocking", "batched", "async"])
def test_computations_that_wait_for_each_other(mode):
    """Rank 0 wants the first gradient before it computes the second micro-batch, rank 1 the other way round."""
    text = """
        0: 0F0 0SEND_F0>1 0RECV_B0<1 0BW0 0F1 0SEND_F1>1 0RECV_B1<1 0BW1
        1: 1RECV_F0<0 1F0 1RECV_F1<0 1F1 1BW0 1SEND_B0>0 1BW1 1SEND_B1>0
    """
    with pytest.raises(ScheduleError) as error:
        validate(from_text(text), mode=mode)
    at = ("0BW0", "1F1") if mode == "async" else ("0RECV_B0<1", "1RECV_F1<0")
    cycle = f"rank 0 at {at[0]} waits for 1SEND_B0>0 of rank 1; rank 1 at {at[1]} waits for 0SEND_F1>1 of rank 0"
    assert cycle in str(error.value)


def test_gradient_where_nothing_trains():
    with pytest.raises(ScheduleError, match="rank 1, 1SEND_B0>0: there is no backward"):
        validate(from_text("0: 0F0 0SEND_F0>1 0RECV_B0<1\n1: 1RECV_F0<0 1F0 1SEND_B0>0"))


@pytest.mark.parametrize("name", NAMES)
def test_reductions(name):
    schedule = with_reductions(with_transfers(generate(name, 3, 4)))
    validate(schedule)
    reduced = [a.stage for line in schedule.orders for a in line if a.kind == "REDUCE"]
    assert sorted(reduced) == (list(range(schedule.stages)) if schedule.trains else [])
    assert order(with_reductions(generate("zb-h1", 2, 2), stages=[1]), 1) == "1F0 1B0 1F1 1B1 1W0 1W1 1REDUCE"


@pytest.mark.parametrize(
    ("edges", "gradients", "message"),
    [
        ([(1, 0)], None, "edges go from a stage to a later one, of 2 stages; got 1>0"),
        ([(0, 2)], None, "got 0>2"),
        ([(0, 1)], [(0, 2)], "there is no edge 0>2"),
    ],
)
def test_edge_errors(edges, gradients, message):
    with pytest.raises(ScheduleError, match=message):
        with_transfers(generate("gpipe", 2, 2), edges, gradients)


def test_computations_in_a_circle():
    circle = "0: 0F0 0BW0 0F1 0BW1\n1: 1F0 1F1 1BW0 1BW1"
    with pytest.raises(ScheduleError) as error:
        with_transfers(from_text(circle))
    assert "rank 0 at 0BW0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0" in str(error.value)
    with pytest.raises(ScheduleError, match="rank 1 at 1F1 waits for 0F1 which stands nowhere"):
        with_transfers(from_text("0: 0F0\n1: 1F0 1F1"))
    with pytest.raises(ScheduleError, match="rank 1, 2F0: there is no stage 2; the stages are 0 to 1"):
        with_transfers(from_text("schedule placement=0,1\n0: 0F0\n1: 1F0 2F0"))
    with pytest.raises(ScheduleError, match="has transfers already"):
        with_transfers(with_transfers(generate("gpipe", 2, 2)))
