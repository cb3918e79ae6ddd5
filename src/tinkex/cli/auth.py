"""`tinkex auth`: the stored API key, and whether the server accepts it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tinkex.cli.command_errors import CommandError, report, show_log
from tinkex.cli.commands import FAILED, Command
from tinkex.cli.connect import load_config, rest_client
from tinkex.cli.output import plain, print_json, say, show_one
from tinkex.errors import ResultError, TinkerError

if TYPE_CHECKING:
    import argparse

    from tinkex.credentials import StoredKey
    from tinkex.wire.bodies import ApiKeyResponse
    from tinkex.wire.routes import Route

T = TypeVar("T")

_CONSOLE = "https://tinker.thinkingmachines.ai"


def login(args: argparse.Namespace) -> None:
    """Store an API key as the default. The server checks it first."""
    from tinkex.credentials import credentials_path, read_store, write_store
    from tinkex.transport.auth import is_well_formed
    from tinkex.wire import routes

    path = credentials_path(Path.home())
    store = read_store(path)
    if store.default_key is not None:
        raise CommandError("Already signed in", "Run `tinkex auth logout` first.")
    key = _ask_for_key()
    if not is_well_formed(key):
        raise CommandError("This is not an API key", "Keys start with `tml-`.")
    found = _ask_server(key, routes.GET_API_KEY)
    write_store(path, store.with_key(str(found.key_id), _stored(key, found)))
    owner = f"{found.details.user_details.email} ({found.details.org_details.name})"
    if args.format == "json":
        print_json({"key_id": found.key_id, "name": found.name, "path": str(path)})
    else:
        print(f"Signed in as {owner}; stored the key {found.name!r} in {path}.")


def logout(args: argparse.Namespace) -> None:
    """Remove the stored default key. One that an older tool created is deleted on the server."""
    from tinkex.credentials import credentials_path, read_store, write_store
    from tinkex.wire import routes

    path = credentials_path(Path.home())
    store = read_store(path)
    key_id = store.default
    stored = store.keys.get(key_id) if key_id is not None else None
    if key_id is None or stored is None:
        raise CommandError("No key is stored", "Run `tinkex auth login` to sign in.")
    problem: TinkerError | None = None
    if stored.type == "generated":
        try:
            _ask_server(stored.key, routes.DELETE_API_KEY)
        except TinkerError as error:
            problem = error
    write_store(path, store.without_key(key_id))
    gone = stored.type == "generated" and problem is None
    if args.format == "json":
        print_json({"key_id": key_id, "name": stored.name, "deleted_on_server": gone})
    else:
        print(f"Forgot the key {stored.name!r}" + (", and deleted it." if gone else "."))
    if not gone:
        say(f"The key itself still works. Delete it here: {_CONSOLE}/keys/{key_id}")
    if problem is not None:
        raise problem


def status(args: argparse.Namespace) -> int | None:
    """Check the credential and the server. Fails if the server does not accept it."""
    from tinkex.auth import raise_if_tinker_not_accessible, tinker_has_credentials

    show_log(logging.ERROR)  # the error is reported in the end, so its warning is not needed
    available, problem = tinker_has_credentials(), None
    if available:
        try:
            raise_if_tinker_not_accessible()
        except TinkerError as error:
            problem = error
    accessible = available and problem is None
    if args.format == "json":
        print_json({"credentials_available": available, "accessible": accessible})
    else:
        print(f"Credentials available: {'yes' if available else 'no'}")
        print(f"Tinker accessible: {'yes' if accessible else 'no'}")
    if not available:
        say("Sign in with `tinkex auth login`, or set TINKER_API_KEY.")
    return report(problem) if problem else None if accessible else FAILED


def whoami(args: argparse.Namespace) -> None:
    """Show the account of the credential."""
    with rest_client() as rest:
        try:
            identity = rest.whoami().result()
        except ResultError:
            _show_key(args)
            return
    show_one(
        args,
        plain(identity),
        [
            ("Email", identity.email),
            ("User", identity.user_urn),
            ("Organization", identity.org_urn),
        ],
    )


def _show_key(args: argparse.Namespace) -> None:
    from tinkex.wire import routes

    found = _ask_server(None, routes.GET_API_KEY)
    email, organization = found.details.user_details.email, found.details.org_details.name
    show_one(
        args,
        {"email": email, "organization": organization, "key_name": found.name},
        [("Email", email), ("Organization", organization), ("Key", found.name)],
    )


def _ask_for_key() -> str:
    """A key from the terminal, without echo, or from standard input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    import getpass
    import platform

    say(f"Create a key: {_CONSOLE}/keys?new_key=true&key_name=tinkex-cli-{platform.node()}")
    try:
        return getpass.getpass("Paste it here: ").strip()
    except EOFError:
        raise CommandError("No key was given") from None


def _ask_server(key: str | None, route: Route[None, T]) -> T:
    """Send one request with this key (None: the configured one), without a client session."""
    import asyncio

    from tinkex.clock import SystemClock
    from tinkex.transport.api import connect
    from tinkex.transport.http import HttpTransport

    async def ask() -> T:
        config, clock = load_config(api_key=key), SystemClock()
        transport = HttpTransport(config.base_url, clock, proxy=config.proxy)
        api = connect(config, transport, clock)
        try:
            return await api.call(route)
        finally:
            await api.aclose()

    return asyncio.run(ask())


def _stored(key: str, found: ApiKeyResponse) -> StoredKey:
    from tinkex.credentials import KeyDetails, OrgDetails, StoredKey, UserDetails

    return StoredKey(
        key=key,
        name=found.name,
        note=found.note or None,
        details=KeyDetails(
            OrgDetails(found.details.org_details.name),
            UserDetails(found.details.user_details.email),
        ),
    )


VERBS = {
    "login": Command(login),
    "logout": Command(logout),
    "status": Command(status),
    "whoami": Command(whoami),
}
