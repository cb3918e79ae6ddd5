"""The shared sampling pause."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tinkex.futures.admission import Pauses, process_pauses

pytestmark = pytest.mark.anyio


class StillClock:
    """A clock whose sleeps take no time."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.time += seconds


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.mark.req("S16")
def test_clients_of_one_server_and_key_share_a_pause_whatever_the_spelling(clock: StillClock):
    pauses = Pauses(clock)
    one = pauses.get("http://H:80/a/", "tml-1")
    assert one is pauses.get("http://h/a", "tml-1")
    one.request(5)
    assert pauses.get("http://h/a", "tml-1").remaining_s == 5


@pytest.mark.req("S16")
def test_other_servers_and_keys_are_independent(clock: StillClock):
    pauses = Pauses(clock)
    paused = pauses.get("http://h/a", "tml-1")
    paused.request(5)
    others = [("http://h/b", "tml-1"), ("http://h/a", "tml-2"), ("http://h/a", None)]
    assert [pauses.get(*other).remaining_s for other in others] == [0, 0, 0]


def test_a_shorter_pause_does_not_cut_a_longer_one(clock: StillClock):
    pause = Pauses(clock).get("http://h", "k")
    pause.request(5)
    pause.request(1)
    assert pause.remaining_s == 5
    clock.time = 4.5
    pause.request(1)
    assert pause.remaining_s == 1


async def test_waiting_ends_with_the_pause_even_when_it_grows_meanwhile(clock: StillClock):
    pause = Pauses(clock).get("http://h", "k")
    pause.request(1.5)
    await pause.wait()
    assert clock.time == 1.5
    assert pause.remaining_s == 0


def test_sampling_stays_throttled_for_ten_seconds_after_a_pause(clock: StillClock):
    pause = Pauses(clock).get("http://h", "k")
    assert not pause.throttled
    pause.request(1)
    clock.time = 10.9
    assert pause.throttled
    clock.time = 11.0
    assert not pause.throttled


@pytest.mark.req("S16")
def test_threads_see_each_others_pauses():
    pauses = process_pauses()
    assert pauses is process_pauses()
    pause = pauses.get("http://thread.test", "k")
    thread = threading.Thread(target=lambda: pauses.get("http://thread.test", "k").request(50))
    thread.start()
    thread.join()
    assert pause.remaining_s > 0


def test_a_pause_nobody_holds_is_forgotten(clock: StillClock):
    pauses = Pauses(clock)
    pauses.get("http://h", "k").request(100)
    gc.collect()
    assert pauses.get("http://h", "k").remaining_s == 0
