"""`tinkex key`: the API keys of a server, created and revoked directly in its database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tinkex.cli.command_errors import CommandError
from tinkex.cli.commands import Argument, Command, whole_number
from tinkex.cli.output import print_json, say, show, when
from tinkex.cli.server_store import SERVER, duration_s, server_store, wait_for
from tinkex.clock import SystemClock

if TYPE_CHECKING:
    import argparse
    from typing import TypeVar

    from tinkex.server.store.records import ApiKey

    T = TypeVar("T")


def create(args: argparse.Namespace) -> None:
    """Create a key and print it, alone on standard output. It cannot be shown again."""
    key, kept = wait_for(_create(args))
    if args.format == "json":
        print_json({"key": key, **_plain(kept)})
    else:
        print(key)
    say(f"This is the only time it is shown. It is key {kept.key_id} of the tenant {kept.owner};")
    say(f"another one for the same tenant: tinkex key create --owner {kept.owner}")


async def _create(args: argparse.Namespace) -> tuple[str, ApiKey]:
    from tinkex.server.api.identity import KeyLimits, make_key

    now = SystemClock().wall()
    limits = KeyLimits(
        read_only=args.read_only,
        project_id=args.project,
        routes=None if args.routes is None else tuple(_names(args.routes)),
        expires_at=None if args.expires is None else now + duration_s(args.expires),
    )
    limits.check()
    given = {"owner": args.owner, "name": args.name, "note": args.note}
    async with server_store(args, new=True) as store:
        return await make_key(store, now, **given, limits=limits)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def list_all(args: argparse.Namespace) -> None:
    """List keys, including revoked ones. The keys themselves are not stored."""
    keys = wait_for(_keys(args))
    show(
        args,
        [_plain(key) for key in keys],
        ("ID", "Owner", "Name", "May", "Created", "Last used", "Ends"),
        [
            (
                key.key_id,
                key.owner,
                key.name,
                _scope(key),
                _at(key.created_at),
                _at(key.last_used_at),
                _end(key),
            )
            for key in keys
        ],
        empty="There are no keys. Create one: tinkex key create",
    )


async def _keys(args: argparse.Namespace) -> list[ApiKey]:
    async with server_store(args) as store:
        return list(await store.keys(args.owner))


def revoke(args: argparse.Namespace) -> None:
    """Revoke a key. A running server refuses it within two seconds."""
    if not wait_for(_revoke(args)):
        raise CommandError(f"There is no key {args.key_id} in use", "See `tinkex key list`.")
    if args.format == "json":
        print_json({"key_id": args.key_id, "revoked": True})
    else:
        print(f"Revoked key {args.key_id}.")


async def _revoke(args: argparse.Namespace) -> bool:
    from tinkex.server.api.identity import end_key

    async with server_store(args) as store:
        return await end_key(store, args.key_id, SystemClock().wall())


def _plain(key: ApiKey) -> dict[str, object]:
    """A record without its hash."""
    return {
        "key_id": key.key_id,
        "owner": key.owner,
        "name": key.name,
        "note": key.note,
        "created_at": _time(key.created_at).isoformat(),
        "revoked_at": _iso(key.revoked_at),
        "read_only": key.read_only,
        "project_id": key.project_id,
        "routes": None if key.routes is None else list(key.routes),
        "expires_at": _iso(key.expires_at),
        "last_used_at": _iso(key.last_used_at),
    }


def _iso(at: float | None) -> str | None:
    return None if at is None else _time(at).isoformat()


def _scope(key: ApiKey) -> str:
    """What a key may do, in few letters."""
    parts = ["read"] if key.read_only else []
    if key.routes is not None:
        parts.append("+".join(key.routes))
    if key.project_id is not None:
        parts.append(f"in {key.project_id}")
    return " ".join(parts) or "all"


def _at(at: float | None) -> str | None:
    return "never" if at is None else when(_time(at))


def _end(key: ApiKey) -> str | None:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None and key.expires_at <= SystemClock().wall():
        return "expired"
    return _at(key.expires_at)


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


VERBS = {
    "create": Command(
        create,
        Argument("--owner NAME", "the key's tenant (default: a new tenant)"),
        Argument("--name TEXT", "a name for the key", default=""),
        Argument("--note TEXT", "a note about the key", default=""),
        Argument("--read-only", "it may read, and change nothing"),
        Argument("--project NAME", "it sees and uses only this project"),
        Argument(
            "--routes NAMES", "only some: sample, train, checkpoints, sessions, usage (as a,b)"
        ),
        Argument("--expires TIME", "it is refused after this time, such as 30d or 12h"),
        *SERVER,
    ),
    "list": Command(
        list_all,
        Argument("--owner NAME", "only the keys of this tenant"),
        *SERVER,
    ),
    "revoke": Command(
        revoke,
        Argument("key_id ID", "as in `tinkex key list`", type=whole_number(1)),
        *SERVER,
    ),
}
