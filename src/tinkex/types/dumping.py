"""Values as plain dicts.

A declared field that is None can be left out; a null inside a free-form map (user metadata,
custom-loss arguments) always stays, because there it is the user's own data.
"""

from base64 import b64encode
from datetime import datetime
from enum import Enum
from typing import Any, cast

import msgspec

from tinkex.types.base import Value
from tinkex.types.tensors import TensorData


def dump(value: Value, *, json: bool, exclude_none: bool) -> dict[str, Any]:
    """The fields of a struct as a dict, nested structs included."""
    config = value.__struct_config__
    fields: dict[str, Any] = {}
    if config.tag_field is not None:
        fields[config.tag_field] = config.tag
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if field is None and (exclude_none or name == "usage"):
            continue
        fields[name] = _plain(field, json=json, exclude_none=exclude_none)
    fields.update(getattr(value, "__dict__", {}))
    return fields


def _plain(value: Any, *, json: bool, exclude_none: bool) -> Any:
    if isinstance(value, Value):
        return dump(value, json=json, exclude_none=exclude_none)
    if isinstance(value, TensorData):
        return value.to_json()
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        if not items or isinstance(items[0], int | float | str):
            return list(items)
        return [_plain(item, json=json, exclude_none=exclude_none) for item in items]
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {
            key: _plain(item, json=json, exclude_none=exclude_none) for key, item in entries.items()
        }
    return _json_scalar(value) if json else value


def _json_scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, datetime):
        return msgspec.to_builtins(value)
    if isinstance(value, Enum):
        return value.value
    return value
