"""Who is calling: keys, tokens made from keys, and signed download links.

Everything belongs to an owner. Which keys there are, and whose they are, depends on the mode of
the server (`ServerSettings.key_mode`). Keys themselves are never kept.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tinkex.errors import InputError
from tinkex.server.api.errors import refuse
from tinkex.server.api.limits import Throttle
from tinkex.server.store.records import ApiKey, AuditEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.clock import Clock
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.protocol import Store

LOCAL: Final = "local"
"""The one tenant of a server that has only one."""

# A key that another process revokes is still accepted for this long.
_REMEMBERED_S = 2.0
_LONGEST_KEY = 8192
_BAD_BURST_S = 10.0

_ASK = "ask the operator of this server for one (`tinkex key create`)"
_MISSING = f"Send an API key in the X-API-Key header; {_ASK}."
_BAD = f"This API key is not valid here, or no longer: {_ASK}."

PREFIX: Final = "tml-"
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+\-]{0,63}")
_LONGEST_TEXT = 200
_JWT_HEADER = {"alg": "HS256", "typ": "JWT"}


def owner_of_key(key: str) -> str:
    """The tenant of a key on a server that accepts every key."""
    return "user-" + hashlib.sha256(key.encode()).hexdigest()[:16]


def credential_of(headers: Mapping[str, str]) -> str | None:
    """The key of a request whose client may send only `Authorization: Bearer`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key")


@dataclass(frozen=True, slots=True)
class _Caller:
    """The tenant of a credential, and the mark that a token made from it carries."""

    owner: str
    mark: str
    key: ApiKey | None = None


class Identity:
    """Checks credentials and makes them."""

    def __init__(self, settings: ServerSettings, clock: Clock, store: Store) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        per_s = settings.max_bad_keys_per_s
        self._bad = Throttle(clock, per_s=per_s, burst=per_s * _BAD_BURST_S)
        # Mutable state: keys found lately, by hash and by id, and when to look again. Keys that
        # were not found are not remembered: a new one works at once.
        self._found: dict[str | int, tuple[ApiKey, float]] = {}

    async def owner(self, credential: str | None, address: str = "") -> str:
        """The tenant of a request; raises a 401 that says what to do.

        `address` is where it came from: an address that keeps trying bad keys gets a 429.
        """
        return (await self._caller(credential, address)).owner

    async def key(self, credential: str | None) -> ApiKey | None:
        """The stored key that a credential is or was made from; None in the other modes."""
        return (await self._caller(credential, "")).key

    async def make_jwt(self, credential: str | None) -> str:
        """A token that is valid in place of a key until it expires, or the key is revoked."""
        caller = await self._caller(credential, "")
        now = self._clock.wall()
        claims: dict[str, object] = {
            "iss": "passport-tinkex",
            "sub": caller.owner,
            "org_id": "tinkex",
            "email": "",
            "iat": int(now),
            "exp": int(now + self._settings.token_ttl_s),
            "key": caller.mark,
        }
        return _make_jwt(self._settings.secret, claims)

    async def revoke(self, key: ApiKey) -> None:
        """Revoke a key; it is refused from now on."""
        await self._store.revoke_key(key.key_id, self._clock.wall())
        self._found.pop(key.key_hash, None)
        self._found.pop(key.key_id, None)

    def make_link(self, claims: dict[str, str]) -> tuple[str, float]:
        """A token for a download link, and when it expires."""
        expires = self._clock.wall() + self._settings.url_ttl_s
        return _make_link(self._settings.secret, {**claims, "exp": expires}), expires

    def open_link(self, token: str) -> dict[str, str]:
        """The claims of a download link."""
        claims = _open_link(self._settings.secret, token)
        if claims is None:
            raise refuse(404, "There is nothing to download here.")
        if claims["exp"] <= self._clock.wall():
            raise refuse(403, "This link has expired; ask for a new one.")
        return {k: v for k, v in claims.items() if isinstance(v, str)}

    async def _caller(self, credential: str | None, address: str) -> _Caller:
        # A key is required even where any will do: a web page can send requests to this machine,
        # but not with such a header.
        if not credential:
            raise refuse(401, _MISSING)
        caller = None
        if len(credential) <= _LONGEST_KEY:
            is_token = credential.startswith("eyJ") and self._settings.key_mode != "single"
            caller = await (self._by_token(credential) if is_token else self._by_key(credential))
        if caller is not None:
            return caller
        wait_s = self._bad.take(address)
        if wait_s > 0:
            raise refuse(
                429,
                f"Too many tries with keys that are not valid here; {_ASK}.",
                headers={"retry-after": str(math.ceil(min(wait_s, 60.0)))},
            )
        raise refuse(401, _BAD)

    async def _by_key(self, key: str) -> _Caller | None:
        mode = self._settings.key_mode
        if mode == "stored":
            found = await self._stored(key)
            return None if found is None else _Caller(found.owner, f"stored {found.key_id}", found)
        if mode == "open":
            return _Caller(owner_of_key(key), "open")
        if mode == "single":
            return _Caller(LOCAL, "single")
        # Every key is compared, so that the time taken does not reveal which one matched.
        known = [_equal(key, each) for each in self._settings.keys]
        return _Caller(LOCAL, self._fixed_mark(key)) if any(known) else None

    async def _by_token(self, token: str) -> _Caller | None:
        claims = _open_jwt(self._settings.secret, token)
        if claims is None:
            return None
        if claims.get("exp", 0) <= self._clock.wall():
            raise refuse(401, "This token has expired; get a new one with your API key.")
        owner, mark = str(claims.get("sub")), str(claims.get("key"))
        mode = self._settings.key_mode
        if mode == "fixed":
            good = any(mark == self._fixed_mark(key) for key in self._settings.keys)
            return _Caller(owner, mark) if good else None
        if mode == "stored":
            number = mark.removeprefix("stored ")
            found = await self._stored_by_id(int(number), owner) if number.isdigit() else None
            return None if found is None else _Caller(owner, mark, found)
        return _Caller(owner, mark) if mark == mode else None

    def _fixed_mark(self, key: str) -> str:
        return f"fixed {fingerprint(f'{self._settings.secret.hex()} {key}')[:16]}"

    async def _stored(self, key: str) -> ApiKey | None:
        key_hash = fingerprint(key)
        known = self._remembered(key_hash)
        if known is not None:
            return known
        found = await self._store.find_key(key_hash)
        good = found is not None and _equal(found.key_hash, key_hash)
        return self._remember(key_hash, found if good else None)

    async def _stored_by_id(self, key_id: int, owner: str) -> ApiKey | None:
        known = self._remembered(key_id)
        if known is not None:
            return known
        keys = await self._store.keys(owner)
        return self._remember(key_id, next((key for key in keys if key.key_id == key_id), None))

    def _remembered(self, name: str | int) -> ApiKey | None:
        key, until = self._found.get(name, (None, 0.0))
        return key if self._clock.now() < until else None

    def _remember(self, name: str | int, key: ApiKey | None) -> ApiKey | None:
        if key is None or key.revoked_at is not None:
            self._found.pop(name, None)
            return None
        self._found[name] = (key, self._clock.now() + _REMEMBERED_S)
        return key


def fingerprint(key: str) -> str:
    """What is stored and looked up instead of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


async def make_key(
    store: Store, at: float, *, owner: str | None = None, name: str = "", note: str = ""
) -> tuple[str, ApiKey]:
    """A new key, which is nowhere else, and its record; without an owner, of a new tenant."""
    owner = f"user-{secrets.token_hex(8)}" if owner is None else owner
    if not _OWNER.fullmatch(owner):
        raise InputError(
            f"{owner!r} is not possible: use up to 64 letters, digits and . _ @ + -, starting "
            "with a letter or digit",
            "owner",
        )
    for field, value in (("name", name), ("note", note)):
        if len(value) > _LONGEST_TEXT or not value.isprintable():
            raise InputError(f"must be up to {_LONGEST_TEXT} printable letters", field)
    key = PREFIX + secrets.token_urlsafe(32)
    kept = await store.add_key(
        ApiKey(
            key_id=0,
            key_hash=fingerprint(key),
            owner=owner,
            name=name,
            created_at=at,
            note=note,
        )
    )
    await audit_key(store, at, "api_key_created", kept)
    return key, kept


async def end_key(store: Store, key_id: int, at: float) -> bool:
    """Revoke a key; False when there is none such in use."""
    if not await store.revoke_key(key_id, at):
        return False
    for key in await store.keys():
        if key.key_id == key_id:
            await audit_key(store, at, "api_key_revoked", key)
    return True


async def audit_key(store: Store, at: float, event: str, key: ApiKey) -> None:
    """A line in the owner's audit log."""
    details = {"key_id": key.key_id, "name": key.name}
    await store.audit(
        AuditEntry(at=at, owner=key.owner, topic="organizations", event=event, details=details)
    )


async def any_key(store: Store) -> bool:
    """Whether there is a key that is not revoked."""
    return any(key.revoked_at is None for key in await store.keys())


def _make_jwt(secret: bytes, claims: dict[str, object]) -> str:
    """Claims as a JSON web token."""
    head = f"{_pack(_JWT_HEADER)}.{_pack(claims)}"
    return f"{head}.{_sign(secret, head)}"


def _open_jwt(secret: bytes, token: str) -> dict[str, Any] | None:
    """The claims of a token of this server, expired or not; None when it is none."""
    head, _, signature = token.rpartition(".")
    kind, _, claims = head.partition(".")
    # The header is checked too: another algorithm is another token.
    good = _equal(signature, _sign(secret, head)) and kind == _pack(_JWT_HEADER)
    return _unpack(claims) if good else None


def _make_link(secret: bytes, claims: dict[str, object]) -> str:
    """Claims as a part of a URL."""
    head = _pack(claims)
    return f"{head}.{_sign(secret, f'link {head}')}"


def _open_link(secret: bytes, token: str) -> dict[str, Any] | None:
    """The claims in a link of this server, expired or not; None when it is none."""
    head, _, signature = token.rpartition(".")
    return _unpack(head) if _equal(signature, _sign(secret, f"link {head}")) else None


def _equal(left: str, right: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(left.encode(), right.encode())


def _sign(secret: bytes, text: str) -> str:
    return _b64(hmac.new(secret, text.encode(), hashlib.sha256).digest())


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _pack(value: object) -> str:
    return _b64(msgspec.json.encode(value))


def _unpack(text: str) -> dict[str, Any] | None:
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (binascii.Error, msgspec.MsgspecError, ValueError):
        return None
