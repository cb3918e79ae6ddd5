"""The database of a server on this machine, which the commands of its operator open directly."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tinkex.cli.command_errors import misuse
from tinkex.cli.commands import Argument
from tinkex.errors import MissingPackageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Coroutine
    from typing import TypeVar

    from tinkex.server.store.sql import SqlStore
    from tinkex.serving.host_settings import HostSettings

    T = TypeVar("T")

_DURATION = re.compile(r"(\d{1,6})([dhm])")
_UNITS_S = {"d": 24 * 3600, "h": 3600, "m": 60}
_LONGEST_S = 10 * 365 * 24 * 3600


@asynccontextmanager
async def server_store(args: argparse.Namespace, *, new: bool = False) -> AsyncGenerator[SqlStore]:
    """The store of a server, which may be running; with `new` it is created if it is missing."""
    try:
        from tinkex.server.store.sql import SqlStore
        from tinkex.serving.data_dir import DATABASE
    except ModuleNotFoundError as error:
        needs = f"the database of a server needs {error.name}"
        raise MissingPackageError(needs, "'tinkex[server]'") from error
    settings = _settings(args)
    place: Any = settings.database
    if place is None:
        place = settings.data_dir / DATABASE
        if new:
            settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        elif not place.exists():
            raise misuse(
                f"there is no server in {settings.data_dir}",
                "Name its folder with --data-dir, or its database with --database.",
            )
    async with SqlStore.open(place) as store:
        yield store


def _settings(args: argparse.Namespace) -> HostSettings:
    from tinkex.config import server_environment
    from tinkex.serving.host_settings import load_settings

    given = {"data_dir": args.data_dir, "database": args.database}
    return load_settings({k: v for k, v in given.items() if v is not None}, server_environment())


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(work)


SERVER = (
    Argument("--data-dir DIR", "the server's folder (default: ./tinkex-data)"),
    Argument("--database URL", "its database, if that is not in the folder"),
)


def duration_s(text: str) -> float:
    """`30d`, `12h` or `45m` in seconds."""
    found = _DURATION.fullmatch(text.strip())
    seconds = 0 if found is None else int(found[1]) * _UNITS_S[found[2]]
    if not 0 < seconds <= _LONGEST_S:
        raise misuse(
            f"{text!r} is no span of time",
            "Name one such as 30d, 12h or 45m; ten years at most.",
        )
    return float(seconds)
