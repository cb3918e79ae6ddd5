"""What happens to unsent errors when the process ends; real processes are in tests/e2e."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.telemetry.test_events import Server
from tinkex.clients.portal import CurrentLoop
from tinkex.clock import SystemClock
from tinkex.telemetry import at_exit
from tinkex.telemetry.events import Telemetry

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.req("S38")

FOR_EVER_S = 3600.0


class Heard:
    """Telemetry that remembers what it was told."""

    def __init__(self, waiting: BaseException | None = None) -> None:
        self.errors: list[BaseException] = []
        self.limits: list[float] = []
        self.waiting = waiting

    def exception(self, error: BaseException) -> None:
        self.errors.append(error)

    def wait_sent(self, limit_s: float) -> None:
        self.limits.append(limit_s)
        if self.waiting is not None:
            raise self.waiting


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A watch of the test's own, which leaves the process as it was."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    for name in ("register", "unregister"):
        monkeypatch.setattr(at_exit.atexit, name, lambda _: None)
    monkeypatch.delattr(sys, "last_value", raising=False)
    return at_exit._Watch()


def test_all_clients_together_are_waited_for_as_long_as_one(watch: Any) -> None:
    clients = [Heard(), Heard(), Heard()]
    for client in clients:
        watch.add(client)
    watch._flush()
    limits = [limit for client in clients for limit in client.limits]
    assert len(limits) == 3
    assert max(limits) <= at_exit.LIMIT_S
    assert clients[0].errors == []


def test_the_error_that_ended_the_program_is_recorded(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, error = Heard(), LookupError()
    watch.add(client)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    watch._flush()
    assert client.errors == [error]


def test_ctrl_c_ends_the_wait_silently(watch: Any) -> None:
    client = Heard(waiting=KeyboardInterrupt())
    watch.add(client)
    watch._flush()
    assert client.limits != []


def test_an_error_of_a_thread_is_recorded_and_goes_on_to_the_hook_before_ours(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: earlier.append(args.exc_value))
    clients = [Heard(), Heard()]
    for client in clients:
        watch.add(client)  # twice, and yet every hook is called once
    error = LookupError()

    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert earlier == [error]
    assert [client.errors for client in clients] == [[error], [error]]


def test_a_forked_child_starts_with_nothing_to_wait_for(watch: Any) -> None:
    client = Heard()
    watch.add(client)
    watch._lock.acquire()  # as if another thread had held it while the process forked
    watch.after_fork()
    watch._flush()
    assert client.limits == []


# -- one client's share of it -----------------------------------------------------------------


def telemetry_of(server: Server) -> Telemetry:
    return Telemetry(lambda: server, SystemClock(), CurrentLoop().post)  # type: ignore[arg-type, return-value]


def test_an_error_is_waited_for_until_it_is_sent_or_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        server = Server()
        server.hangs = True
        telemetry = telemetry_of(server)
        running = asyncio.create_task(telemetry.run())
        telemetry.event("queue_state_changed")
        # What is no error is not worth a wait.
        await asyncio.to_thread(telemetry.wait_sent, FOR_EVER_S)
        telemetry.exception(LookupError())
        await asyncio.to_thread(telemetry.wait_sent, 0.01)
        assert server.events == []
        running.cancel()
        await asyncio.wait([running])
        server.hangs = False
        sending = asyncio.create_task(telemetry.flush())
        await asyncio.to_thread(telemetry.wait_sent, FOR_EVER_S)
        assert len(server.events) == 2
        await sending

    monkeypatch.setattr(at_exit, "watch", lambda telemetry: None)
    asyncio.run(main())


def test_a_client_whose_loop_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.hangs = True

    async def main() -> Telemetry:
        telemetry = telemetry_of(server)
        running = asyncio.create_task(telemetry.run())
        telemetry.exception(LookupError())
        await asyncio.wait([running], timeout=0)
        return telemetry

    monkeypatch.setattr(at_exit, "watch", lambda telemetry: None)
    asyncio.run(main()).wait_sent(FOR_EVER_S)
