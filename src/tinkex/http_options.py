"""The two HTTP option types that the official package exports by name.

No client takes them. They exist for scripts that build them or use them in annotations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypedDict

from tinkex.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping

Seconds = float | None

_UNSET: Final[Any] = object()
_PARTS = ("connect", "read", "write", "pool")


@dataclass(init=False, repr=False, unsafe_hash=True)
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
        timeout: Timeout | Seconds | tuple[Seconds, ...] = _UNSET,
        *,
        connect: Seconds = _UNSET,
        read: Seconds = _UNSET,
        write: Seconds = _UNSET,
        pool: Seconds = _UNSET,
    ) -> None:
        if isinstance(timeout, Timeout):
            defaults = tuple(timeout.as_dict().values())
        elif isinstance(timeout, tuple):
            defaults = (*timeout, None, None, None, None)[: len(_PARTS)]
        else:
            defaults = (timeout,) * len(_PARTS)
        given: tuple[Any, ...] = (connect, read, write, pool)
        for name, value, default in zip(_PARTS, given, defaults, strict=True):
            seconds: Any = default if value is _UNSET else value
            if seconds is _UNSET:
                raise InputError(f"give a default, or all of {', '.join(_PARTS)}", name)
            if seconds is not None and not isinstance(seconds, int | float):
                raise InputTypeError("must be a number of seconds or None", name)
            setattr(self, name, seconds)

    def as_dict(self) -> dict[str, Seconds]:
        """The four parts by name."""
        return {name: getattr(self, name) for name in _PARTS}

    def __repr__(self) -> str:
        parts = self.as_dict()
        if len(set(parts.values())) == 1:
            return f"Timeout(timeout={self.connect})"
        return f"Timeout({', '.join(f'{name}={value}' for name, value in parts.items())})"


class RequestOptions(TypedDict, total=False):
    """Options of a low-level call."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool
