"""Tenants share the engine: who floods it waits for himself, not the others for him."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tinkex.server import Settings
from tinkex.server.scheduler.plan import Queue, plan
from tinkex.server.scheduler.samples import Shares
from tinkex.server.store.records import Operation
from tinkex.testing import FakeClock, FakeEngine, FakeServer

from .conftest import Api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tinkex.engine.protocol import OnToken, SampleOp, SampleResult, TrainOp

pytestmark = pytest.mark.anyio

SLOTS = 4


class SlowEngine(FakeEngine):
    """A second for each training operation, and for each sample, of which four run at once."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self._slow = clock
        self._slots = anyio.Semaphore(SLOTS)

    async def train(self, batch: Sequence[TrainOp]) -> Any:
        await self._slow.sleep(len(batch))
        return await super().train(batch)

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        async with self._slots:  # first come, first served, as in a real engine
            await self._slow.sleep(1.0)
            return await super().sample(op, on_token)


@asynccontextmanager
async def slow_server(**settings: Any) -> AsyncIterator[Api]:
    clock = FakeClock()
    server = FakeServer(clock=clock, engine=SlowEngine(clock), settings=Settings(**settings))
    async with clock.running(), server:
        yield Api(server, clock)


async def finished(api: Api) -> Counter[str]:
    """How many training operations of each tenant have ended."""
    counts: Counter[str] = Counter()
    for session in await api.server.store.sessions():
        for op in await api.server.store.operations(session.session_id):
            counts[op.owner] += op.kind == "forward_backward" and op.state == "done"
    return counts


async def test_one_loop_goes_on_beside_a_flood_of_training() -> None:
    async with slow_server(max_batch_ops=8) as flood:
        session = await flood.session()
        for number in range(4):
            model = await flood.model(session, number)
            for seq in range(1, 101):
                await flood.train(model, seq)
        other = flood.other()
        mine = await other.model()
        began = flood.clock.now()
        for turn in range(5):
            await other.output(await other.train(mine, 2 * turn + 1))
            await other.result(await other.step(mine, 2 * turn + 2))
        # A pass and a step wait for the batch that runs (8 s), and share the next one at most.
        assert flood.clock.now() - began <= 5 * (8 + 8 + 8)
        counts = await finished(flood)
        assert counts[other.owner] == 5
        assert counts[flood.owner] < 400 / 2  # most of the flood is still to come


async def test_tenants_get_the_same_however_many_models_they_have() -> None:
    async with slow_server(max_batch_ops=8) as many:
        session = await many.session()
        models = [await many.model(session, number) for number in range(8)]
        other = many.other()
        mine = await other.model()
        for seq in range(1, 81):
            await other.train(mine, seq)
            for model in models:
                await many.train(model, seq)
        await many.clock.sleep(100)
        counts = await finished(many)
        assert sum(counts.values()) >= 90
        assert abs(counts[other.owner] - counts[many.owner]) <= 8


async def test_one_sampler_goes_on_beside_a_flood_of_samples() -> None:
    async with slow_server(max_sequences_running=2 * SLOTS) as flood:
        sampler = await flood.sampler(await flood.session())
        futures = [await flood.sample(sampler, seq) for seq in range(400)]
        other = flood.other()
        mine = await other.sampler(await other.session())
        began = flood.clock.now()
        for seq in range(10):
            await other.sampled(await other.sample(mine, seq))
        # At most eight are before it in the engine, of which four run at once, a second each.
        assert flood.clock.now() - began <= 10 * 4
        await flood.result(futures[-1])
        # Nothing was lost by it: 410 samples on four slots.
        assert flood.clock.now() - began <= 410 / SLOTS + 1


# -- the decisions alone ---------------------------------------------------------------------------


def lane(model: str, owner: str, kinds: str, arrived_at: float = 0.0) -> Queue:
    """A lane whose operations are named by a letter each: t(rain), o(ptim)."""
    names: dict[str, Any] = {"t": "forward_backward", "o": "optim_step"}
    made = Queue(model)
    for seq, letter in enumerate(kinds):
        made.waiting[seq] = Operation(
            op_id=f"{model}:{seq}",
            kind=names[letter],
            owner=owner,
            session_id="s",
            created_at=arrived_at,
            seq_id=seq,
            model_id=model,
        )
    return made


def batch(lanes: Sequence[Queue], most: int, **turns: int) -> dict[str, int]:
    decided = plan(
        lanes, 10.0, device_busy=False, gap_timeout_s=60.0, max_batch_ops=most, turns=turns
    )
    (only,) = decided.batches
    return {model: len(run) for model, run in only.runs}


def test_places_are_dealt_out_to_owners_and_then_to_their_models() -> None:
    lanes = [lane("a1", "a", "t" * 50), lane("a2", "a", "t" * 50), lane("b1", "b", "t" * 50, 5.0)]
    assert batch(lanes, 8) == {"a1": 2, "a2": 2, "b1": 4}
    assert batch(lanes, 1) == {"a1": 1}


def test_what_one_owner_does_not_need_the_others_get() -> None:
    lanes = [lane("a1", "a", "t" * 50), lane("b1", "b", "t")]
    assert batch(lanes, 8) == {"a1": 7, "b1": 1}


def test_the_owner_whose_turn_is_longest_ago_decides_what_kind_of_work_it_is() -> None:
    lanes = [lane("a1", "a", "t" * 50), lane("b1", "b", "o", 5.0)]
    assert batch(lanes, 8, a=1) == {"b1": 1}
    assert batch(lanes, 8, a=1, b=2) == {"a1": 8}
    assert batch(lanes, 1, a=2, b=2) == {"a1": 1}


def sample(owner: str, number: int, size: int = 1) -> Operation:
    return Operation(
        op_id=f"{owner}:{number}",
        kind="sample",
        owner=owner,
        session_id="s",
        created_at=0.0,
        sequence_ids=tuple(map(str, range(size))),
    )


def taken(shares: Shares) -> list[str]:
    return [op.op_id for op in shares.take()]


def test_samples_start_in_order_until_the_engine_has_enough() -> None:
    shares = Shares(3)
    for number in range(5):
        shares.put(sample("a", number))
    assert taken(shares) == ["a:0", "a:1", "a:2"]
    assert taken(shares) == []
    assert len(shares) == 2
    shares.done("a:1")
    shares.done("a:1")
    assert taken(shares) == ["a:3"]


def test_a_newcomer_gets_a_share_although_the_house_is_full() -> None:
    shares = Shares(4)
    for number in range(10):
        shares.put(sample("a", number))
    assert len(taken(shares)) == 4
    for number in range(10):
        shares.put(sample("b", number))
    assert taken(shares) == ["b:0", "b:1"]
    assert taken(shares) == []


def test_tenants_alternate_when_places_become_free() -> None:
    shares = Shares(2)
    for number in range(4):
        shares.put(sample("a", number))
        shares.put(sample("b", number))
    order = taken(shares)
    for index in range(6):
        shares.done(order[index])
        order += taken(shares)
    assert Counter(name[0] for name in order[:4]) == {"a": 2, "b": 2}
    assert [name for name in order if name[0] == "a"] == [f"a:{n}" for n in range(4)]


def test_a_request_for_many_sequences_takes_their_room() -> None:
    shares = Shares(8)
    for number in range(3):
        shares.put(sample("a", number, size=8))
    assert taken(shares) == ["a:0"]


def test_withdrawn_samples_do_not_start() -> None:
    shares = Shares(1)
    shares.put(sample("a", 0))
    shares.put(sample("a", 1))
    shares.withdraw(sample("a", 0))
    shares.withdraw(sample("b", 7))
    assert taken(shares) == ["a:1"]
    shares.put(sample("a", 2))
    assert shares.clear() == ["a:2"]
    assert taken(shares) == []
