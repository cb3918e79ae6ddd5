"""Values as plain dicts.

Bytes are base64 text in every mode, as in the official client. A declared field that is None
can be left out; a null inside a free-form map (user metadata, custom-loss arguments) is the user's
own data and always stays.
"""

from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, cast, get_type_hints

import msgspec
from msgspec.structs import fields as struct_fields

from tinkex.errors import InputTypeError
from tinkex.types.tensors import TensorData
from tinkex.types.value import ModelField, Value


@dataclass(frozen=True, slots=True)
class Options:
    """How to dump, all the way down."""

    json: bool
    exclude_none: bool
    exclude_defaults: bool


def dump(value: Value, options: Options) -> dict[str, Any]:
    """The fields of a struct as a dict, nested structs included."""
    fields: dict[str, Any] = {}
    for name, described in fields_of(type(value)).items():
        field = getattr(value, name)
        if field is None and (options.exclude_none or name == "usage"):
            continue
        if options.exclude_defaults and field == described.default:
            continue
        fields[name] = _plain(field, options)
    fields.update(getattr(value, "__dict__", {}))
    return fields


@cache
def fields_of(cls: type[Value]) -> dict[str, ModelField]:
    """What a struct type says about its fields, its tag included."""
    hints = get_type_hints(cls, include_extras=True)
    fields: dict[str, ModelField] = {}
    config = cls.__struct_config__
    if config.tag_field is not None:
        fields[config.tag_field] = ModelField(str, config.tag)
    for field in struct_fields(cls):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        described = ModelField(hints[field.name], default)
        fields[field.name] = ModelField(hints[field.name]) if field.required else described
    return fields


def selected(
    fields: dict[str, Any],
    include: Iterable[str] | None,
    exclude: Iterable[str] | None,
    kind: str,
) -> dict[str, Any]:
    """The fields that `include` and `exclude` select."""
    kept, dropped = _names(include, f"{kind}.include"), _names(exclude, f"{kind}.exclude")
    return {
        name: value
        for name, value in fields.items()
        if (include is None or name in kept) and name not in dropped
    }


def _names(given: Any, path: str) -> set[str]:
    if given is None:
        return set()
    if isinstance(given, Mapping) and not all(
        value is True or value is ... for value in cast("Mapping[str, Any]", given).values()
    ):
        raise InputTypeError("names fields of this value only; pick the rest from the dict", path)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputTypeError(f"expected a set of names, got {type(given).__name__}", path)
    return set(cast("Iterable[str]", given))


def _plain(value: Any, options: Options) -> Any:
    if isinstance(value, Value):
        return dump(value, options)
    if isinstance(value, TensorData):
        return value.to_json()
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        if not items or isinstance(items[0], int | float | str):
            return list(items)
        return [_plain(item, options) for item in items]
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {key: _plain(item, options) for key, item in entries.items()}
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return _json_scalar(value) if options.json else value


def _json_scalar(value: Any) -> Any:
    if isinstance(value, datetime):
        return msgspec.to_builtins(value)
    if isinstance(value, Enum):
        return value.value
    return value
