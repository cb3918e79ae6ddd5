"""Portals and operations: every promise ends, whatever happens to the loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tinkex.clients.portal import CurrentLoop, LoopThread, Operations
from tinkex.clients.twins import blocking, submitting
from tinkex.clock import SystemClock
from tinkex.errors import ClosedError, ForkedError


@pytest.fixture
def portal():
    made = LoopThread()
    yield made
    if made.alive():
        Operations(made, SystemClock()).start(lambda promise: _end(made, promise))


async def _end(portal: LoopThread, promise: Any) -> None:
    await portal.end_work(ClosedError("test over"), keep=promise)
    portal.stop()


@pytest.fixture
def operations(portal: LoopThread) -> Operations:
    return Operations(portal, SystemClock())


async def _forever(_: Any) -> None:
    await asyncio.Event().wait()


def test_posts_run_in_the_order_they_were_made(portal: LoopThread):
    seen: list[int] = []
    done = threading.Event()
    for i in range(100):
        portal.post(lambda i=i: seen.append(i))
    portal.post(done.set)
    assert done.wait(PATIENCE_S)
    assert seen == list(range(100))


def test_a_result_and_an_error_come_out_of_the_future(operations: Operations):
    async def give(_: Any) -> int:
        return 7

    async def fail(_: Any) -> int:
        raise LookupError("lost")

    assert operations.start(give).result(PATIENCE_S) == 7
    with pytest.raises(LookupError, match="lost"):
        operations.start(fail).result(PATIENCE_S)


@pytest.mark.req("S22")
def test_ending_the_loop_ends_every_pending_future(portal: LoopThread, operations: Operations):
    pending = [operations.start(_forever) for _ in range(20)]
    operations.start(lambda promise: _end(portal, promise)).result(PATIENCE_S)
    for future in pending:
        with pytest.raises(ClosedError):
            future.result(PATIENCE_S)


@pytest.mark.req("S22")
def test_a_loop_that_dies_by_itself_ends_every_future(portal: LoopThread, operations: Operations):
    pending = operations.start(_forever)
    portal.post(lambda: asyncio.get_running_loop().stop())
    with pytest.raises(ClosedError, match="loop thread has ended"):
        pending.result(PATIENCE_S)
    with pytest.raises(ClosedError):
        operations.start(_forever).result(PATIENCE_S)


@pytest.mark.req("S23")
def test_a_call_on_a_closed_client_fails_in_its_future(portal: LoopThread, operations: Operations):
    operations.start(lambda promise: _end(portal, promise)).result(PATIENCE_S)
    future = operations.start(_forever)
    assert isinstance(future.exception(PATIENCE_S), ClosedError)


def test_cancelling_a_future_cancels_its_task(operations: Operations):
    cancelled, started = threading.Event(), threading.Event()

    async def work(_: Any) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    future = operations.start(work)
    assert started.wait(PATIENCE_S)
    assert future.cancel()
    assert cancelled.wait(PATIENCE_S)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(0)


def test_a_bug_in_a_posted_action_ends_its_future_and_not_the_loop(operations: Operations):
    promise = operations.promise()

    def broken() -> None:
        raise AttributeError("a bug")

    operations.portal.post(broken, promise)
    with pytest.raises(AttributeError):
        promise.future.result(PATIENCE_S)

    async def give(_: Any) -> int:
        return 1

    assert operations.start(give).result(PATIENCE_S) == 1


@pytest.mark.req("B6")
def test_a_forked_child_gets_an_error_at_once(operations: Operations):
    started = threading.Event()

    async def work(_: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    pending = operations.start(work)
    assert started.wait(PATIENCE_S)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - runs in the child
        kinds = []
        for future in (pending, operations.start(work)):
            try:
                future.result(PATIENCE_S)
            except BaseException as error:  # noqa: BLE001
                kinds.append(type(error).__name__)
        os.write(write, ",".join(kinds).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode() == f"{ForkedError.__name__},{ForkedError.__name__}"
    os.close(read)
    os.close(write)
    assert not pending.done()
    pending.cancel()


class Client:
    """A client with one method in three colours."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations

    async def thread_async(self, add: int = 0) -> int:
        """Where it ran."""
        return threading.get_ident() + add

    thread = blocking(thread_async)
    thread_soon = submitting(thread_async)


def test_twins_run_the_same_body_on_the_loop(operations: Operations):
    client = Client(operations)
    assert client.thread() != threading.get_ident()
    assert client.thread(add=1) == client.thread() + 1
    assert client.thread_soon().result(PATIENCE_S) == client.thread()
    assert (Client.thread.__name__, Client.thread.__doc__) == ("thread", "Where it ran.")


def test_a_blocking_call_in_a_running_loop_logs_a_hint(operations: Operations, caplog: Any):
    client = Client(operations)

    async def call() -> None:
        client.thread()

    asyncio.run(call())
    assert "await thread_async() instead" in caplog.text


def test_the_current_loop_can_be_a_portal():
    async def scenario() -> int:
        operations = Operations(CurrentLoop(), SystemClock())

        async def give(_: Any) -> int:
            return 3

        return await operations.start(give)

    assert asyncio.run(scenario()) == 3
