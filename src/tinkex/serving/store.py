"""The store a server uses, and whether there are keys in it for those who come from outside."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from tinkex.errors import InputError
from tinkex.server.api.identity import any_key
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tinkex.clock import Clock
    from tinkex.server.store.protocol import Store
    from tinkex.serving.host_settings import HostSettings

DATABASE: Final = "tinkex.db"

_log = logging.getLogger(__name__)


@asynccontextmanager
async def opened_store(settings: HostSettings, clock: Clock) -> AsyncGenerator[Store]:
    """The store, locked: no other server uses it as long as it is open."""
    place = settings.database or settings.data_dir / DATABASE
    async with SqlStore.open(place, clock=clock) as store:
        await store.lock()
        yield store


async def check_keys(store: Store, settings: HostSettings) -> None:
    """Refuse to listen to other machines before there is a key that keeps strangers out."""
    if await any_key(store):
        return
    make = f"`tinkex key create --data-dir {settings.data_dir}`"
    if not settings.on_loopback:
        raise InputError(
            f"{settings.host} can be reached from other machines, and there is no key yet: make "
            f"one with {make}, or listen on 127.0.0.1",
            "host",
        )
    _log.warning("there is no key yet, so nobody is let in: make one with %s", make)
