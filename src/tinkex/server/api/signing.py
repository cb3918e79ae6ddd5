"""Texts that only this server can have made: tokens that stand for a key, and download links."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Any

import msgspec

_JWT_HEADER = {"alg": "HS256", "typ": "JWT"}


def make_jwt(secret: bytes, claims: dict[str, object]) -> str:
    """Claims as a JSON web token."""
    head = f"{_pack(_JWT_HEADER)}.{_pack(claims)}"
    return f"{head}.{_sign(secret, head)}"


def open_jwt(secret: bytes, token: str) -> dict[str, Any] | None:
    """The claims of a token of this server, expired or not; None when it is none."""
    head, _, signature = token.rpartition(".")
    kind, _, claims = head.partition(".")
    # The header is checked too: another algorithm is another token.
    good = equal(signature, _sign(secret, head)) and kind == _pack(_JWT_HEADER)
    return _unpack(claims) if good else None


def make_link(secret: bytes, claims: dict[str, object]) -> str:
    """Claims as a part of a URL."""
    head = _pack(claims)
    return f"{head}.{_sign(secret, f'link {head}')}"


def open_link(secret: bytes, token: str) -> dict[str, Any] | None:
    """The claims in a link of this server, expired or not; None when it is none."""
    head, _, signature = token.rpartition(".")
    return _unpack(head) if equal(signature, _sign(secret, f"link {head}")) else None


def equal(left: str, right: str) -> bool:
    """Compare without telling by the time it takes where two texts differ."""
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
