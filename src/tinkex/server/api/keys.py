"""API keys: how they look, and what is kept of one.

A key is 32 random bytes as text. It is shown once; the store keeps a fast hash, which is enough
for something that cannot be guessed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import TYPE_CHECKING, Final

from tinkex.errors import InputError
from tinkex.server.store.records import ApiKey, AuditEntry

if TYPE_CHECKING:
    from tinkex.server.store.protocol import Store

PREFIX: Final = "tml-"

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+\-]{0,63}")
_LONGEST_TEXT = 200


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
    """Whether somebody can get in at all."""
    return any(key.revoked_at is None for key in await store.keys())
