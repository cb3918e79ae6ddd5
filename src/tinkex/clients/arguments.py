"""Checks of plain arguments: text, numbers, switches. Pure; every error names its argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from tinkex.errors import InputError, InputTypeError, whole_text

if TYPE_CHECKING:
    from collections.abc import Sequence

_INT64 = 1 << 63


def given_text(value: object, name: str) -> str:
    """`value`, which must be a non-empty string that can be encoded."""
    if not isinstance(value, str):
        raise InputTypeError(f"must be a string, not {type(value).__name__}", name)
    if not value:
        raise InputError("must not be empty", name)
    return whole_text(value, name)


def optional_text(value: object, name: str) -> str | None:
    """As `given_text`; None and an empty string give None."""
    return (
        None if value is None or (isinstance(value, str) and not value) else given_text(value, name)
    )


def header_text(value: object, name: str) -> str:
    """`value`, which is sent in a header; the error never repeats it."""
    text = given_text(value, name)
    if not (text.isascii() and text.isprintable()):
        raise InputError("must be one line of ASCII text", name)
    return text


def whole_number(value: object, name: str) -> int:
    """`value`, which must be an int of 64 bits and not a bool."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputTypeError(f"must be an int, not {type(value).__name__}", name)
    if not -_INT64 <= value < _INT64:
        raise InputError("must fit into 64 bits", name)
    return value


def switch(value: object, name: str) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise InputTypeError(f"must be a bool, not {type(value).__name__}", name)
    return value


def named_values(value: object, name: str) -> dict[str, Any]:
    """`value` as a dict with names for keys; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputTypeError(f"must be a dict, not {type(value).__name__}", name)
    items = cast("Mapping[object, Any]", value).items()
    return {given_text(key, f"{name}[{key!r}]"): item for key, item in items}


def one_of(value: object, choices: Sequence[str], name: str) -> str:
    """`value`, which must be one of these words."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"must be one of {', '.join(choices)}, not {value!r}", name)
    return value
