"""`tinkex key`: the API keys of a server, created and revoked directly in its database."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.commands import Argument, Command, whole_number
from tinkex.cli.output import print_json, say, show, when
from tinkex.clock import SystemClock
from tinkex.errors import MissingPackageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator, Coroutine
    from typing import TypeVar

    from tinkex.server.store.protocol import Store
    from tinkex.server.store.records import ApiKey
    from tinkex.serving.host_settings import HostSettings

    T = TypeVar("T")


def create(args: argparse.Namespace) -> None:
    """Create a key and print it, alone on standard output. It cannot be shown again."""
    key, kept = _await(_create(args))
    if args.format == "json":
        print_json({"key": key, **_plain(kept)})
    else:
        print(key)
    say(f"This is the only time it is shown. It is key {kept.key_id} of the tenant {kept.owner};")
    say(f"another one for the same tenant: tinkex key create --owner {kept.owner}")


async def _create(args: argparse.Namespace) -> tuple[str, ApiKey]:
    from tinkex.server.api.identity import make_key

    async with _store(args, new=True) as store:
        now = SystemClock().wall()
        return await make_key(store, now, owner=args.owner, name=args.name, note=args.note)


def list_all(args: argparse.Namespace) -> None:
    """List keys, including revoked ones. The keys themselves are not stored."""
    keys = _await(_keys(args))
    show(
        args,
        [_plain(key) for key in keys],
        ("ID", "Owner", "Name", "Note", "Created", "Revoked"),
        [(k.key_id, k.owner, k.name, k.note, when(_time(k.created_at)), _revoked(k)) for k in keys],
        empty="There are no keys. Create one: tinkex key create",
    )


async def _keys(args: argparse.Namespace) -> list[ApiKey]:
    async with _store(args) as store:
        return list(await store.keys(args.owner))


def revoke(args: argparse.Namespace) -> None:
    """Revoke a key. A running server refuses it within two seconds."""
    if not _await(_revoke(args)):
        raise CommandError(f"There is no key {args.key_id} in use", "See `tinkex key list`.")
    if args.format == "json":
        print_json({"key_id": args.key_id, "revoked": True})
    else:
        print(f"Revoked key {args.key_id}.")


async def _revoke(args: argparse.Namespace) -> bool:
    from tinkex.server.api.identity import end_key

    async with _store(args) as store:
        return await end_key(store, args.key_id, SystemClock().wall())


@asynccontextmanager
async def _store(args: argparse.Namespace, *, new: bool = False) -> AsyncGenerator[Store]:
    """The store of a server, which may be running; with `new` it is created if it is missing."""
    try:
        from tinkex.server.store.sql import SqlStore
        from tinkex.serving.data_dir import DATABASE
    except ModuleNotFoundError as error:
        needs = f"the keys of a server need {error.name}"
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


def _plain(key: ApiKey) -> dict[str, object]:
    """A record without its hash."""
    return {
        "key_id": key.key_id,
        "owner": key.owner,
        "name": key.name,
        "note": key.note,
        "created_at": _time(key.created_at).isoformat(),
        "revoked_at": None if key.revoked_at is None else _time(key.revoked_at).isoformat(),
    }


def _revoked(key: ApiKey) -> str | None:
    return "no" if key.revoked_at is None else when(_time(key.revoked_at))


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _await(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(work)


_SERVER = (
    Argument("--data-dir DIR", "the server's folder (default: ./tinkex-data)"),
    Argument("--database URL", "its database, if that is not in the folder"),
)

VERBS = {
    "create": Command(
        create,
        Argument("--owner NAME", "the key's tenant (default: a new tenant)"),
        Argument("--name TEXT", "a name for the key", default=""),
        Argument("--note TEXT", "a note about the key", default=""),
        *_SERVER,
    ),
    "list": Command(
        list_all,
        Argument("--owner NAME", "only the keys of this tenant"),
        *_SERVER,
    ),
    "revoke": Command(
        revoke,
        Argument("key_id ID", "as in `tinkex key list`", type=whole_number(1)),
        *_SERVER,
    ),
}
