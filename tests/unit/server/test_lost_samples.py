"""Which samples a restart announces as lost: all of them, for one record per block of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from tinkex.server.scheduler.lost_samples import BLOCK, LostSamples
from tinkex.server.store.memory import MemoryStore
from tinkex.server.store.records import Operation, StoredSampler
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from tinkex.server.store.protocol import Store

pytestmark = pytest.mark.anyio

SAMPLER = StoredSampler(
    sampler_id="s", owner="o", session_id="x", base_model="tinkex/tiny", created_at=0.0
)


class CountingStore(MemoryStore):
    """Takes its time, and may fail once."""

    asked = 0
    fails = False

    async def recall(self, owner: str, key: str) -> str | None:
        self.asked += 1
        await anyio.lowlevel.checkpoint()
        if self.fails:
            self.fails = False
            raise OSError("once")
        return await super().recall(owner, key)


def sample(seq: int) -> Operation:
    return Operation(
        op_id=f"s:{seq}",
        kind="sample",
        owner="o",
        session_id="x",
        created_at=0.0,
        seq_id=seq,
        sampler_id="s",
    )


async def begin(lost: LostSamples, seq: int) -> None:
    await lost.begin(sample(seq))
    lost.began(sample(seq))


async def announced(store: Store) -> list[str]:
    """What the next server tells a client that asks again."""
    return await LostSamples(store, FakeClock()).since(0, SAMPLER, 0)


async def test_samples_that_begin_a_block_together_ask_the_store_once() -> None:
    store = CountingStore()
    lost = LostSamples(store, FakeClock())
    async with anyio.create_task_group() as group:
        for seq in range(BLOCK):
            group.start_soon(begin, lost, seq)
    assert store.asked == 1
    assert {f"s:{seq}" for seq in range(BLOCK)} <= set(await announced(store))


async def test_a_sample_that_was_overtaken_is_announced_too() -> None:
    store = MemoryStore()
    lost = LostSamples(store, FakeClock())
    for seq in (5, 3, 0):
        await begin(lost, seq)
    assert {"s:0", "s:3", "s:5"} <= set(await announced(store))


async def test_a_block_whose_first_sample_fails_is_begun_by_the_next() -> None:
    store = CountingStore()
    store.fails = True
    lost = LostSamples(store, FakeClock())
    failed: list[int] = []

    async def attempt(seq: int) -> None:
        try:
            await begin(lost, seq)
        except OSError:
            failed.append(seq)

    async with anyio.create_task_group() as group:
        for seq in range(3):
            group.start_soon(attempt, seq)
    assert len(failed) == 1
    assert store.asked == 2
    assert set(await announced(store)) >= {f"s:{seq}" for seq in range(3) if seq not in failed}


async def test_asking_leaves_nothing_behind() -> None:
    lost = LostSamples(MemoryStore(), FakeClock())
    for clone in range(3):
        assert await lost.since(0, SAMPLER, clone) == []
    assert len(lost) == 0
