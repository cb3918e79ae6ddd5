"""Encrypting exports with age (https://age-encryption.org), for the public keys of a request.

The only module that imports pyrage. Recipients that need a plugin are refused: a plugin is a
program that would run on the server.
"""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any, Final

from tinkex.errors import InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

SUFFIX: Final = ".age"
MAX_RECIPIENTS: Final = 10

_FIELD: Final = "age_encryption_recipients"
# Longer than the public part of any RSA key in use. Using a key takes time that grows with it.
_MAX_KEY_CHARS: Final = 4096
_SHOWN_CHARS: Final = 80
_SECRET: Final = ("age-secret-key-", "-----begin ")


def check_recipients(given: Sequence[str]) -> tuple[str, ...]:
    """The recipients, each once; the first that cannot be encrypted for is refused by its index."""
    if not given:
        raise InputError(
            "is empty; name at least one recipient, or leave it out for files without encryption",
            _FIELD,
        )
    if len(given) > MAX_RECIPIENTS:
        raise InputError(f"has {len(given)} recipients; at most {MAX_RECIPIENTS} fit", _FIELD)
    pyrage = _pyrage()
    recipients = [text.strip() for text in given]
    for index, text in enumerate(recipients):
        _check(pyrage, index, text)
    return tuple(dict.fromkeys(recipients))


def encrypt(source: IO[bytes], target: IO[bytes], recipients: Sequence[str]) -> None:
    """Encrypt one stream into another, piece by piece and without holding the interpreter."""
    pyrage = _pyrage()
    pyrage.encrypt_io(source, target, [_parse(pyrage, text) for text in recipients])


def _check(pyrage: Any, index: int, text: str) -> None:
    path = f"{_FIELD}[{index}]"
    if text.lower().startswith(_SECRET):
        raise InputError(
            "is a private key, which must stay with its owner; give the public key that belongs "
            "to it and replace the pair",
            path,
        )
    if len(text) > _MAX_KEY_CHARS:
        raise InputError(f"has {len(text)} characters; at most {_MAX_KEY_CHARS} are read", path)
    try:
        # A key can be well-formed and still unusable, which shows only when it is used.
        pyrage.encrypt_io(io.BytesIO(), io.BytesIO(), [_parse(pyrage, text)])
    except (pyrage.RecipientError, pyrage.EncryptError) as error:
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
        raise InputError(
            f"{shown!r} is not a usable recipient ({error}); give a public key of age (age1…) or "
            "of SSH (ssh-ed25519 …, ssh-rsa …)",
            path,
        ) from error


def _parse(pyrage: Any, text: str) -> Any:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    return kind.Recipient.from_str(text)


def _pyrage() -> Any:
    try:
        return importlib.import_module("pyrage")
    except ImportError as error:
        raise RequestFailedError(
            "this server cannot encrypt exports because its package pyrage is not installed; its "
            "operator can install it (pip install 'tinkex[server]'), or leave "
            f"{_FIELD} out",
            None,
            "server",
        ) from error
