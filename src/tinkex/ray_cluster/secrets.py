"""The environment that a node gets: database, artifact store, credentials, other settings.

It travels as an argument of the actor's constructor, which Ray shows nowhere, so that a node can be
restarted on another machine without the one who started it. It is never part of a command line, of
a `runtime_env` or of a name, and its values are removed from the log lines of the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HIDDEN: Final = "***"
_SECRET_WORDS: Final = ("KEY", "SECRET", "TOKEN", "PASSWORD", "PASSPHRASE", "CREDENTIAL")
_SHORTEST: Final = 4  # replacing shorter values would garble every line


class NodeSecrets:
    """Environment variables whose values are never shown."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

    def __repr__(self) -> str:
        return f"NodeSecrets({', '.join(sorted(self._variables))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeSecrets) and self._variables == other._variables

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._variables)))

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """`inherited` with these variables."""
        return {**inherited, **self._variables}

    def hide(self, text: str) -> str:
        """`text` with every secret replaced."""
        # The longest first: one secret may be part of another.
        for secret in sorted(set(self._secrets()), key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        return text

    def _secrets(self) -> Iterator[str]:
        for name, value in self._variables.items():
            found = url_secrets(value)
            if any(word in name.upper() for word in _SECRET_WORDS):
                found = (value, *found)
            yield from (secret for secret in found if len(secret) >= _SHORTEST)


def url_secrets(text: str) -> tuple[str, ...]:
    """The password of a URL and its query, as they are written and as they are meant."""
    if "://" not in text:
        return ()
    try:
        parts = urlsplit(text)
        password = parts.password or ""
    except ValueError:
        return (text,)
    hidden = [password] if password else []
    # `?password=…`, as libpq takes it, and signatures of links.
    for item in parts.query.split("&"):
        name, _, value = item.partition("=")
        if any(word in name.upper() for word in _SECRET_WORDS):
            hidden.append(value)
    return tuple(form for secret in hidden for form in {secret, unquote(secret)})
