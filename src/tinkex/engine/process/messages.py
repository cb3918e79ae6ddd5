"""What the two processes say to each other, and how it becomes bytes.

Messages are pickled. Both ends are the same program of the same user on the same machine, and the
channel is a socket pair without a name, so nobody else can write to it. What crosses are values
that the API process has already decoded and checked, and numpy arrays, which pickle copies as
blocks of memory instead of number by number.

Reading still trusts nobody more than it must: only the value types listed here are made, no other
class and no function. An engine process that was taken over through a crafted model file cannot
have the API process run something by answering with a pickle of it. Writing keeps to the same
list, so that a value which has no place in a message is its sender's error, not the end of both.
"""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final, cast

from tinkex.types import TensorData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.engine.process.spec import EngineSpec
    from tinkex.engine.protocol import Best, ModelSpec
    from tinkex.errors import TinkerError

HEADER: Final = struct.Struct("<Q")
"""In front of every message: its length in bytes."""


# -- from the parent --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to load, how often to beat, and from which level on to log."""

    spec: EngineSpec
    heartbeat_interval_s: float
    log_level: int


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the engine; `number` names the call in every later message."""

    number: int
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this call any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what runs now and end."""


# -- from the child ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Phase:
    """What the child is busy with while it starts."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is there."""

    models: Sequence[ModelSpec]


@dataclass(frozen=True, slots=True)
class Answer:
    """A call has ended, with a value or an error."""

    number: int
    value: Any = None
    error: TinkerError | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of streaming samples: (call, sample, token, log-probability, likeliest)."""

    drawn: list[tuple[int, int, int, float, Best | None]]


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Logged:
    """Something the child wants in the log."""

    level: int
    logger: str
    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The child cannot start or cannot go on, and ends after this."""

    error: TinkerError


Message = Start | Call | Cancel | Stop | Phase | Ready | Answer | Tokens | Beat | Logged | Broken


# -- bytes ------------------------------------------------------------------------------------

_CLASSES_OF: Final = (
    "tinkex.types",
    "tinkex.errors",
    "tinkex.engine.protocol",
    "tinkex.engine.local_settings",
    "tinkex.engine.process.messages",
    "tinkex.engine.process.spec",
)
_NUMPY_CORES: Final = ("numpy.core", "numpy._core")  # before and from numpy 2 on
_NAMES: Final = frozenset(
    {
        ("msgspec._utils", "rebuild"),
        ("tinkex.errors", "_rebuild"),
        ("tinkex.types.optimizers", "_make"),
        ("tinkex.engine.process.messages", "_tensor"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        *((f"{core}.numeric", "_frombuffer") for core in _NUMPY_CORES),
        *((f"{core}.multiarray", "_reconstruct") for core in _NUMPY_CORES),
        *((f"{core}.multiarray", "scalar") for core in _NUMPY_CORES),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)


def encode(message: Message) -> memoryview:
    """A message with its header; `pickle.PicklingError` when something in it has no place there."""
    buffer = io.BytesIO()
    buffer.write(bytes(HEADER.size))
    _Pickler(buffer, 5).dump(message)
    view = buffer.getbuffer()
    HEADER.pack_into(view, 0, len(view) - HEADER.size)
    return view


def decode(body: bytes | bytearray | memoryview) -> Message:
    """A message without its header; anything but one raises `pickle.UnpicklingError`."""
    message = _Unpickler(io.BytesIO(body)).load()
    if not isinstance(message, Message):
        raise pickle.UnpicklingError(f"{type(message).__name__} is not a message")
    return message


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType | BuiltinFunctionType):
            module, name = str(obj.__module__), obj.__qualname__
            if not (_named(module, name) or (isinstance(obj, type) and _value(module, name))):
                raise pickle.PicklingError(f"{module}.{name} has no place in a message")
            return NotImplemented
        # Its own way asks for `getattr`, with which a reader would get hold of anything.
        if type(obj) is TensorData:
            return _tensor, cast("Any", obj.__reduce__())[1]
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if _named(module, name) or _value(module, name):
            found = super().find_class(module, name)
            if isinstance(found, type) or _named(module, name):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a message")


def _named(module: str, name: str) -> bool:
    return (module, name) in _NAMES


@lru_cache(maxsize=1024)  # asked for every part of every message
def _value(module: str, name: str) -> bool:
    # A dot would lead on to the attributes of a class.
    below = tuple(f"{package}." for package in _CLASSES_OF)
    return "." not in name and (module in _CLASSES_OF or module.startswith(below))


def _tensor(*stored: Any) -> TensorData:
    return TensorData._make(*stored)  # pyright: ignore[reportPrivateUsage] -- its own way back
