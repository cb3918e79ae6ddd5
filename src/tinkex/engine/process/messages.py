"""The messages between the API process and the engine process, and the channel they cross.

Messages are pickled. Both ends are the same program of the same user on the same machine, and the
channel is an unnamed socket pair, so no other process can write to it. Numpy arrays cross as
blocks of memory, not number by number.

Unpickling makes only the value types listed here, no other class, and calls no function: an engine
process that was compromised by a crafted model file cannot run code in the API process by what it
sends. Pickling checks the same list, so that a value of another type fails at its sender and does
not close the channel.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import struct
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final, cast

from tinkex.types import TensorData

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from tinkex.engine.process.spec import EngineSpec
    from tinkex.engine.protocol import Best, ModelSpec
    from tinkex.errors import TinkerError

HEADER: Final = struct.Struct("<Q")
"""Before every message: its length in bytes."""


# -- from the parent --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to load, how often to beat, and from which level on to log."""

    spec: EngineSpec
    heartbeat_interval_s: float
    log_level: int


@dataclass(frozen=True, slots=True)
class CallMessage:
    """Call a method of the engine; `number` names the call in every later message."""

    number: int
    method: str
    arguments: dict[str, Any]
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a call."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what runs now and exit."""


# -- from the child ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Phase:
    """What the child does while it starts."""

    text: str


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine takes calls."""

    models: Sequence[ModelSpec]


@dataclass(frozen=True, slots=True)
class CallReply:
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
    """A heartbeat."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A log record of the child."""

    level: int
    logger: str
    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The child cannot start or cannot continue, and exits after this."""

    error: TinkerError


Message = (
    Start
    | CallMessage
    | Cancel
    | Stop
    | Phase
    | EngineReady
    | CallReply
    | Tokens
    | Beat
    | Logged
    | Broken
)


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
    """A message with its header; `pickle.PicklingError` for a value of another type."""
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
        # Its own reduction calls `getattr`, which must not be on the list: it reaches everything.
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
    # A dot would reach the attributes of a class.
    below = tuple(f"{package}." for package in _CLASSES_OF)
    return "." not in name and (module in _CLASSES_OF or module.startswith(below))


def _tensor(*stored: Any) -> TensorData:
    return TensorData._make(*stored)  # pyright: ignore[reportPrivateUsage] -- its own way back


# -- the channel ------------------------------------------------------------------------------


class Channel(asyncio.BufferedProtocol):
    """One end of a socket pair, on an asyncio loop; both processes use it.

    `on_message` gets each message. `on_lost` is called once, at the end, with what was wrong with a
    message, or None when the other end closed. Sending never waits: what the socket does not take
    yet stays in memory. Every byte that arrives counts as a heartbeat, so a large message that is
    still arriving keeps its sender alive.
    """

    def __init__(
        self, on_message: Callable[[Message], None], on_lost: Callable[[Exception | None], None]
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        # Mutable state: the buffer being filled (a header or a body) and how far; whether anything
        # arrived since `heard` was last called; what was wrong with a message; whether everything
        # was handed to the socket.
        self._header = memoryview(bytearray(HEADER.size))
        self._target = self._header
        self._filled = 0
        self._heard = True
        self._error: Exception | None = None
        self._sent = asyncio.Event()
        self._sent.set()
        self._transport: asyncio.Transport | None = None

    def heard(self) -> bool:
        """Whether anything has arrived since the last call."""
        heard, self._heard = self._heard, False
        return heard

    def send(self, message: Message) -> None:
        """Send; without a connection the message is dropped, and `on_lost` reports that."""
        framed = encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed)

    async def drained(self) -> None:
        """Return when everything was handed to the socket, or the connection is gone."""
        await self._sent.wait()

    def abort(self) -> None:
        """End the connection; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    # -- callbacks of asyncio -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # So that `pause_writing` is called for the first byte that waits, which `drained` needs.
        self._transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        full, self._filled = self._target, 0
        try:
            self._target = self._next(full)
        except Exception as error:  # noqa: BLE001 - handed to the owner, by `on_lost`
            self._error = error
            self.abort()

    def _next(self, full: memoryview) -> memoryview:
        """Use a full buffer; returns the one to fill next."""
        if full is not self._header:
            self._on_message(decode(full))
            return self._header
        (size,) = HEADER.unpack(full)
        if size == 0:
            raise EOFError("a message has no bytes")
        return memoryview(bytearray(size))

    def pause_writing(self) -> None:
        self._sent.clear()

    def resume_writing(self) -> None:
        self._sent.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._sent.set()
        self._on_lost(self._error)


async def open_channel(
    end: socket.socket,
    on_message: Callable[[Message], None],
    on_lost: Callable[[Exception | None], None],
) -> Channel:
    """A channel over one end of a socket pair, which it closes."""
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_unix_connection(lambda: Channel(on_message, on_lost), sock=end)
    return channel
