"""The steps every protobuf body goes through, with our errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound="Message")


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """Parse one message; raises InputError for bytes that are none."""
    try:
        return kind.FromString(data)
    except _decode_error() as error:  # evaluated, and imported, only when something was raised
        raise InputError(f"the body is not a valid {kind.__name__}: {error}") from error


def _decode_error() -> type[Exception]:
    from google.protobuf.message import DecodeError

    return DecodeError


def serialize(message: Message, *, deterministic: bool = False) -> bytes:
    """The message's bytes; `deterministic` fixes the order of map entries."""
    return message.SerializeToString(deterministic=deterministic)


def construct(path: str, make: Callable[..., T], **fields: Any) -> T:
    """Call a constructor; its InputError then names the value's place in the body."""
    try:
        return make(**fields)
    except InputError as error:
        raise placed(error, make.__name__, path) from error


def placed(error: InputError, name: str, path: str) -> InputError:
    """The error of a constructor with `path` in place of the name of its class."""
    inner = error.path.removeprefix(name).removeprefix(".")
    glue = "." if path and inner and not inner.startswith("[") else ""
    return type(error)(error.reason, f"{path}{glue}{inner}")
