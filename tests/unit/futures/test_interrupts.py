"""Ctrl-C at any moment of waiting for a future leaves its lock free for the client's loop."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from tests.patience import PATIENCE_S
from tinkex.futures.future import APIFuture

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTS = 2_000


class Interrupted(Exception):
    """What the handler raises, as that of Ctrl-C does."""


def test_an_interrupt_never_leaves_the_lock_of_a_future_taken() -> None:
    future: APIFuture[int] = APIFuture()
    armed = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if armed:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(INTERRUPTS):
            try:
                # At another moment each time.
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + number % 97 * 1e-6)
                while True:
                    future.done()
            except Interrupted:
                continue
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    asked = threading.Thread(target=future.done, daemon=True)
    asked.start()
    asked.join(PATIENCE_S)
    assert not asked.is_alive()
