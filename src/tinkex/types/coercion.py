"""The slow way to construct a value: accepts a little more, and explains what is wrong.

Used when the one-pass conversion in `value` fails or cannot be trusted. Accepts numpy and torch
scalars where a number is expected, floats without a fraction where an integer is, any sequence or
iterator where a list is, and dicts where a struct is. Everything else becomes an `InputError` that
names the argument, such as `SamplingParams.temperature`.
"""

import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import ValidationError, convert
from msgspec.structs import fields as struct_fields

from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.types.arrays import plain_number
from tinkex.types.tensors import TensorData
from tinkex.types.value import CONVERSION_ERRORS, Value, is_mapping

V = TypeVar("V", bound=Value)


def build(cls: type[V], args: tuple[Any, ...], fields: dict[str, Any]) -> V:
    """Construct `cls` from keywords, or raise an `InputError` with the path of the bad one."""
    if args:
        raise InputTypeError("takes keyword arguments only", cls.__name__)
    fields = cls.__adapt__(dict(fields))
    _take_tag(cls, fields)
    extras = _take_unknown(cls, fields)
    try:
        prepared = {name: _prepare(cls, name, given) for name, given in fields.items()}
        value = _convert(cls, prepared)
    except RecursionError:
        raise InputError("contains itself, or is nested too deeply", cls.__name__) from None
    if extras:
        state: Any = value.__dict__
        state.update(extras)
    return value


def validate(cls: type[V], obj: Any) -> V:
    """Construct `cls` from a mapping. A response type skips members it does not know."""
    if isinstance(obj, cls):
        return obj
    if not is_mapping(obj):
        raise InputTypeError(f"expected a mapping, got {_kind(obj)}", cls.__name__)
    fields = dict(obj)
    for name in fields:
        if not isinstance(name, str):
            raise InputTypeError(f"field names are strings, got {quoted(name)}", cls.__name__)
    if not cls.__strict__:
        known = cls.__accepts__ | {cls.__struct_config__.tag_field}
        fields = {name: value for name, value in fields.items() if name in known}
    return build(cls, (), fields)


def rebase(error: InputError, path: str) -> InputError:
    """The same error with `path` in place of the first part of its own path."""
    rest = re.sub(r"^\w+", "", error.path, count=1)
    return type(error)(error.reason, path + rest)


def _take_tag(cls: type[Value], fields: dict[str, Any]) -> None:
    config = cls.__struct_config__
    if config.tag_field in fields:
        given = fields.pop(config.tag_field)
        if not isinstance(given, str) or given != config.tag:
            raise InputError(
                f"must be {quoted(config.tag)}, got {quoted(given)}",
                f"{cls.__name__}.{config.tag_field}",
            )


def _take_unknown(cls: type[Value], fields: dict[str, Any]) -> dict[str, Any]:
    """Remove keywords that are no fields; refuse them unless the class is open."""
    unknown = [name for name in fields if name not in cls.__accepts__]
    if unknown and not getattr(cls, "__open__", False):
        raise InputTypeError(
            f"there is no such field{_nearest(unknown[0], cls.__accepts__)}",
            f"{cls.__name__}.{unknown[0]}",
        )
    return {name: fields.pop(name) for name in unknown}


def _nearest(name: str, known: frozenset[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1)
    return (
        f"; did you mean {quoted(close[0])}?"
        if close
        else f"; fields are {', '.join(sorted(known))}"
    )


@cache
def _hints(cls: type[Value]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _prepare(cls: type[Value], name: str, value: Any) -> Any:
    """Turn scalars of array libraries into Python's, and dicts into the structs they mean."""
    hint = _hints(cls)[name]
    value = _whole(plain(_listed(value, hint)), hint)
    kinds = _structs(hint)
    if not kinds:
        if isinstance(value, set | frozenset):
            raise InputTypeError(
                f"expected {describe(hint)}, got {_kind(value)}",
                f"{cls.__name__}.{name}",
            )
        return value
    path = f"{cls.__name__}.{name}"
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return [_struct(kinds, item, f"{path}[{i}]") for i, item in enumerate(items)]
    if hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping | Value):
        # An array, say: msgspec would take it for a struct that has none of its fields.
        raise InputTypeError(f"expected {describe(hint)}, got {_kind(value)}", path)
    if is_mapping(value) and _arguments(hint, dict, Mapping):
        return {key: _struct(kinds, item, f"{path}[{quoted(key)}]") for key, item in value.items()}
    return _struct(kinds, value, path)


def _listed(value: Any, hint: Any) -> Any:
    """Generators, deques, dict views and other iterables as a list, where a list is expected."""
    if isinstance(value, str | bytes | bytearray | memoryview | list | tuple):
        return cast("Any", value)
    if isinstance(value, Sequence | Iterator | MappingView) and _arguments(hint, list, Sequence):
        return list(cast("Iterable[Any]", value))
    return cast("Any", value)


def _whole(value: Any, hint: Any) -> Any:
    """Floats without a fraction as integers, where only integers are expected."""
    if isinstance(value, float):
        kinds = _members(hint)
        whole = int in kinds and float not in kinds and value.is_integer() and abs(value) < 2**63
        return int(value) if whole else value
    if isinstance(value, list) and (items := _arguments(hint, list, Sequence)):
        return [_whole(item, items[0]) for item in cast("list[Any]", value)]
    return cast("Any", value)


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in get_args(hint) for member in _members(part))
    return (hint,)


def _arguments(hint: Any, *origins: Any) -> tuple[Any, ...]:
    """The type arguments of a member of a hint, such as a list; nothing where there is none."""
    found = (member for member in _members(hint) if get_origin(member) in origins)
    return next(map(get_args, found), ())


def _struct(kinds: tuple[type[Value], ...], value: Any, path: str) -> Any:
    if not is_mapping(value):
        return value
    try:
        return validate(_choose(kinds, value, path), value)
    except InputError as error:
        if error.path == path or error.path.startswith(path + "."):
            raise
        raise rebase(error, path) from None


def _choose(kinds: tuple[type[Value], ...], fields: Mapping[Any, Any], path: str) -> type[Value]:
    """The member of a union that a dict means: by its tag, else by which fields it has."""
    if len(kinds) == 1:
        return kinds[0]
    tag_field = kinds[0].__struct_config__.tag_field or "type"
    if tag_field in fields:
        by_tag = {kind.__struct_config__.tag: kind for kind in kinds}
        tag = fields[tag_field]
        if isinstance(tag, str) and tag in by_tag:
            return by_tag[tag]
        known = ", ".join(repr(name) for name in by_tag)
        raise InputError(f"{quoted(tag)} is not one of {known}", f"{path}.{tag_field}")
    fitting = [
        kind
        for kind in kinds
        if fields.keys() <= kind.__accepts__
        and all(f.name in fields for f in struct_fields(kind) if f.required)
    ]
    if len(fitting) == 1:
        return fitting[0]
    raise InputError(f"needs a {quoted(tag_field)} that says which kind it is", path)


def plain(value: Any) -> Any:
    """Numpy and torch scalars as Python numbers, also inside lists; the rest as it is."""
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("list[Any]", value)]
    return plain_number(value)


def _convert(cls: type[V], fields: dict[str, Any]) -> V:
    try:
        return convert(fields, cls, dec_hook=_tensor)
    except ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise _place(cls, cause, str(error)) from None
        raise _explain(cls, fields, str(error)) from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputTypeError(f"cannot be read: {error}", _culprit(cls, fields)) from error


def _culprit(cls: type[Value], fields: dict[str, Any]) -> str:
    """The field whose value makes `convert` fail in a way it does not explain."""
    for name, value in fields.items():
        try:
            convert(value, _hints(cls)[name], dec_hook=_tensor)
        except CONVERSION_ERRORS:
            return f"{cls.__name__}.{name}"
    return cls.__name__


def _tensor(kind: type, obj: Any) -> Any:
    if kind is TensorData:
        return TensorData.from_json(obj)
    raise NotImplementedError(f"no conversion to {kind.__name__}")


def _place(cls: type[Value], cause: InputError, message: str) -> InputError:
    """An error of a field's own check, with the place where it happened."""
    _, path, _ = _split(cls, message)
    if path == cls.__name__:
        return cause
    return rebase(cause, path) if cause.path else type(cause)(cause.reason, path)


# A bad key of a map is reported as: Expected `str`, got `int` - at `key` in `$.path`
_MESSAGE = re.compile(r"(?P<text>.*?)(?: - at (?P<key>`key` in )?`(?P<path>.*)`)?", re.DOTALL)
_GOT = re.compile(r"Expected `(?P<wanted>.*)`, got `(?P<got>.*)`")
_BOUND = re.compile(r"Expected `.*` (?P<bound>of .*|[<>]=? .*)")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")


def _split(cls: type[Value], message: str) -> tuple[str, str, bool]:
    """What is wrong, where, and whether it is a key of the map there."""
    match = _MESSAGE.fullmatch(message)
    if match is None:
        return message, cls.__name__, False
    path = (match["path"] or "$").replace("$", cls.__name__, 1)
    return match["text"], path, match["key"] is not None


def _explain(cls: type[Value], fields: dict[str, Any], message: str) -> InputError:
    """The InputError for a message of msgspec."""
    text, path, is_key = _split(cls, message)
    field = re.fullmatch(r"\w+\.(\w+)", path)
    hint = _hints(cls).get(field[1]) if field else None
    value = _at(fields, path)
    if missing := _MISSING.fullmatch(text):
        return InputTypeError("is required", f"{path}.{missing['name']}")
    if got := _GOT.fullmatch(text):
        if is_key:
            return InputTypeError(f"keys must be {got['wanted']}, got {got['got']}", path)
        wanted = got["wanted"].replace("null", "None").replace("array", "list")
        wanted = describe(hint) if hint is not None else wanted.replace(" | ", " or ")
        found = got["got"].replace("null", "None")
        return InputTypeError(f"expected {wanted}, got {found}{_advice(wanted, value)}", path)
    if isinstance(value, float) and not math.isfinite(value):
        return InputError(f"must be a finite number, got {value}", path)
    if bound := _BOUND.fullmatch(text):
        return InputError(f"must be {bound['bound']}, got {_short(value)}", path)
    if hint is not None and text.startswith(("Invalid enum", "Invalid value")):
        return InputError(f"must be {describe(hint)}, got {_short(value)}", path)
    return InputError(text[:1].lower() + text[1:], path)


def _advice(wanted: str, value: Any) -> str:
    if "ModelInput" in wanted and isinstance(value, list | tuple | range):
        return "; make one with ModelInput.from_ints(tokens)"
    return ""


def _at(fields: Any, path: str) -> Any:
    """The value a path such as `Name.chunks[0].tokens[3]` leads to, or None."""
    value = fields
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            if index:
                value = value[int(index)]
            else:
                value = cast(
                    "Any", value[name] if isinstance(value, dict) else getattr(value, name)
                )
        except (LookupError, AttributeError, TypeError):
            return None
    return value


def _kind(value: Any) -> str:
    return type(value).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _structs(hint: Any) -> tuple[type[Value], ...]:
    """Every struct type that a type hint mentions."""
    if isinstance(hint, type) and issubclass(hint, Value):
        return (hint,)
    return tuple(kind for part in get_args(hint) for kind in _structs(part))


def describe(hint: Any) -> str:
    """A type hint in words a caller can act on."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(parts[0])
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(part) for part in parts))
    if hint is type(None) or hint is None:
        return "None"
    if origin in (dict, Mapping):
        return f"dict of {describe(parts[0])} to {describe(parts[1])}"
    if parts:
        return f"list of {describe(parts[0])}"
    return getattr(hint, "__name__", str(hint))
