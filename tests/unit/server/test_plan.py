"""The plan: which operations run next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.scheduler.plan import Queue, SchedulePlan, plan, work_of
from tinkex.server.store.records import Operation


def waiting(model: str, seq: int, kind: str, owner: str, arrived: float) -> Operation:
    return Operation(
        op_id=f"{model}:{seq}",
        kind=kind,  # type: ignore[arg-type]
        owner=owner,
        session_id="s",
        created_at=arrived,
        seq_id=seq,
        model_id=model,
    )


def lane(model: str, *ops: tuple[int, str], next_seq: int = 1, arrived: float = 0.0) -> Queue:
    made = Queue(model, next_seq=next_seq, last_arrival=arrived)
    for seq, kind in ops:
        made.waiting[seq] = waiting(model, seq, kind, f"owner-{model[0]}", arrived)
    return made


def decide(*lanes: Queue, now: float = 0.0, busy: bool = False, most: int = 64) -> SchedulePlan:
    return plan(lanes, now, device_busy=busy, gap_timeout_s=60, max_batch_ops=most)


def batches(decided: SchedulePlan) -> list[list[str]]:
    return [[op.op_id for op in batch.operations] for batch in decided.batches]


def test_the_next_seq_id_runs_and_its_followers_of_the_same_work_join_it() -> None:
    queue = lane("a", (1, "forward_backward"), (2, "forward"), (3, "optim_step"), (4, "forward"))
    assert batches(decide(queue)) == [["a:1", "a:2"]]


def test_an_operation_that_came_too_early_is_held_until_its_predecessor_arrives() -> None:
    queue = lane("a", (2, "forward_backward"), (3, "forward_backward"), arrived=10)
    held = decide(queue, now=20)
    assert batches(held) == []
    assert held.wake_at == 70
    queue.waiting[1] = waiting("a", 1, "forward_backward", "o", 21)
    assert batches(decide(queue, now=21)) == [["a:1", "a:2", "a:3"]]


def test_after_the_gap_timeout_the_held_operations_go_ahead() -> None:
    queue = lane("a", (2, "forward_backward"), (5, "optim_step"), arrived=10)
    assert batches(decide(queue, now=70)) == [["a:2"]]
    queue.waiting.pop(2)
    queue.next_seq = 3
    assert batches(decide(queue, now=70)) == [["a:5"]]


def test_a_turn_that_was_given_back_is_not_waited_for() -> None:
    queue = lane("a", (3, "optim_step"))
    queue.void = {1, 2}
    assert batches(decide(queue)) == [["a:3"]]


def test_models_share_a_batch_and_a_busy_lane_waits() -> None:
    a, b, c = (lane(name, (1, "forward_backward")) for name in "abc")
    c.busy = True
    assert batches(decide(a, b, c)) == [["a:1", "b:1"]]


def test_the_oldest_operation_decides_which_work_the_device_does() -> None:
    young = lane("a", (1, "forward_backward"), arrived=5)
    old = lane("b", (1, "optim_step"), arrived=1)
    assert batches(decide(young, old)) == [["b:1"]]


def test_control_operations_start_while_the_device_is_busy() -> None:
    control = lane("a", (1, "save_weights"))
    device = lane("b", (1, "forward"))
    assert batches(decide(control, device, busy=True)) == [["a:1"]]


def test_owners_take_turns_when_a_batch_is_full() -> None:
    crowd = [lane(f"a{i}", (1, "forward_backward"), arrived=i / 10) for i in range(5)]
    other = lane("b0", (1, "forward_backward"), arrived=9)
    chosen = batches(decide(*crowd, other, now=9, most=3))
    assert chosen == [["a0:1", "b0:1", "a1:1"]]


def test_a_long_run_is_cut_at_the_batch_limit() -> None:
    queue = lane("a", *((seq, "forward_backward") for seq in range(1, 10)))
    assert batches(decide(queue, most=4)) == [["a:1", "a:2", "a:3", "a:4"]]


KINDS = ["forward", "forward_backward", "optim_step", "save_weights"]


@given(
    arrivals=st.permutations(range(1, 9)),
    kinds=st.lists(st.sampled_from(KINDS), min_size=8, max_size=8),
    missing=st.sets(st.integers(1, 8), max_size=3),
    most=st.integers(1, 4),
)
def test_whatever_the_order_of_arrival_each_runs_once_and_in_turn(
    arrivals: list[int], kinds: list[str], missing: set[int], most: int
) -> None:
    queue, ran, now = Queue("a", next_seq=1), list[int](), 0.0

    def run_all() -> None:
        while batches := decide(queue, now=now, most=most).batches:
            (batch,) = batches
            ((_, run),) = batch.runs
            assert len({work_of(op) for op in run}) == 1
            assert len(run) <= most
            for op in run:
                del queue.waiting[op.seq_id]
                ran.append(op.seq_id)
            queue.next_seq = ran[-1] + 1

    for seq in arrivals:
        if seq in missing:
            continue
        now += 1
        queue.last_arrival = now
        queue.waiting[seq] = waiting("a", seq, kinds[seq - 1], "o", now)
        run_all()
    first_gap = min(missing, default=9)
    assert ran == list(range(1, first_gap))
    now += 60
    run_all()
    assert ran == [seq for seq in range(1, 9) if seq not in missing]


def test_a_suspect_shares_no_batch_and_the_others_wait_for_the_next_one() -> None:
    bad = lane("a", (1, "forward_backward"), (2, "forward_backward"), arrived=5)
    good = lane("b", (1, "forward_backward"), arrived=1)
    settings = {"device_busy": False, "gap_timeout_s": 60.0, "max_batch_ops": 64}
    decided = plan([bad, good], 9.0, suspects={"a:1"}, **settings)
    assert batches(decided) == [["a:1"]]
    decided = plan([bad, good], 9.0, suspects={"a:2"}, **settings)
    assert batches(decided) == [["b:1", "a:1"]]


def test_a_lane_that_rests_is_left_alone_until_its_time() -> None:
    queue = lane("a", (1, "optim_step"))
    queue.not_before = 30.0
    held = decide(queue, now=20)
    assert (batches(held), held.wake_at) == ([], 30.0)
    assert batches(decide(queue, now=30)) == [["a:1"]]
