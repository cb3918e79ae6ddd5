"""The supervisor of a node, with fake processes on a virtual clock."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest

from tinkex.ray_cluster.restarts import LOST_LEASE, RestartPolicy
from tinkex.ray_cluster.supervisor import Supervisor
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

POLICY = RestartPolicy(first_delay_s=1.0, longest_delay_s=60.0, quick_s=30.0, most_failures=3)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FakeChild:
    """Becomes ready and exits when told."""

    def __init__(self, pid: int, *, stubborn: bool = False) -> None:
        self.pid = pid
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lines = (f"line of {pid}",)
        self.signals: list[str] = []
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stubborn = stubborn

    def exit(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)

    async def wait(self) -> int:
        return await self._exit

    def terminate(self) -> None:
        self.signals.append("TERM")
        if not self._stubborn:
            self.exit(0)

    def kill(self) -> None:
        self.signals.append("KILL")
        self.exit(-9)


class Bench:
    """A supervisor, and the children that it started."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.clock = FakeClock()
        self.children: list[FakeChild] = []
        self.fails = False
        self._stubborn = stubborn
        self.supervisor = Supervisor("n", self._start, policy=POLICY, clock=self.clock)

    async def _start(self) -> FakeChild:
        if self.fails:
            raise FileNotFoundError(2, "No such file", "python")
        self.children.append(FakeChild(len(self.children) + 1, stubborn=self._stubborn))
        return self.children[-1]

    @property
    def state(self) -> str:
        return self.supervisor.report.state

    async def settle(self) -> None:
        await anyio.wait_all_tasks_blocked()


async def _running(bench: Bench) -> AsyncGenerator[Bench]:
    async with anyio.create_task_group() as group:
        group.start_soon(bench.supervisor.run)
        await bench.settle()
        yield bench
        bench.supervisor.stop(0.0)


def running(bench: Bench) -> AbstractAsyncContextManager[Bench]:
    from contextlib import asynccontextmanager

    return asynccontextmanager(_running)(bench)


async def test_a_node_is_ready_when_it_says_where_it_listens():
    async with running(Bench()) as bench:
        assert bench.state == "starting"
        bench.children[0].ready.set_result("http://h:1")
        await bench.settle()
        assert (bench.state, bench.supervisor.report.url) == ("ready", "http://h:1")


async def test_a_node_that_lost_its_lease_is_started_at_once():
    async with running(Bench()) as bench:
        bench.children[0].ready.set_result("http://h:1")
        await bench.settle()
        bench.children[0].exit(LOST_LEASE)
        await bench.settle()
        assert len(bench.children) == 2
        assert bench.clock.now() == FakeClock().now()
        assert bench.supervisor.report.url is None


async def test_quick_failures_are_given_up_with_the_last_lines():
    async with running(Bench()) as bench:
        for start in range(3):
            while len(bench.children) == start:
                await bench.clock.advance(1.0)
            bench.children[start].exit(1)
            await bench.settle()
        report = bench.supervisor.report
        assert (report.state, report.failures, report.exit_status) == ("failed", 3, 1)
        assert report.lines == ("line of 3",)
        assert report.starts == 3


async def test_a_program_that_does_not_exist_is_said():
    bench = Bench()
    bench.fails = True
    async with running(bench):
        while bench.state != "failed":
            await bench.clock.advance(1.0)
        assert "No such file" in bench.supervisor.report.lines[0]


async def test_stopping_lets_the_node_drain():
    async with running(Bench()) as bench:
        bench.supervisor.stop(10.0)
        await bench.settle()
        assert bench.children[0].signals == ["TERM"]
        assert bench.state == "stopped"


async def test_a_node_that_does_not_drain_in_time_is_killed():
    async with running(Bench(stubborn=True)) as bench:
        began = bench.clock.now()
        bench.supervisor.stop(10.0)
        while bench.state != "stopped":
            await bench.clock.advance(1.0)
        assert bench.children[0].signals == ["TERM", "KILL"]
        assert 10.0 <= bench.clock.now() - began <= 11.0


async def test_stopping_by_force_ends_a_drain():
    async with running(Bench(stubborn=True)) as bench:
        bench.supervisor.stop(1e6)
        await bench.settle()
        bench.supervisor.stop(0.0)
        await bench.settle()
        assert bench.children[0].signals == ["TERM", "KILL"]
        assert bench.state == "stopped"


async def test_a_failed_node_can_be_stopped():
    bench = Bench()
    bench.fails = True
    async with running(bench):
        while bench.state != "failed":
            await bench.clock.advance(1.0)
        bench.supervisor.stop(10.0)
        await bench.settle()
        assert bench.state == "stopped"


async def test_a_change_is_waited_for_in_another_thread():
    async with running(Bench()) as bench:
        seen = bench.supervisor.report.version
        waiting = asyncio.create_task(asyncio.to_thread(bench.supervisor.wait_change, seen, 100.0))
        bench.children[0].ready.set_result("http://h:1")
        assert (await waiting).state == "ready"
