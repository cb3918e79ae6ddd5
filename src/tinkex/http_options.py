"""The two HTTP option types that the official package exports by name.

No client takes them. They exist for scripts that build them or use them in annotations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from tinkex.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

Seconds = float | None


class _Unset:
    def __repr__(self) -> str:
        return "unset"


_UNSET = _Unset()
_PARTS = ("connect", "read", "write", "pool")


class Timeout:
    """Seconds to wait in each part of a request; None waits for ever.

    The first argument is the default of the parts that are not named: a number, None, a tuple
    `(connect, read, write, pool)`, or another `Timeout`.
    """

    connect: Seconds
    read: Seconds
    write: Seconds
    pool: Seconds

    def __init__(
        self,
        timeout: Timeout | Seconds | tuple[Seconds, ...] | _Unset = _UNSET,
        *,
        connect: Seconds | _Unset = _UNSET,
        read: Seconds | _Unset = _UNSET,
        write: Seconds | _Unset = _UNSET,
        pool: Seconds | _Unset = _UNSET,
    ) -> None:
        defaults = _defaults(timeout)
        for name, given in zip(_PARTS, (connect, read, write, pool), strict=True):
            value = defaults[name] if isinstance(given, _Unset) else given
            if isinstance(value, _Unset):
                raise InputError(f"give a default, or all of {', '.join(_PARTS)}", name)
            _check(name, value)
            setattr(self, name, value)

    def as_dict(self) -> dict[str, Seconds]:
        """The four parts by name."""
        return {name: getattr(self, name) for name in _PARTS}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeout) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.as_dict().values()))

    def __repr__(self) -> str:
        parts = self.as_dict()
        if len(set(parts.values())) == 1:
            return f"Timeout(timeout={self.connect})"
        return f"Timeout({', '.join(f'{name}={value}' for name, value in parts.items())})"


def _check(name: str, value: object) -> None:
    if value is not None and not isinstance(value, int | float):
        raise InputTypeError("must be a number of seconds or None", name)


def _defaults(
    timeout: Timeout | Seconds | tuple[Seconds, ...] | _Unset,
) -> Mapping[str, Seconds | _Unset]:
    if isinstance(timeout, Timeout):
        return timeout.as_dict()
    if isinstance(timeout, tuple):
        filled = (*timeout, *(None,) * (len(_PARTS) - len(timeout)))
        return dict(zip(_PARTS, filled, strict=False))
    return dict.fromkeys(_PARTS, timeout)


class RequestOptions(TypedDict, total=False):
    """Options of a low-level call."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool
