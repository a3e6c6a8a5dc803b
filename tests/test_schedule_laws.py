"""What `validate` refuses: schedules corrupted in every way we could think of, and random ones against a naive run."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.errors import ScheduleError
from meshwright.partitioner.schedules.action import COMPUTE, RECEIVES, SENDS, Action
from meshwright.partitioner.schedules.generate import generate, in_flight_bound
from meshwright.partitioner.schedules.schedule import Schedule, flow, from_text
from meshwright.partitioner.schedules.send_recv import needs, with_transfers
from meshwright.partitioner.schedules.validate import validate

BASES = [("gpipe", 3, 3), ("1f1b", 3, 4), ("interleaved", 2, 4), ("zb-h1", 3, 5), ("zb-v", 2, 5), ("dualpipe-v", 3, 6)]
Corrupted = tuple[Schedule, list[str]]
"""A schedule, and the words that the error must hold."""


def edited(schedule: Schedule, rank: int, order: list[Action]) -> Schedule:
    orders = list(schedule.orders)
    orders[rank] = tuple(order)
    return replace(schedule, orders=tuple(orders))


def first(schedule: Schedule, rank: int, kinds: frozenset[str] | set[str], after: int = 0) -> int:
    order = schedule.orders[rank]
    return next(i for i in range(after, len(order)) if order[i].kind in kinds)


def without(schedule: Schedule, rank: int, place: int) -> Schedule:
    order = list(schedule.orders[rank])
    del order[place]
    return edited(schedule, rank, order)


def instead(schedule: Schedule, rank: int, place: int, action: Action) -> Schedule:
    order = list(schedule.orders[rank])
    order[place] = action
    return edited(schedule, rank, order)


def moved(schedule: Schedule, rank: int, place: int, to: int) -> Schedule:
    order = list(schedule.orders[rank])
    order.insert(to, order.pop(place))
    return edited(schedule, rank, order)


def dropped_computation(s: Schedule) -> Corrupted:
    place = first(s, 1, {"F"}, after=3)
    return without(s, 1, place), ["rank 1", str(s.orders[1][place]), "missing"]


def dropped_backward(s: Schedule) -> Corrupted:
    place = first(s, 1, {"BW", "W"})
    stage, _, micro, _ = s.orders[1][place]
    return without(s, 1, place), [f"rank 1, {stage}W{micro}: missing"]


def dropped_send(s: Schedule) -> Corrupted:
    place = first(s, 0, SENDS)
    send = s.orders[0][place]
    return without(s, 0, place), [f"rank 0, {send}: missing; its partner {send.partner} stands on rank 1"]


def dropped_receive(s: Schedule) -> Corrupted:
    place = first(s, 1, RECEIVES)
    receive = s.orders[1][place]
    return without(s, 1, place), [f"rank 1, {receive}: missing; its partner {receive.partner} stands on rank 0"]


def dropped_rank(s: Schedule) -> Corrupted:
    return edited(s, 0, []), ["rank 0, 0F0: missing", "0SEND_F0>1: missing; its partner 1RECV_F0<0 stands on rank 1"]


def dropped_micro_batch(s: Schedule) -> Corrupted:
    orders = tuple(tuple(a for a in order if a.micro != s.micro_batches - 1) for order in s.orders)
    return replace(s, orders=orders), [f"rank 1, 1F{s.micro_batches - 1}: missing"]


def doubled_computation(s: Schedule) -> Corrupted:
    place = first(s, 1, {"B", "BW"})
    action = s.orders[1][place]
    return edited(s, 1, [*s.orders[1], action]), [f"rank 1, {action}: stands 2 times"]


def doubled_send(s: Schedule) -> Corrupted:
    send = s.orders[0][first(s, 0, SENDS)]
    return edited(s, 0, [*s.orders[0], send]), [f"rank 0, {send}: stands 2 times"]


def backward_beside_both(s: Schedule) -> Corrupted:
    stage, _, micro, _ = s.orders[0][first(s, 0, {"B", "BW"})]
    more = [Action(stage, "BW", micro), Action(stage, "W", micro), Action(stage, "B", micro)]
    order = list(dict.fromkeys([*s.orders[0], *more]))
    return edited(s, 0, order), [f"rank 0, {stage}W{micro}: stands beside {stage}BW{micro}"]


def backward_first(s: Schedule) -> Corrupted:
    place = first(s, 0, {"B", "BW"})
    stage, kind, micro, _ = s.orders[0][place]
    return moved(s, 0, place, 0), [f"rank 0, {stage}{kind}{micro}: stands before {stage}F{micro}, which it needs"]


def used_before_received(s: Schedule) -> Corrupted:
    place = first(s, 1, RECEIVES)
    receive = s.orders[1][place]
    use = Action(receive.stage, "F", receive.micro)
    return moved(s, 1, place, s.orders[1].index(use)), [f"rank 1, {use}: stands before {receive}"]


def sent_before_computed(s: Schedule) -> Corrupted:
    place = first(s, 0, SENDS)
    send = s.orders[0][place]
    return moved(s, 0, place, 0), [f"rank 0, {send}: stands before {send.stage}F{send.micro}"]


def gradient_sent_before_computed(s: Schedule) -> Corrupted:
    place = first(s, 1, {"SEND_B"})
    stage, _, micro, _ = s.orders[1][place]
    return moved(s, 1, place, 0), [f"rank 1, {s.orders[1][place]}: stands before {stage}B", f"{micro}, which it needs"]


def on_another_rank(s: Schedule) -> Corrupted:
    place = first(s, 0, {"F"})
    action = s.orders[0][place]
    wrong = edited(without(s, 0, place), 1, [action, *s.orders[1]])
    return wrong, [f"rank 1, {action}: stage {action.stage} lies on rank 0"]


def of_no_stage(s: Schedule) -> Corrupted:
    place = first(s, 1, {"F"})
    action = s.orders[1][place]._replace(stage=s.stages)
    return instead(s, 1, place, action), [f"rank 1, {action}: there is no stage {s.stages}"]


def of_no_micro_batch(s: Schedule) -> Corrupted:
    place = first(s, 1, {"BW", "B"})
    action = s.orders[1][place]._replace(micro=s.micro_batches)
    return instead(s, 1, place, action), [f"rank 1, {action}: there is no micro-batch {s.micro_batches}"]


def without_micro_batch(s: Schedule) -> Corrupted:
    place = first(s, 1, {"F"})
    action = s.orders[1][place]._replace(micro=None)
    return instead(s, 1, place, action), [f"rank 1, {action}: F has a micro-batch"]


def of_another_micro_batch(s: Schedule) -> Corrupted:
    place = first(s, 1, {"F"})
    action = s.orders[1][place]
    other = action._replace(micro=1)
    return instead(s, 1, place, other), [f"rank 1, {other}: stands 2 times", f"rank 1, {action}: missing"]


def to_another_stage(s: Schedule) -> Corrupted:
    place = first(s, 0, SENDS)
    send = s.orders[0][place]._replace(other=s.stages - 1 if s.stages > 2 else 0)
    return instead(s, 0, place, send), [f"rank 0, {send}: no value goes from stage 0 to {send.other}"]


def gradient_from_another_stage(s: Schedule) -> Corrupted:
    place = first(s, 0, {"RECV_B"})
    receive = s.orders[0][place]._replace(other=0)
    words = f"rank 0, {receive}: no gradient goes from stage 0 to {receive.stage}"
    return instead(s, 0, place, receive), [words]


def the_other_way(s: Schedule) -> Corrupted:
    place = first(s, 0, SENDS)
    send = s.orders[0][place]
    back = send._replace(kind="SEND_B")
    return instead(s, 0, place, back), [f"rank 0, {back}: no gradient goes from stage {back.stage} to {back.other}"]


def crossed_sends(s: Schedule) -> Corrupted:
    """Two computations and their sends change places on the sender alone."""
    a, b = Action(0, "F", 0), Action(0, "F", 1)
    swap = {a: b, b: a, Action(0, "SEND_F", 0, 1): Action(0, "SEND_F", 1, 1)}
    swap |= {v: k for k, v in swap.items()}
    return edited(s, 0, [swap.get(x, x) for x in s.orders[0]]), [
        "rank 0 sends 0SEND_F1>1 as number 1 to rank 1",
        "1RECV_F0<0",
    ]


def crossed_receives(s: Schedule) -> Corrupted:
    order = list(s.orders[1])
    one, two = order.index(Action(1, "RECV_F", 0, 0)), order.index(Action(1, "RECV_F", 1, 0))
    order.insert(one, order.pop(two))
    return edited(s, 1, order), ["rank 0 sends 0SEND_F0>1 as number 1 to rank 1, where 1RECV_F1<0 is number 1"]


def receive_before_send(s: Schedule) -> Corrupted:
    """Rank 0 first asks for what follows from its own work."""
    place = first(s, 0, RECEIVES)
    wrong = moved(s, 0, place, 0)
    return wrong, ["deadlock", f"rank 0 at {s.orders[0][place]} waits for", "of rank 0"]


def weight_first(s: Schedule) -> Corrupted:
    place = first(s, 1, {"B", "BW"})
    stage, kind, micro, _ = s.orders[1][place]
    order = [a for a in s.orders[1] if a != Action(stage, "W", micro)]
    place = order.index(Action(stage, kind, micro))
    order[place : place + 1] = [Action(stage, "W", micro), Action(stage, "B", micro)]
    return edited(s, 1, order), [f"rank 1, {stage}W{micro}: stands before {stage}B{micro}, which it needs"]


def reduced_early(s: Schedule) -> Corrupted:
    order = list(s.orders[1])
    order.insert(first(s, 1, {"W", "BW"}), Action(1, "REDUCE"))
    return edited(s, 1, order), ["rank 1, 1REDUCE: stands before 1", "whose gradient it sums"]


def read_while_offloaded(s: Schedule) -> Corrupted:
    order = list(s.orders[1])
    order.insert(order.index(Action(1, "F", 0)) + 1, Action(1, "OFFLOAD", 0))
    return edited(s, 1, order), ["what it reads is offloaded; 1RELOAD0 must stand before"]


def reloaded_without_offload(s: Schedule) -> Corrupted:
    order = [*s.orders[1], Action(1, "RELOAD", 0)]
    return edited(s, 1, order), ["rank 1, 1RELOAD0: stands before 1OFFLOAD0, or without it"]


def used_before_gathered(s: Schedule) -> Corrupted:
    order = list(s.orders[1])
    order.insert(order.index(Action(1, "F", 0)) + 1, Action(1, "UNSHARD"))
    return edited(s, 1, order), ["rank 1, 1F0: 1UNSHARD must stand before"]


def gathered_twice(s: Schedule) -> Corrupted:
    order = [Action(1, "UNSHARD"), Action(1, "UNSHARD"), *s.orders[1]]
    return edited(s, 1, order), ["rank 1, 1UNSHARD: the weights of stage 1 are gathered"]


def stage_nowhere(s: Schedule) -> Corrupted:
    return replace(s, placement=(*s.placement[:-1], s.ranks)), [f"stage {s.stages - 1} lies on rank {s.ranks}"]


CORRUPTIONS: list[Callable[[Schedule], Corrupted]] = [
    dropped_computation,
    dropped_backward,
    dropped_send,
    dropped_receive,
    dropped_rank,
    dropped_micro_batch,
    doubled_computation,
    doubled_send,
    backward_beside_both,
    backward_first,
    used_before_received,
    sent_before_computed,
    gradient_sent_before_computed,
    on_another_rank,
    of_no_stage,
    of_no_micro_batch,
    without_micro_batch,
    of_another_micro_batch,
    to_another_stage,
    gradient_from_another_stage,
    the_other_way,
    crossed_sends,
    crossed_receives,
    receive_before_send,
    weight_first,
    reduced_early,
    read_while_offloaded,
    reloaded_without_offload,
    used_before_gathered,
    gathered_twice,
    stage_nowhere,
]


@pytest.mark.parametrize("base", BASES, ids=lambda base: base[0])
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
@pytest.mark.parametrize("mode", ["blocking", "batched", "async"])
def test_corrupted_schedule_is_refused(corrupt, base, mode):
    schedule = with_transfers(generate(*base))
    wrong, words = corrupt(schedule)
    if corrupt is receive_before_send and mode == "async":
        validate(wrong, mode=mode)  # a receive only waits to be filled
        return
    with pytest.raises(ScheduleError) as error:
        validate(wrong, bound=in_flight_bound(*base), mode=mode)
    assert all(word in str(error.value) for word in words), f"{words} not all in:\n{error.value}"


def test_bound_is_held():
    """GPipe holds all micro-batches; nothing else tells it from 1F1B."""
    schedule = with_transfers(generate("gpipe", 3, 4))
    validate(schedule, bound=(4, 4, 4))
    with pytest.raises(ScheduleError) as error:
        validate(schedule, bound=in_flight_bound("1f1b", 3, 4))
    with pytest.raises(ScheduleError, match="has 3 ranks, the bound 2"):
        validate(schedule, bound=(4, 4))
    assert "rank 0, 0F3: makes 4 in flight; the bound is 3" in str(error.value)
    assert "rank 2, 2F1: makes 2 in flight; the bound is 1" in str(error.value)


def test_batches_allow_what_blocking_does_not():
    """1F1B with a send and a receive each after its producer: torch's own order without its combined calls."""
    text = """
        0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0BW0 0RECV_B1<1 0BW1
        1: 1RECV_F0<0 1F0 1BW0 1SEND_B0>0 1RECV_F1<0 1F1 1BW1 1SEND_B1>0
    """
    validate(from_text(text), mode="batched")
    with pytest.raises(ScheduleError) as error:
        validate(from_text(text))
    assert "rank 0 at 0SEND_F1>1 waits for 1RECV_F1<0 of rank 1; rank 1 at 1SEND_B0>0 waits for 0RECV_B0<1" in str(
        error.value
    )


def test_receive_beside_the_send_that_it_follows_from():
    """Fatal unless both start together."""
    text = """
        0: 0F0 0RECV_B0<1 0SEND_F0>1 0BW0
        1: 1RECV_F0<0 1F0 1BW0 1SEND_B0>0
    """
    validate(from_text(text), mode="batched")
    with pytest.raises(ScheduleError, match="rank 0 at 0RECV_B0<1 waits for 1SEND_B0>0 of rank 1; rank 1 at"):
        validate(from_text(text))


def test_side_actions_are_legal():
    text = """
        0: 0UNSHARD 0F0 0OFFLOAD0 0RESHARD 0SEND_F0>1 0RECV_B0<1 0UNSHARD 0RELOAD0 0B0 0W0 0RESHARD 0REDUCE
        1: 1RECV_F0<0 1F0 1BW0 1REDUCE 1SEND_B0>0
    """
    validate(from_text(text))
    with pytest.raises(ScheduleError):  # what comes back must have gone
        validate(from_text(text.replace(" 0OFFLOAD0", "")))


def test_all_faults_of_a_law_at_once():
    schedule = with_transfers(generate("1f1b", 4, 32))
    with pytest.raises(ScheduleError) as error:
        validate(replace(schedule, orders=((), *schedule.orders[1:])))
    assert "... and 140 more" in str(error.value)


def runs(schedule: Schedule) -> bool:
    """A naive run with the plain chain, where a send and its receive happen when both ranks stand at them."""
    ways = flow(schedule.stages)
    place, here = [0] * schedule.ranks, set[tuple[int, object]]()
    going = True
    while going:
        going = False
        for rank, order in enumerate(schedule.orders):
            if place[rank] == len(order):
                continue
            at = order[place[rank]]
            if at.kind in COMPUTE:
                values = [*needs(at, ways), *([("F", at.stage, at.micro)] if at.kind in ("B", "BW") else [])]
                values += [("B", at.stage, at.micro)] if at.kind == "W" else []
                if not all((rank, v) in here for v in values):
                    return False
                here.add((rank, (at.kind[0], at.stage, at.micro)))
            elif at.kind in SENDS:
                other = schedule.placement[at.partner.stage]
                peer = schedule.orders[other][place[other] :]
                value = at.kind[-1], at.stage, at.micro
                if (rank, value) not in here:
                    return False
                if not peer or peer[0] != at.partner:
                    continue
                here.add((other, value))
                place[other] += 1
            else:
                continue  # the sender moves both
            place[rank] += 1
            going = True
    return all(place[rank] == len(order) for rank, order in enumerate(schedule.orders))


def legal(schedule: Schedule, mode) -> bool:
    try:
        validate(schedule, mode=mode)
    except ScheduleError:
        return False
    return True


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_validator_equals_naive_run(data):
    """Random moves of actions: legal exactly where a naive run with blocking transfers ends."""
    name, ranks, micro = data.draw(st.sampled_from(BASES))
    schedule = with_transfers(generate(name, min(ranks, 2) if len(name) > 5 else ranks, min(micro, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        rank = data.draw(st.integers(0, schedule.ranks - 1))
        places = st.integers(0, len(schedule.orders[rank]) - 1)
        place = data.draw(places)
        near = max(0, min(len(schedule.orders[rank]) - 1, place + data.draw(st.integers(-3, 3))))
        schedule = moved(schedule, rank, place, near)
    blocking = legal(schedule, "blocking")
    assert blocking == runs(schedule)
    assert blocking <= legal(schedule, "batched") <= legal(schedule, "async")
