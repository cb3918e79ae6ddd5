"""The stored credentials file, `~/.tinker/credentials.json`.

Shared with the official command line tool, so its shape is the protocol's. Reading is strict
about what it uses and keeps what it does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tinkex.errors import CredentialError

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = 1


class OrgDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """The organisation a key belongs to."""

    name: str


class UserDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """The person a key belongs to."""

    email: str


class KeyDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whom a key belongs to."""

    org_details: OrgDetails
    user_details: UserDetails


class StoredKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stored key; its repr does not show it."""

    key: str
    name: str
    type: Literal["manual", "generated"] = msgspec.field(default="manual")
    note: str | None = None
    details: KeyDetails | None = None

    def __repr__(self) -> str:
        return f"StoredKey(type={self.type!r}, name={self.name!r})"


class CredentialStore(msgspec.Struct, frozen=True):
    """The content of the file; a new value is made for every change."""

    version: int = _VERSION
    default: str | None = None
    keys: dict[str, StoredKey] = msgspec.field(default_factory=dict[str, StoredKey])

    @property
    def default_key(self) -> str | None:
        """The key to use when nothing else is configured."""
        stored = self.keys.get(self.default) if self.default is not None else None
        return stored.key if stored is not None else None

    def with_key(
        self, key_id: str, key: StoredKey, *, make_default: bool = True
    ) -> CredentialStore:
        """This store and one more key."""
        default = key_id if make_default or self.default is None else self.default
        return CredentialStore(self.version, default, {**self.keys, key_id: key})

    def without_key(self, key_id: str) -> CredentialStore:
        """This store and one key less; another key does not become the default by itself."""
        keys = {name: key for name, key in self.keys.items() if name != key_id}
        return CredentialStore(self.version, self.default if self.default in keys else None, keys)


def credentials_path(home: Path) -> Path:
    """Where the file is."""
    return home / ".tinker" / "credentials.json"


def read_store(path: Path) -> CredentialStore:
    """The stored keys; a missing file is an empty store, an unusable one a CredentialError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return CredentialStore()
    except OSError as error:
        raise CredentialError(
            f"{path} cannot be read ({error.strerror}); fix its permissions or set TINKER_API_KEY"
        ) from error
    try:
        store = msgspec.json.decode(data, type=CredentialStore)
    except msgspec.MsgspecError as error:
        # msgspec quotes types and paths, never values.
        raise CredentialError(
            f"{path} is damaged ({error}); repair or delete it, or set TINKER_API_KEY"
        ) from None
    if store.version != _VERSION:
        raise CredentialError(
            f"{path} has version {store.version}, this client reads {_VERSION}; set TINKER_API_KEY"
        )
    return store


def write_store(path: Path, store: CredentialStore) -> None:
    """Replace the file in one step, readable by its owner only."""
    from tinkex.new_files import replacing  # only writers pay for it

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    content: dict[str, Any] = {"version": store.version}
    if store.default is not None:
        content["default"] = store.default
    # `type` is written although it has a default: other readers want it.
    content["keys"] = {
        key_id: {"type": key.type, **msgspec.to_builtins(key)} for key_id, key in store.keys.items()
    }
    with replacing(path, mode=0o600) as file:
        file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
