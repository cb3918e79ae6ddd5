"""Which credential a request carries, and keeping it fresh.

`choose` is the pure order of sources. `Credentials` holds what must be remembered: the output of a
credential command for a minute, and a token until it is about to expire. Every kind travels in the
same header. Nothing here logs or shows a credential.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from tinkex.errors import CredentialError, TinkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    import anyio

    from tinkex.clock import Clock
    from tinkex.config import Config

_log = logging.getLogger(__name__)

KEY_PREFIX = "tml-"
JWT_PREFIX = "eyJ"
# Refreshed in the background this long before it expires, and at the latest when a request
# finds less than the second number left.
_REFRESH_AHEAD_S = 300.0
_REFRESH_NOW_S = 60.0
_REFRESH_PAUSE_S = 60.0
# A token that does not say when it expires is exchanged again after this long.
_UNKNOWN_LIFE_S = 300.0
_COMMAND_FRESH_S = 60.0
_COMMAND_TIMEOUT_S = 60.0

_HELP = (
    "set TINKER_API_KEY (or pass api_key=), set TINKER_CREDENTIAL_CMD to a command that prints a "
    "credential, or store a key with `tinkex auth login`"
)


@dataclass(frozen=True, slots=True)
class CredentialSource:
    """One source of a credential; its repr does not show it."""

    kind: Literal["key", "token", "command"]
    value: str

    def __repr__(self) -> str:
        return f"CredentialSource({self.kind})"


def choose(config: Config, *, enforce_command: bool = False) -> CredentialSource:
    """The source to use; raises CredentialError saying what to set.

    A ready-made token wins even where the server demands the command. A malformed key falls back
    to the command, never to the stored key; a configured command hides the stored key.
    """
    key, command = config.api_key, config.credential_cmd
    if key and key.startswith(JWT_PREFIX):
        return CredentialSource("token", key)
    if enforce_command:
        if not command:
            raise CredentialError(
                "this server wants credentials from a command; set TINKER_CREDENTIAL_CMD"
            )
        return CredentialSource("command", command)
    if key:
        if is_well_formed(key):
            return CredentialSource("key", key)
        if not command:
            raise CredentialError(_malformed("The API key"))
    if command:
        return CredentialSource("command", command)
    if config.stored_key:
        if not is_well_formed(config.stored_key):
            raise CredentialError(_malformed("The stored key"))
        kind = "token" if config.stored_key.startswith(JWT_PREFIX) else "key"
        return CredentialSource(kind, config.stored_key)
    raise CredentialError(f"no credential is configured: {_HELP}")


def is_well_formed(credential: str) -> bool:
    """Whether a credential has one of the two known prefixes and fits into a header."""
    return (
        credential.startswith((KEY_PREFIX, JWT_PREFIX))
        and credential.isascii()
        and credential.isprintable()
        and " " not in credential
    )


class Credentials:
    """The credentials of one connection set."""

    def __init__(self, config: Config, clock: Clock) -> None:
        # Mutable state: the credential where it never changes, the last output of the command, the
        # token and its end, and what the server said about exchanging. Touched on the loop only.
        self.constant: str | None = None
        self._config = config
        self._clock = clock
        self._enforce_command = False
        self._exchange: Callable[[], Awaitable[str]] | None = None
        self._exchanging = False
        self._raw: str | None = None
        self._raw_until = float("-inf")
        self._token: str | None = None
        self._token_until = float("-inf")
        self._lock: anyio.Lock | None = None

    def follow(
        self, exchange: Callable[[], Awaitable[str]], *, exchanging: bool, enforce_command: bool
    ) -> None:
        """Obey the server's flags; `exchange` asks it for a token with the raw credential."""
        self._exchange = exchange
        self._exchanging = exchanging
        self._enforce_command = enforce_command
        self._raw_until = float("-inf")
        self.constant = None

    async def header_value(self, raw: bool = False) -> str:
        """The credential of the next request; `raw` skips the exchange for a token."""
        if raw or not self._exchanging:
            return await self._raw_credential()
        if self._token is None or self._left_s() <= _REFRESH_NOW_S:
            await self._refresh()
        assert self._token is not None
        return self._token

    async def keep_fresh(self) -> None:
        """Refresh the token ahead of time until cancelled; requests then never wait for it."""
        while True:
            await self._clock.sleep(max(self._left_s() - _REFRESH_AHEAD_S, _REFRESH_PAUSE_S))
            if self._exchanging and self._left_s() <= _REFRESH_AHEAD_S:
                await self._refresh(ahead=True)

    @property
    def token(self) -> str | None:
        """The token in use: exchanged, or given as the key and issued by the service."""
        if self._token is not None:
            return self._token
        given = self._config.api_key or ""
        trusted = given.startswith(JWT_PREFIX) and is_trusted(given)
        return given if trusted else None

    def secrets(self) -> Iterable[str]:
        """Everything that must not show up anywhere."""
        config = self._config
        keys = (config.api_key, config.stored_key, self._raw, self._token)
        values = (*keys, *_secret_headers(config), *config.proxy_secrets())
        return {value for value in values if value}

    async def _raw_credential(self) -> str:
        if self._raw is not None and self._clock.now() < self._raw_until:
            return self._raw
        source = choose(self._config, enforce_command=self._enforce_command)
        if source.kind == "command":
            self._raw = await run_command(source.value)
            self._raw_until = self._clock.now() + _COMMAND_FRESH_S
        else:
            self._raw, self._raw_until = source.value, float("inf")
            self.constant = None if self._exchanging else source.value
        return self._raw

    def _left_s(self) -> float:
        return self._token_until - self._clock.wall()

    async def _refresh(self, *, ahead: bool = False) -> None:
        import anyio

        if self._lock is None:
            self._lock = anyio.Lock()
        async with self._lock:
            if self._left_s() > (_REFRESH_AHEAD_S if ahead else _REFRESH_NOW_S):
                return  # another request refreshed it while this one waited for the lock
            assert self._exchange is not None
            try:
                token = await self._exchange()
            except TinkerError as error:
                if self._token is None:
                    raise
                _log.warning(
                    "the access token could not be refreshed (%s); using the old one", error
                )
                return
            expires = read_claims(token).get("exp")
            self._token = token
            if isinstance(expires, int | float):
                self._token_until = float(expires)
            else:
                self._token_until = self._clock.wall() + _UNKNOWN_LIFE_S


async def run_command(command: str) -> str:
    """What a credential command prints, without white space around it; run by the system shell."""
    import anyio.to_thread

    return await anyio.to_thread.run_sync(_run_command, command, abandon_on_cancel=True)


def _run_command(command: str) -> str:
    import subprocess

    try:
        done = subprocess.run(
            command,
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CredentialError(
            f"the command in TINKER_CREDENTIAL_CMD did not end within {_COMMAND_TIMEOUT_S:g} s"
        ) from None
    except OSError as error:
        raise CredentialError(
            f"the command in TINKER_CREDENTIAL_CMD could not be started ({error.strerror})"
        ) from None
    output = done.stdout.decode(errors="replace").strip()
    if not output:
        raise CredentialError(
            "the command in TINKER_CREDENTIAL_CMD printed nothing "
            f"(exit status {done.returncode}); run it by hand to see why"
        )
    if not (output.isascii() and output.isprintable()):
        raise CredentialError("the command in TINKER_CREDENTIAL_CMD printed more than one line")
    return output


def read_claims(token: str) -> dict[str, Any]:
    """The claims of a JWT, unverified; empty when it cannot be read."""
    try:
        payload = token.split(".")[1]
        data = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
        claims = msgspec.json.decode(data)
    except (IndexError, ValueError, msgspec.MsgspecError):
        return {}
    return cast("dict[str, Any]", claims) if isinstance(claims, dict) else {}


def is_trusted(token: str) -> bool:
    """Whether a token given by hand says it comes from the service's own issuer."""
    issuer = read_claims(token).get("iss")
    return isinstance(issuer, str) and issuer.startswith("passport-")


def _secret_headers(config: Config) -> Iterable[str]:
    return (value for name, value in config.headers.items() if "secret" in name.lower())


def _malformed(what: str) -> str:
    return f"{what} must start with `{KEY_PREFIX}` (or `{JWT_PREFIX}` for a token): {_HELP}"
