"""JSON bodies: types to text and back.

Two rules shape what is written. A declared member that is None is left out (a rule of the
member: two bodies say something with a null, see `bodies.EXPLICIT_NULLS`), while members with
other defaults are always written and nulls inside free-form maps stay. And no number is ever
written as NaN or Infinity, which JSON does not have.

Reading is strict about types and skips members it does not know; InputError names the path.
What older clients send is understood by `json_requests`, not here.
"""

from __future__ import annotations

import math
import re
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec.structs import asdict
from msgspec.structs import fields as struct_fields

from tinkex.errors import InputError, InputTypeError, quoted
from tinkex.types import TensorData
from tinkex.types.bounds import TENSOR_BYTES, TENSOR_DIMENSIONS
from tinkex.wire.bodies import EXPLICIT_NULLS
from tinkex.wire.values import placed, too_many_dimensions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    _Writer = Callable[[Any], Any]

T = TypeVar("T")

# JSON has no such numbers, yet a metric that became NaN is what its reader most needs to see.
# Official clients read these strings as the numbers they name.
_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}

_ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_SEARCH_DEPTH = 50
_TENSOR_MEMBERS = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
_PLACE = re.compile(r" - at (?:`key` in )?`\$(.*)`$")


def encode(obj: Any) -> bytes:
    """The JSON text of a request, a reply, or plain values.

    Raises InputError for a value without a JSON form, which only free-form maps can hold.
    """
    try:
        write = _writer(obj.__class__)
        body = obj if write is None else write(obj)
    except RecursionError as error:
        raise InputError("the value contains itself, or is nested too deeply") from error
    try:
        return _encoder.encode(body)
    except _ENCODE_ERRORS as error:
        path = _find_unwritable(body, "")
        raise InputTypeError(f"cannot be written as JSON: {error}", path) from error


def decode(kind: type[T], data: bytes | str) -> T:
    """A value of `kind` from JSON text; raises InputError with the path of what is wrong."""
    try:
        return _decoder(kind).decode(data)
    except _DECODE_ERRORS as error:
        raise input_error(error) from error


def decode_object(data: bytes | str) -> dict[str, Any]:
    """A JSON object of any shape."""
    return decode(dict[str, Any], data)


def convert(kind: type[T], obj: Any) -> T:
    """Like `decode`, from a decoded object."""
    try:
        return msgspec.convert(obj, kind, dec_hook=_read_hook)
    except _DECODE_ERRORS as error:
        raise input_error(error) from error


def _writable(value: Any) -> Any:
    """What the encoder is given for a value: structs become objects, the rest is shared."""
    write = _writer(value.__class__)
    return value if write is None else write(value)


@cache
def _writer(kind: type[object]) -> _Writer | None:
    """How values of a type are written, worked out once; None for those written as they are."""
    if issubclass(kind, msgspec.Struct):
        return _struct_writer(kind)
    if issubclass(kind, (list, tuple)):
        return _write_list
    if issubclass(kind, dict):
        return _write_dict
    return _tensor_to_json if issubclass(kind, TensorData) else None


def _write_list(items: Iterable[Any]) -> list[Any]:
    written: list[Any] = []
    for item in items:
        write = _writer(item.__class__)
        written.append(item if write is None else write(item))
    return written


def _write_dict(items: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _writable(item) for key, item in items.items()}


def _struct_writer(kind: type[msgspec.Struct]) -> _Writer | None:
    config, fields = kind.__struct_config__, struct_fields(kind)
    tag = {} if config.tag_field is None else {config.tag_field: config.tag}
    members = [(field.name, _member_writer(field.type)) for field in fields]
    writers = tuple((name, write) for name, write in members if write is not None)
    # What a result used is noted by the client; the protocol has no place for it.
    hidden = tuple(field.name for field in fields if field.name == "usage")
    kept = EXPLICIT_NULLS.get(kind, frozenset()).union(hidden)
    nullable = tuple(f.name for f in fields if f.name not in kept and _can_be_none(f.type))
    if not (writers or nullable or hidden or config.dict):
        # The encoder itself would write nothing else.
        return None

    def write(value: Any) -> dict[str, Any]:
        body = asdict(value)
        for name in hidden:
            del body[name]
        for name in nullable:
            if body[name] is None:
                del body[name]
        for name, write_member in writers:
            if name in body:
                body[name] = write_member(body[name])
        if config.dict:
            # Members of a family that its type does not declare.
            body.update(value.__dict__)
        return tag | body if tag else body

    return write


def _can_be_none(hint: Any) -> bool:
    return hint is Any or not {Any, type(None)}.isdisjoint(_alternatives(hint))


def _member_writer(hint: Any) -> _Writer | None:
    # An open union is declared as Any; inside lists and maps, Any is the user's own data.
    if hint is Any or Any in _alternatives(hint) or _mentions_struct(hint):
        return _writable
    return _metrics if dict[str, float] in (hint, *_alternatives(hint)) else None


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else ()


def _mentions_struct(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct | TensorData):
        return True
    return any(_mentions_struct(part) for part in get_args(hint))


def _metrics(values: dict[str, float]) -> dict[str, float | str]:
    return {name: number_to_json(value) for name, value in values.items()}


def number_to_json(value: float) -> float | str:
    """A result's number, by name when it is not finite."""
    if math.isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def number_from_json(value: Any) -> Any:
    """The opposite of `number_to_json`; what is no such name stays as it is."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _find_unwritable(value: Any, path: str, depth: int = 0) -> str:
    """The path of the first value that has no JSON form; only asked once there is one."""
    if depth > _MAX_SEARCH_DEPTH:
        return ""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, msgspec.Struct):
        value = asdict(value)
    if isinstance(value, dict):
        members = cast("dict[Any, Any]", value)
        parts = [(f"{path}.{key}" if path else str(key), item) for key, item in members.items()]
    elif isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(items)]
    for place, item in parts:
        try:
            _encoder.encode(item)
        except _ENCODE_ERRORS:
            return _find_unwritable(item, place, depth + 1)
    return path


def _read_hook(kind: type, obj: Any) -> Any:
    if kind is TensorData:
        return _tensor_from_json(obj)
    raise NotImplementedError(f"no JSON form of {kind.__name__}")


def _tensor_to_json(tensor: TensorData) -> dict[str, Any]:
    """The JSON object of a tensor; refuses numbers that JSON does not have."""
    body = tensor.to_json()
    if tensor.dtype == "float32" and not all(map(math.isfinite, body["data"])):
        raise InputError("NaN and infinity cannot be sent as JSON", "TensorData.data")
    return body


def _tensor_from_json(obj: Any) -> TensorData:
    """A tensor from its JSON object, skipping members it does not have."""
    if isinstance(obj, dict):
        fields = cast("dict[str, Any]", obj)
        _check_size(fields.get("shape"))
        obj = {name: fields[name] for name in _TENSOR_MEMBERS if name in fields}
    return TensorData.from_json(obj)


def _check_size(shape: Any) -> None:
    """A sparse tensor is short to write and as large as its shape once it is filled."""
    if not isinstance(shape, list):
        return
    dims = cast("list[Any]", shape)
    if len(dims) > TENSOR_DIMENSIONS:
        raise InputError(too_many_dimensions(len(dims)), "TensorData.shape")
    sizes = [size for size in dims if isinstance(size, int)]
    if any(size < 0 for size in sizes) or math.prod(sizes) * 8 > TENSOR_BYTES:
        raise InputError(f"{quoted(dims)} is not a possible shape", "TensorData.shape")


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_read_hook)


def input_error(error: Exception) -> InputError:
    """An InputError for an error of msgspec."""
    if isinstance(error, RecursionError):
        return InputError("the JSON is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        return InputError(f"not valid JSON: {error}")
    text = str(error)
    place = _PLACE.search(text)
    path = place[1].removeprefix(".") if place else ""
    cause = error.__cause__
    if isinstance(cause, InputError):
        # A type's own check; its path starts with the name of the type.
        return placed(cause, cause.path.partition(".")[0], path)
    reason = text[: place.start()] if place else text
    return InputError(reason[:1].lower() + reason[1:], path)


_encoder = msgspec.json.Encoder()
