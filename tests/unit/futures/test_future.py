"""APIFuture and its writing side."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import weakref

import pytest

from tinkex.errors import ClosedError, InputError
from tinkex.futures.future import APIFuture, AwaitableConcurrentFuture, Promise


@pytest.mark.req("B10")
def test_a_future_is_a_standard_future_with_status_cancel_and_callbacks():
    promise: Promise[int] = Promise(now=lambda: 5.0)
    seen: list[APIFuture[int]] = []
    promise.future.add_done_callback(seen.append)
    assert isinstance(promise.future, concurrent.futures.Future)
    assert (promise.future.done(), promise.future.status().state) == (False, "queued")
    promise.finish(3)
    assert promise.future.result() == 3
    assert promise.future.exception() is None
    assert promise.future.status().state == "done"
    assert seen == [promise.future]
    assert AwaitableConcurrentFuture is APIFuture
    assert promise.future.future() is promise.future


def test_status_says_where_it_stands_and_since_when():
    times = iter([1.0, 7.0, 9.0])
    promise: Promise[int] = Promise(now=lambda: next(times))
    promise.operation.ahead = lambda: 2
    assert (promise.future.status().since, promise.future.status().position) == (1.0, 2)
    promise.note(state="running", request_id="r1")
    status = promise.future.status()
    assert (status.state, status.since, status.request_id) == ("running", 7.0, "r1")
    assert status.position is None
    promise.fail(InputError("bad"))
    assert promise.future.status().state == "failed"


def test_the_first_end_wins():
    promise: Promise[int] = Promise()
    assert promise.future.cancel()
    promise.finish(1)
    promise.fail(InputError("late"))
    assert promise.future.cancelled()
    assert promise.future.status().state == "cancelled"


async def _await(future: APIFuture[int]) -> int:
    return await future


def test_it_can_be_awaited_before_and_after_it_ends():
    promise: Promise[int] = Promise()
    threading.Timer(0.0, promise.finish, [4]).start()
    assert asyncio.run(_await(promise.future)) == 4
    assert asyncio.run(_await(promise.future)) == 4


def test_an_async_timeout_cancels_and_a_blocking_one_does_not():
    promise: Promise[int] = Promise()
    with pytest.raises(TimeoutError):
        promise.future.result(timeout=0)
    assert not promise.future.done()

    async def wait() -> None:
        await promise.future.result_async(timeout=0)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    assert promise.future.cancelled()


@pytest.mark.req("S21")
def test_parts_come_in_the_order_of_the_data_and_before_the_whole_is_done():
    promise: Promise[str] = Promise(parts=3)

    async def consume() -> list[str]:
        seen: list[str] = []
        promise.finish_part(1, "b")
        promise.finish_part(0, "a")
        async for part in promise.future:
            seen.append(part)
            if len(seen) == 2:
                assert not promise.future.done()
                promise.finish_part(2, "c")
        return seen

    assert asyncio.run(consume()) == ["a", "b", "c"]


def test_a_failure_reaches_whoever_consumes_parts():
    promise: Promise[str] = Promise(parts=2)

    async def consume() -> list[str]:
        seen: list[str] = []
        promise.finish_part(0, "a")
        async for part in promise.future:
            seen.append(part)
            promise.fail(InputError("broken"))
        return seen

    with pytest.raises(InputError, match="broken"):
        asyncio.run(consume())


def test_the_only_part_of_an_unchunked_call_is_its_result():
    promise: Promise[str] = Promise()
    promise.finish("x")

    async def consume() -> list[str]:
        return [part async for part in promise.future]

    assert asyncio.run(consume()) == ["x"]


def test_then_computes_once_and_passes_errors_and_cancellation_on():
    calls: list[int] = []
    promise: Promise[int] = Promise()
    derived = promise.future.then(lambda value: calls.append(value) or value + 1)
    promise.finish(1)
    assert (derived.result(), derived.result(), calls) == (2, 2, [1])

    failing: Promise[int] = Promise()
    derived = failing.future.then(lambda value: value)
    failing.fail(InputError("no"))
    with pytest.raises(InputError):
        derived.result(0)

    abandoned: Promise[int] = Promise()
    assert abandoned.future.then(lambda value: value).cancel()
    assert abandoned.future.cancelled()

    raising: Promise[int] = Promise()
    derived = raising.future.then(lambda value: value // 0)
    raising.finish(1)
    with pytest.raises(ZeroDivisionError):
        derived.result(0)


def test_waiting_on_the_loop_thread_is_refused_instead_of_hanging():
    promise: Promise[int] = Promise()
    promise.operation.loop_thread = threading.get_ident()
    with pytest.raises(ClosedError, match="own loop thread"):
        promise.future.result()
    promise.finish(1)
    assert promise.future.result() == 1


def test_an_ended_future_leaves_no_cycle_behind():
    async def use() -> weakref.ref[APIFuture[int]]:
        promise: Promise[int] = Promise()
        waiting = asyncio.ensure_future(_await(promise.future))
        await asyncio.sleep(0)
        promise.finish(1)
        assert await waiting == 1
        return weakref.ref(promise.future)

    gc.disable()
    try:
        assert asyncio.run(use())() is None
    finally:
        gc.enable()
