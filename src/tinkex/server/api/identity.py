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
from tinkex.server.api.access import FULL, GROUPS, Access
from tinkex.server.api.errors import refuse
from tinkex.server.api.limits import Throttle
from tinkex.server.store.records import ApiKey, AuditEntry, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.clock import Clock
    from tinkex.server.server_settings import ServerSettings
    from tinkex.server.store.protocol import Store

LOCAL: Final = "local"
"""The one tenant of a server that has only one."""

# A key that another process revokes is still accepted for this long.
_REMEMBERED_S = 2.0
# The last use of a key is written at most this often.
_NOTED_S = 60.0
_LONGEST_KEY = 8192
_LONGEST_NUMBER = 18
# The year 9999, for times that tokens and links name.
_LAST_TIME = 253402300800.0
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
class Caller:
    """The tenant of a credential, what it may do, and the mark that its tokens carry."""

    owner: str
    mark: str
    key: ApiKey | None = None
    access: Access = FULL


class Identity:
    """Checks credentials and makes them."""

    def __init__(self, settings: ServerSettings, clock: Clock, store: Store) -> None:
        self._settings = settings
        self._clock = clock
        self._store = store
        per_s = settings.max_bad_keys_per_s
        self._bad = Throttle(clock, per_s=per_s, burst=per_s * _BAD_BURST_S)
        # Mutable state: callers found lately, by hash and by id of their key, and when to look
        # again. Keys that were not found are not remembered: a new one works at once.
        self._found: dict[str | int, tuple[Caller, float]] = {}
        # When the last use of a key was noted.
        self._noted: dict[int, float] = {}
        store.on_hint(self._hint)

    async def owner(self, credential: str | None, address: str = "") -> str:
        """The tenant of a request; raises a 401 that says what to do.

        `address` is where it came from: an address that keeps trying bad keys gets a 429.
        """
        return (await self.caller(credential, address)).owner

    async def caller(self, credential: str | None, address: str = "") -> Caller:
        """The tenant of a request and what its key may do; raises like `owner`."""
        caller = await self._known(credential, address)
        key = caller.key
        if key is not None and key.expires_at is not None:
            self._check_expiry(caller, key.expires_at, address)
        return caller

    def _check_expiry(self, caller: Caller, expires_at: float, address: str) -> None:
        if expires_at <= self._clock.wall():
            self._note("expired_key", address, caller)
            raise refuse(401, f"This API key has expired: {_ASK}.")

    async def key(self, credential: str | None) -> ApiKey | None:
        """The stored key that a credential is or was made from; None in the other modes."""
        return (await self.caller(credential)).key

    async def make_jwt(self, credential: str | None) -> str:
        """A token that is valid in place of a key until it expires, or the key is revoked."""
        caller = await self.caller(credential)
        now = self._clock.wall()
        expires = now + self._settings.token_ttl_s
        if caller.key is not None and caller.key.expires_at is not None:
            expires = min(expires, caller.key.expires_at)
        claims: dict[str, object] = {
            "iss": "passport-tinkex",
            "sub": caller.owner,
            "org_id": "tinkex",
            "email": "",
            "iat": int(now),
            "exp": int(expires),
            "key": caller.mark,
        }
        return _make_jwt(self._settings.secret, claims)

    async def revoke(self, key: ApiKey) -> None:
        """Revoke a key; it is refused from now on."""
        await self._store.revoke_key(key.key_id, self._clock.wall())
        self._found.pop(key.key_hash, None)
        self._found.pop(key.key_id, None)

    def _hint(self, hint: str) -> None:
        """Look again, when another node has revoked a key."""
        kind, _, number = hint.partition(" ")
        if kind == "key":
            self._found = {
                name: (caller, until)
                for name, (caller, until) in self._found.items()
                if caller.key is None or str(caller.key.key_id) != number
            }
        elif kind == "all":
            self._found.clear()

    def make_link(self, claims: dict[str, str], key_id: int | None = None) -> tuple[str, float]:
        """A token for a download link, and when it expires.

        One that was asked for with a stored key ends with the key.
        """
        expires = self._clock.wall() + self._settings.url_ttl_s
        made: dict[str, object] = {**claims, "exp": expires}
        if key_id is not None:
            made["key"] = key_id
        return _make_link(self._settings.secret, made), expires

    async def open_link(self, token: str) -> dict[str, str]:
        """The claims of a download link."""
        claims = _open_link(self._settings.secret, token)
        if claims is None:
            raise refuse(404, "There is nothing to download here.")
        expires, now, key_id = _time_of(claims), self._clock.wall(), claims.get("key")
        good = expires is not None and expires > now
        if good and type(key_id) is int and self._settings.key_mode == "stored":
            caller = await self._stored_by_id(key_id)
            key = None if caller is None else caller.key
            good = key is not None and (key.expires_at is None or key.expires_at > now)
        if not good:
            raise refuse(403, "This link has expired; ask for a new one.")
        return {k: v for k, v in claims.items() if isinstance(v, str)}

    def _note(self, event: str, address: str, caller: Caller | None = None) -> None:
        """Count a refused attempt in the audit log."""
        owner = "" if caller is None else caller.owner
        key_id = None if caller is None or caller.key is None else caller.key.key_id
        self._store.refused(
            Refusal(owner=owner, event=event, key_id=key_id, address=address), self._clock.wall()
        )

    def check(self, caller: Caller, route: str, address: str) -> None:
        """Refuse a route that the key is not for."""
        why = caller.access.refused(route)
        if why is not None:
            self._note(f"{why}_key:{route}", address, caller)
            caller.access.check(route)

    async def _known(self, credential: str | None, address: str) -> Caller:
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
        self._note("bad_key", address)
        wait_s = self._bad.take(address)
        if wait_s > 0:
            raise refuse(
                429,
                f"Too many tries with keys that are not valid here; {_ASK}.",
                headers={"retry-after": str(math.ceil(min(wait_s, 60.0)))},
            )
        raise refuse(401, _BAD)

    async def _by_key(self, key: str) -> Caller | None:
        mode = self._settings.key_mode
        if mode == "stored":
            return await self._stored(key)
        if mode == "open":
            return Caller(owner_of_key(key), "open")
        if mode == "single":
            return Caller(LOCAL, "single")
        # Every key is compared, so that the time taken does not reveal which one matched.
        known = [_equal(key, each) for each in self._settings.keys]
        return Caller(LOCAL, self._fixed_mark(key)) if any(known) else None

    async def _by_token(self, token: str) -> Caller | None:
        claims = _open_jwt(self._settings.secret, token)
        if claims is None:
            return None
        expires = _time_of(claims)
        if expires is None or expires <= self._clock.wall():
            raise refuse(401, "This token has expired; get a new one with your API key.")
        owner, mark = str(claims.get("sub")), str(claims.get("key"))
        mode = self._settings.key_mode
        if mode == "fixed":
            good = any(mark == self._fixed_mark(key) for key in self._settings.keys)
            return Caller(owner, mark) if good else None
        if mode == "stored":
            number = mark.removeprefix("stored ")
            short = number.isascii() and number.isdigit() and len(number) < _LONGEST_NUMBER
            found = await self._stored_by_id(int(number)) if short else None
            return found if found is not None and found.owner == owner else None
        return Caller(owner, mark) if mark == mode else None

    def _fixed_mark(self, key: str) -> str:
        return f"fixed {fingerprint(f'{self._settings.secret.hex()} {key}')[:16]}"

    async def _stored(self, key: str) -> Caller | None:
        key_hash = fingerprint(key)
        known = self._remembered(key_hash)
        if known is not None:
            return known
        found = await self._store.find_key(key_hash)
        good = found is not None and _equal(found.key_hash, key_hash)
        return self._remember(key_hash, found if good else None)

    async def _stored_by_id(self, key_id: int) -> Caller | None:
        known = self._remembered(key_id)
        if known is not None:
            return known
        return self._remember(key_id, await self._store.get_key(key_id))

    def _remembered(self, name: str | int) -> Caller | None:
        caller, until = self._found.get(name, (None, 0.0))
        return caller if self._clock.now() < until else None

    def _remember(self, name: str | int, key: ApiKey | None) -> Caller | None:
        if key is None or key.revoked_at is not None:
            self._found.pop(name, None)
            return None
        caller = Caller(key.owner, f"stored {key.key_id}", key, Access.of(key))
        now = self._clock.now()
        self._found[name] = (caller, now + _REMEMBERED_S)
        # Here and not for every request: this runs every two seconds of a key's use.
        if now >= self._noted.get(key.key_id, -math.inf) + _NOTED_S:
            self._noted[key.key_id] = now
            self._store.use_key(key.key_id, self._clock.wall())
        return caller


def fingerprint(key: str) -> str:
    """What is stored and looked up instead of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What a new key may do; nothing of it is no limit."""

    read_only: bool = False
    project_id: str | None = None
    routes: tuple[str, ...] | None = None
    expires_at: float | None = None

    def check(self) -> None:
        """Refuse limits that no key can have."""
        unknown = [name for name in self.routes or () if name not in GROUPS]
        if unknown:
            raise InputError(
                f"{unknown[0][:64]!r} is no group of routes; there is: {', '.join(GROUPS)}",
                "routes",
            )
        if self.routes == ():
            raise InputError(f"name some of: {', '.join(GROUPS)}", "routes")
        project = self.project_id
        if project is not None and not (
            0 < len(project) <= _LONGEST_TEXT and project.isprintable()
        ):
            raise InputError(f"must be 1 to {_LONGEST_TEXT} printable letters", "project")


_UNLIMITED: Final = KeyLimits()


async def make_key(
    store: Store,
    at: float,
    *,
    owner: str | None = None,
    name: str = "",
    note: str = "",
    limits: KeyLimits = _UNLIMITED,
) -> tuple[str, ApiKey]:
    """A new key, which is nowhere else, and its record; without an owner, of a new tenant."""
    limits.check()
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
            read_only=limits.read_only,
            project_id=limits.project_id,
            routes=limits.routes,
            expires_at=limits.expires_at,
        )
    )
    await audit_key(store, at, "api_key_created", kept)
    return key, kept


async def end_key(store: Store, key_id: int, at: float) -> bool:
    """Revoke a key; False when there is none such in use."""
    if not await store.revoke_key(key_id, at):
        return False
    key = await store.get_key(key_id)
    if key is not None:
        await audit_key(store, at, "api_key_revoked", key)
    return True


async def audit_key(store: Store, at: float, event: str, key: ApiKey, **who: Any) -> None:
    """A line in the owner's audit log."""
    details: dict[str, object] = {"key_id": key.key_id, "name": key.name}
    if Access.of(key).limited:
        details["limits"] = Access.of(key).described()
    if key.expires_at is not None:
        details["expires_at"] = key.expires_at
    await store.audit(
        AuditEntry(
            at=at, owner=key.owner, topic="organizations", event=event, details=details, **who
        )
    )


def _time_of(claims: dict[str, Any]) -> float | None:
    """When claims expire; None for a time that is none."""
    expires = claims.get("exp")
    if isinstance(expires, bool) or not isinstance(expires, int | float):
        return None
    return expires if 0 < expires < _LAST_TIME else None  # which NaN is not, either


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
