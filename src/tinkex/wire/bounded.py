"""Compares decoded requests with `types.bounds`.

What there is to compare is worked out once per type from its members, so a new member is bounded
by its name or by the default of its kind. Tensors are compared where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec
from msgspec.structs import fields as struct_fields

from tinkex.errors import InputError, quoted
from tinkex.types import TensorData
from tinkex.types.bounds import (
    INTEGERS,
    JSON_DEPTH,
    LARGEST,
    LIST_ITEMS,
    LISTS,
    TEXT_CHARACTERS,
    TEXTS,
    WHOLE,
)

_DIGITS = len(str(LARGEST))

# What is wrong, and the place inside the value that was checked; None for a good value.
Problem = tuple[str, str] | None
Check = Callable[[Any], Problem]


def check_bounds(request: object) -> None:
    """Raise InputError for the first member of a request that is out of bounds."""
    check = _struct_check(type(cast("msgspec.Struct", request)))
    problem = None if check is None else check(request)
    if problem is not None:
        raise InputError(problem[0], problem[1].removeprefix("."))


def integer_bounds(name: str) -> tuple[int, int]:
    """The least and the most of an integer, by the name of its member."""
    return INTEGERS.get(name, WHOLE)


def whole_number(text: str) -> int | None:
    """The number in a header or a query; None for what is none, or is longer than `LARGEST`."""
    if not (text.isascii() and text.isdigit()) or len(text.lstrip("0")) > _DIGITS:
        return None
    return int(text.lstrip("0") or "0")


def check_integer(name: str, value: int) -> None:
    """Raise InputError for an integer that was not decoded as a member of a request."""
    problem = _integer(name)(value)
    if problem is not None:
        raise InputError(problem[0], name)


def check_text(name: str, value: str) -> None:
    """The same for a text."""
    problem = _text(name)(value)
    if problem is not None:
        raise InputError(problem[0], name)


@cache
def _struct_check(kind: type[msgspec.Struct]) -> Check | None:
    # Most members are integers and texts, and are compared without a call for each.
    fields = [(field.name, _alternatives(field.type)) for field in struct_fields(kind)]
    integers = [(name, *integer_bounds(name)) for name, hints in fields if hints == (int,)]
    texts = [(name, _longest(name)) for name, hints in fields if hints == (str,)]
    checks = [
        (name, _check(name, hints)) for name, hints in fields if hints not in ((int,), (str,))
    ]
    others = [(name, found) for name, found in checks if found is not None]

    def check(value: Any) -> Problem:
        for name, least, most in integers:
            item = getattr(value, name)
            if item is not None and not least <= item <= most:
                return _outside(item, least, most, name)
        for name, longest in texts:
            item = getattr(value, name)
            if item is not None and len(item) > longest:
                return _too_long(item, longest, name)
        return _check_members(value, others)

    return check if integers or texts or others else None


def _check_members(value: Any, members: list[tuple[str, Check]]) -> Problem:
    for name, check in members:
        item = getattr(value, name)
        if item is not None and (problem := check(item)) is not None:
            return problem[0], f".{name}{problem[1]}"
    return None


def _longest(name: str) -> int:
    return TEXTS.get(name, TEXT_CHARACTERS)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types in a hint, without None and without what msgspec itself compares."""
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(part for choice in get_args(hint) for part in _alternatives(choice))
    return () if hint is NoneType else (hint,)


def _check(name: str, hints: tuple[Any, ...]) -> Check | None:
    """A check that looks at the class of a value, for members that may be of several."""
    checks = {_class(hint): found for hint in hints if (found := _one(name, hint)) is not None}
    if not checks:
        return None
    if Any in checks:
        return checks[Any]
    if len(hints) == 1:
        return next(iter(checks.values()))
    by_class = tuple(checks.items())

    def check(value: Any) -> Problem:
        for kind, check_value in by_class:
            if isinstance(value, kind):
                return check_value(value)
        return None

    return check


def _class(hint: Any) -> Any:
    origin = get_origin(hint)
    # A str is a sequence, too; it has a hint of its own wherever it is allowed.
    return list if origin is not None and issubclass(origin, Sequence) else origin or hint


def _one(name: str, hint: Any) -> Check | None:
    if hint is Any:
        return _free_form
    if hint is int:
        return _integer(name)
    if hint is str:
        return _text(name)
    origin = get_origin(hint)
    if origin is Literal or hint is TensorData:
        return None
    if origin is not None and issubclass(origin, Mapping):
        return _map(name, _check(name, _alternatives(get_args(hint)[1])))
    if origin is not None and issubclass(origin, Sequence):
        return _list(name, _items(name, get_args(hint)[0]))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct_check(hint)
    return None


def _items(name: str, hint: Any) -> Check | None:
    # The ids of tokens, of which there are many, are compared by msgspec.
    meta = get_args(hint)[1] if get_origin(hint) is Annotated else None
    if isinstance(meta, msgspec.Meta) and meta.ge is not None and (meta.lt or meta.le) is not None:
        return None
    return _check(name, _alternatives(hint))


def _integer(name: str) -> Check:
    least, most = integer_bounds(name)
    return lambda value: None if least <= value <= most else _outside(value, least, most)


def _text(name: str) -> Check:
    longest = _longest(name)
    return lambda value: None if len(value) <= longest else _too_long(value, longest)


def _list(name: str, check_item: Check | None) -> Check:
    most = LISTS.get(name, LIST_ITEMS)

    def check(value: Any) -> Problem:
        if len(value) > most:
            return f"has {len(value)} items; {most} are the most", ""
        if check_item is not None:
            for index, item in enumerate(value):
                if (problem := check_item(item)) is not None:
                    return problem[0], f"[{index}]{problem[1]}"
        return None

    return check


def _map(name: str, check_item: Check | None) -> Check:
    most = LISTS.get(name, LIST_ITEMS)

    def check(value: Any) -> Problem:
        if len(value) > most:
            return f"has {len(value)} members; {most} are the most", ""
        for key, item in value.items():
            if len(key) > TEXT_CHARACTERS:
                return _too_long(key, TEXT_CHARACTERS)
            if check_item is not None and (problem := check_item(item)) is not None:
                return problem[0], f"[{quoted(key)}]{problem[1]}"
        return None

    return check


def _free_form(value: Any) -> Problem:
    """Free-form values are written again and walked through by functions that call themselves."""
    level = [value]
    for _ in range(JSON_DEPTH):
        inner: list[Any] = []
        for item in level:
            if item.__class__ is dict or item.__class__ is list:
                parts = item.values() if item.__class__ is dict else item
                inner += [part for part in parts if part.__class__ in (dict, list)]
        if not inner:
            return None
        level = inner
    return f"is nested more than {JSON_DEPTH} deep", ""


def _outside(value: int, least: int, most: int, name: str = "") -> Problem:
    return f"must lie between {least} and {most}, not {quoted(value)}", f".{name}" if name else ""


def _too_long(value: str, longest: int, name: str = "") -> Problem:
    text = f"has {len(value)} characters; {longest} are the most: {quoted(value)}"
    return text, f".{name}" if name else ""
