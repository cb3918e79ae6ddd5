"""A fault of the fake server that lasts until a test ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

    from tinkex.testing.faults import Effect, Exchange


def held(go_on: threading.Event) -> Effect:
    """The request is handled when the event is set."""

    async def effect(exchange: Exchange) -> None:
        while not go_on.is_set():  # set by another thread
            await exchange.clock.sleep(0.01)
        await exchange.forward()

    return effect
