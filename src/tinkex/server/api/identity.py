"""Who is calling: keys, tokens made from keys, and signed download links.

An owner is a hash of an API key; keys themselves are never kept. Tokens and links are
signed with the server's secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import TYPE_CHECKING, cast

import msgspec

from tinkex.server.api.errors import refuse

if TYPE_CHECKING:
    from tinkex.clock import Clock
    from tinkex.server.settings import Settings

_JWT_HEADER = {"alg": "HS256", "typ": "JWT"}
_BAD_KEY = "This API key is not valid here."


def owner_of_key(key: str) -> str:
    """The tenant behind a key."""
    return "user-" + hashlib.sha256(key.encode()).hexdigest()[:16]


class Identity:
    """Checks credentials; holds nothing but what it was given."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock

    def owner(self, credential: str | None) -> str:
        """The tenant of a request; raises a 401 that says what is missing."""
        if not credential:
            raise refuse(401, "Send an API key in the X-API-Key header.")
        if credential.startswith("eyJ"):
            claims = self._open_jwt(credential)
            return str(claims["sub"])
        keys = self._settings.keys
        if keys is not None and not any(_equal(credential, key) for key in keys):
            raise refuse(401, _BAD_KEY)
        return owner_of_key(credential)

    def make_jwt(self, owner: str) -> str:
        """A token that stands for a key until it expires."""
        now = self._clock.wall()
        claims = {
            "iss": "passport-tinkex",
            "sub": owner,
            "org_id": "tinkex",
            "email": "",
            "iat": int(now),
            "exp": int(now + self._settings.token_ttl_s),
        }
        head = f"{_pack(_JWT_HEADER)}.{_pack(claims)}"
        return f"{head}.{self._sign(head)}"

    def make_link(self, claims: dict[str, str]) -> tuple[str, float]:
        """A token for a download link, and when it expires."""
        expires = self._clock.wall() + self._settings.url_ttl_s
        head = _pack({**claims, "exp": expires})
        return f"{head}.{self._sign(head)}", expires

    def open_link(self, token: str) -> dict[str, str]:
        """What a download link stands for."""
        head, _, signature = token.rpartition(".")
        claims = _unpack(head) if _equal(signature, self._sign(head)) else None
        if claims is None:
            raise refuse(404, "There is nothing to download here.")
        if cast("float", claims["exp"]) <= self._clock.wall():
            raise refuse(403, "This link has expired; ask for a new one.")
        return {k: v for k, v in claims.items() if isinstance(v, str)}

    def _open_jwt(self, token: str) -> dict[str, object]:
        head, _, signature = token.rpartition(".")
        claims = _unpack(head.partition(".")[2]) if _equal(signature, self._sign(head)) else None
        if claims is None or "sub" not in claims:
            raise refuse(401, _BAD_KEY)
        if cast("float", claims.get("exp", 0)) <= self._clock.wall():
            raise refuse(401, "This token has expired.")
        return claims

    def _sign(self, text: str) -> str:
        return _b64(hmac.new(self._settings.secret, text.encode(), hashlib.sha256).digest())


def _equal(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _pack(value: object) -> str:
    return _b64(msgspec.json.encode(value))


def _unpack(text: str) -> dict[str, object] | None:
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=dict[str, object])
    except (binascii.Error, msgspec.MsgspecError, ValueError):
        return None
