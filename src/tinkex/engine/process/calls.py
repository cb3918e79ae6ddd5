"""Calls of an engine that lives in another process: the caller's half and the engine's half.

Neither half knows processes: each is given a function that sends a message, so a test can put any
`Engine` behind them.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import logging
import pickle
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, cast

from tinkex.engine.process.messages import CallMessage, CallReply, Cancel, Tokens
from tinkex.engine.protocol import EncodedTrainOp, Engine
from tinkex.errors import ClosedError, InputError, RequestFailedError, TinkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinkex.engine.process.messages import Message
    from tinkex.engine.protocol import Best, OnToken, TrainOp

    Decode = Callable[[EncodedTrainOp], TrainOp]

    _Protocol = Engine
else:
    # Without the protocol's own methods, which do nothing and would hide the forwarding ones.
    _Protocol = object

_log = logging.getLogger(__name__)

METHODS: Final = frozenset(
    name for name, value in vars(Engine).items() if inspect.iscoroutinefunction(value)
)
"""What may be called: the asynchronous methods of `Engine`."""


class ForwardingEngine(_Protocol):
    """An `Engine` that computes nothing: each call of the protocol goes to `_call`, by its name."""

    async def _call(self, name: str, **arguments: Any) -> Any:
        raise NotImplementedError


def _forwarding(name: str) -> Callable[..., Any]:
    method = getattr(Engine, name)
    signature = inspect.signature(method)
    names = [each for each in signature.parameters if each != "self"]

    @wraps(method)
    async def call(self: Any, *args: Any, **options: Any) -> Any:
        # All by name, so that `on_token` is found wherever the caller wrote it. Binding them to the
        # signature costs more than the call, and the method itself refuses wrong ones.
        if len(args) > len(names):
            signature.bind(self, *args, **options)  # raises the usual error
        return await self._call(name, **dict(zip(names, args, strict=False)), **options)

    return call


for _name in METHODS:
    setattr(ForwardingEngine, _name, _forwarding(_name))


# -- the caller's half ------------------------------------------------------------------------


@dataclass(slots=True)
class _Waiting:
    result: asyncio.Future[Any]
    on_token: OnToken | None


class Calls:
    """Calls under way; used from one event loop."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        # Mutable state: the callers that wait, by the number of their call.
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count()

    async def call(self, method: str, *, on_token: OnToken | None = None, **arguments: Any) -> Any:
        """Call a method in the engine's process; cancelling this cancels it there."""
        number = next(self._numbers)
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._send(CallMessage(number, method, arguments, streams=on_token is not None))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InputError(f"holds something that cannot be sent: {error}", method) from error
        self._waiting[number] = _Waiting(result, on_token)
        try:
            return await result
        except asyncio.CancelledError:
            # Not for a call that has its result: the engine knows its number no longer.
            if number in self._waiting:
                self._send(Cancel(number))
            raise
        finally:
            self._waiting.pop(number, None)

    def take(self, message: CallReply | Tokens) -> None:
        """Deliver what the engine sent; results without a caller are dropped."""
        if isinstance(message, Tokens):
            for number, sample, token, logprob, best in message.drawn:
                waiting = self._waiting.get(number)
                if waiting is not None:
                    _hand_over(waiting, sample, token, logprob, best)
            return
        waiting = self._waiting.pop(message.number, None)
        if waiting is None or waiting.result.done():
            return
        if message.error is None:
            waiting.result.set_result(message.value)
        else:
            waiting.result.set_exception(message.error)

    def fail(self, error: Callable[[], TinkerError]) -> None:
        """End every call with an error of its own."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.result.done():
                each.result.set_exception(error())


def _hand_over(
    waiting: _Waiting, sample: int, token: int, logprob: float, best: Best | None
) -> None:
    if waiting.on_token is None:
        return
    try:
        waiting.on_token(sample, token, logprob, best)
    except Exception:  # noqa: BLE001 - the caller's own code; its sample continues without it
        _log.exception("on_token failed and is not called again")
        waiting.on_token = None


# -- the engine's half ------------------------------------------------------------------------


class CallRunner:
    """Runs calls on an engine, each as a task, started in the order in which calls arrive.

    `give_up` gets the error after which the device cannot be used any more. `decode` reads the
    bodies of training operations; it is handed in, because the engine knows no encodings.
    """

    def __init__(
        self,
        engine: Engine,
        send: Callable[[Message], None],
        give_up: Callable[[BaseException], None],
        decode: Decode | None = None,
    ) -> None:
        self._engine = engine
        self._decode = decode
        self._send = send
        self._give_up = give_up
        # Mutable state: the calls that run, and tokens drawn in this iteration of the loop.
        self._running: dict[int, asyncio.Task[None]] = {}
        self._drawn: list[tuple[int, int, int, float, Best | None]] = []

    def take(self, message: CallMessage | Cancel) -> None:
        """Start a call, or cancel one."""
        if isinstance(message, CallMessage):
            task = asyncio.get_running_loop().create_task(self._run(message))
            self._running[message.number] = task
        elif task := self._running.get(message.number):
            task.cancel()

    async def _run(self, call: CallMessage) -> None:
        try:
            result = CallReply(call.number, await self._value(call))
        except Exception as error:  # noqa: BLE001 - sent to the caller
            result = CallReply(call.number, error=sendable(error))
            self._after(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something in the engine was cancelled; the caller still waits.
            result = CallReply(call.number, error=sendable(error))
        finally:
            del self._running[call.number]
        # Tokens first: a caller stops listening for them when it has its result.
        self._flush()
        self._deliver(result)

    async def _value(self, call: CallMessage) -> Any:
        if call.method not in METHODS:
            raise InputError(f"there is no {call.method!r}", "method")
        if call.method == "train":
            return await self._train(**call.arguments)
        streams = {"on_token": self._streams(call.number)} if call.streams else {}
        value = await getattr(self._engine, call.method)(**call.arguments, **streams)
        return self._checked(value)

    async def _train(self, batch: Sequence[TrainOp | EncodedTrainOp]) -> Any:
        """Train on what can be decoded; a body that cannot be fails alone."""
        decoded = [self._decoded(op) for op in batch]
        good = [op for op in decoded if not isinstance(op, TinkerError)]
        results = iter(self._checked(await self._engine.train(good)) if good else ())
        return [op if isinstance(op, TinkerError) else next(results) for op in decoded]

    def _decoded(self, op: TrainOp | EncodedTrainOp) -> TrainOp | TinkerError:
        if not isinstance(op, EncodedTrainOp):
            return op
        try:
            if self._decode is None:
                raise ClosedError("this engine process has no decoder")
            return self._decode(op)
        except InputError as error:
            return RequestFailedError(str(error), op.op_id, "user")
        except Exception as error:  # noqa: BLE001 - one operation ends here, the others run
            return sendable(error)

    def _checked(self, value: Any) -> Any:
        """A batch has one result per operation, and its failures are values."""
        for part in cast("list[Any]", value) if isinstance(value, list) else ():
            if isinstance(part, RequestFailedError):
                self._after(part)
        return cast("Any", value)

    def _deliver(self, result: CallReply) -> None:
        try:
            self._send(result)
        except Exception as error:  # noqa: BLE001 - a result that cannot be sent is a failure
            self._send(CallReply(result.number, error=sendable(error)))

    def _after(self, error: BaseException) -> None:
        if fatal(error):
            self._give_up(error)
        elif out_of_memory(error):
            free_memory(error)

    def _streams(self, number: int) -> OnToken:
        """Collect tokens: one message for all that are drawn in one iteration of the loop."""

        def on_token(sample: int, token: int, logprob: float, best: Best | None) -> None:
            if not self._drawn:
                asyncio.get_running_loop().call_soon(self._flush)
            self._drawn.append((number, sample, token, logprob, best))

        return on_token

    def _flush(self) -> None:
        if self._drawn:
            drawn, self._drawn = self._drawn, []
            self._send(Tokens(drawn))


# -- failures ---------------------------------------------------------------------------------

# A request that runs out of memory fails alone. After a fault of the device every later call fails,
# too, so the process reports it and exits; its parent starts another.

# How CUDA and its libraries begin the text of an error that stays with the process.
_FATAL: Final = (
    "CUDA error",
    "CUDA driver error",
    "cuDNN error",
    "device-side assert",
    "NCCL error",
)
# Errors with the same beginnings that end with their request.
_MEMORY: Final = ("out of memory", "allocate memory", "ALLOC_FAILED")


def sendable(error: BaseException) -> TinkerError:
    """The error the caller gets: itself if it is a `TinkerError`, else a failed request."""
    if isinstance(error, TinkerError):
        return error
    if out_of_memory(error):
        return RequestFailedError(f"the engine ran out of memory: {error}", None, "server")
    _log.error("failed in the engine", exc_info=error)
    return RequestFailedError(f"{type(error).__name__}: {error}", None, "server")


def fatal(error: BaseException) -> bool:
    """Whether the device cannot be used any more after this error."""
    return any(
        any(word in str(cause) for word in _FATAL) and not out_of_memory(cause)
        for cause in _causes(error)
        if isinstance(cause, RuntimeError | RequestFailedError)
        and not (isinstance(cause, RequestFailedError) and cause.category == "user")
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether a request asked for more memory than there is."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in _MEMORY)


def free_memory(error: BaseException) -> None:
    """Free what a failed request held: the frames of its traceback refer to its tensors."""
    for cause in _causes(error):
        cause.__traceback__ = None
    gc.collect()


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
