"""Starts operations on a portal and derives the other colour of a method.

An operation is a coroutine that runs on the client's loop and ends one promise. `blocking` and
`submitting` make the twins of an async method, so that no body is written twice.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import traceback
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from tinkex.errors import ClosedError
from tinkex.futures.future import Promise

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tinkex.clients.portal import Portal
    from tinkex.clock import Clock
    from tinkex.futures.future import APIFuture

T = TypeVar("T")
P = ParamSpec("P")
_log = logging.getLogger(__name__)


class Operations:
    """Hands work to a portal; every promise it makes ends."""

    def __init__(
        self,
        portal: Portal,
        clock: Clock,
        keep_alive: object = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.portal = portal
        self.clock = clock
        self.keep_alive = keep_alive
        # Hears every error that ends an operation, before its caller does: a caller that is told
        # may end the process.
        self.on_error = on_error

    def promise(self, *, parts: int = 0) -> Promise[Any]:
        """A promise that ends even when the loop does first."""
        promise: Promise[Any] = Promise(parts=parts, now=self.clock.now, keep_alive=self.keep_alive)
        self.portal.adopt(promise)
        return promise

    def start(
        self, work: Callable[[Promise[T]], Coroutine[Any, Any, T]], *, parts: int = 0
    ) -> APIFuture[T]:
        """Run `work` on the loop; its result or error comes out of the future."""
        promise: Promise[T] = self.promise(parts=parts)
        self.post(promise, functools.partial(self.carry, promise, work, contextvars.copy_context()))
        return promise.future

    def post(self, promise: Promise[Any], action: Callable[[], object]) -> None:
        """Run `action` on the loop unless the future has ended by then."""
        try:
            self.portal.post(functools.partial(_begin, promise, action))
        except ClosedError as error:
            promise.fail(error)

    def carry(
        self,
        promise: Promise[T],
        work: Callable[[Promise[T]], Coroutine[Any, Any, T]],
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[None]:
        """On the loop: run `work` as a task that ends `promise`, and is cancelled with it."""
        task = self.portal.spawn(_end_with(promise, work, self.on_error), context)
        promise.shield.task = task
        if promise.future.done():  # cancelled from another thread in this very moment
            task.cancel()
        return task

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work` from any loop; on the client's own loop it just runs."""
        if self.portal.on_loop():
            return await work()
        return await self.start(lambda _: work())

    def block(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` and wait for it, as blocking code does."""
        future = self.start(lambda _: work())
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted caller takes its operation along
            raise


async def _end_with(
    promise: Promise[T],
    work: Callable[[Promise[T]], Coroutine[Any, Any, T]],
    on_error: Callable[[BaseException], None] | None,
) -> None:
    try:
        promise.finish(await work(promise))
    except asyncio.CancelledError:
        promise.fail(ClosedError("the client was closed while this operation was under way"))
        raise
    except BaseException as error:  # noqa: BLE001 - the future is where it ends
        try:
            if on_error is not None:
                on_error(error)
        finally:
            promise.fail(error)


def _begin(promise: Promise[Any], action: Callable[[], object]) -> None:
    if promise.future.done():
        return
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the future is where it ends
        promise.fail(error)


class HasOperations(Protocol):
    """A client whose methods can have twins."""

    @property
    def operations(self) -> Operations: ...


S = TypeVar("S", bound=HasOperations)


def blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """The blocking twin of an async method."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        hint_async(call.__name__)
        return self.operations.block(lambda: method(self, *args, **kwargs))

    return _renamed(call, method.__name__, method.__name__.removesuffix("_async"))


def submitting(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], APIFuture[T]]:
    """The twin of an async method that returns a future at once."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> APIFuture[T]:
        return self.operations.start(lambda _: method(self, *args, **kwargs))

    return _renamed(call, method.__name__, method.__name__.removesuffix("_async"))


def deferred(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, APIFuture[T]]]:
    """The async twin of a method that submits: awaiting it gives the future."""
    name = method.__name__

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> APIFuture[T]:
        # Looked up at the call: programs replace the method and expect both colours to follow.
        return getattr(self, name)(*args, **kwargs)

    return _renamed(call, name, f"{name}_async")


def awaited(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The async twin of a method that submits: awaiting it gives the result itself."""
    name = method.__name__

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await getattr(self, name)(*args, **kwargs)

    return _renamed(call, name, f"{name}_async")


def _renamed(call: Callable[P, T], old: str, new: str) -> Callable[P, T]:
    call.__qualname__ = call.__qualname__.removesuffix(old) + new
    call.__name__ = new
    return call


def hint_async(name: str) -> None:
    """Log a hint when blocking code is called where an event loop runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if _in_notebook():
        return
    _log.warning("%s() blocks the running event loop; await %s_async() instead", name, name)
    _log.warning("called from:\n%s", "".join(traceback.format_stack(limit=6)[:-2]))


def _in_notebook() -> bool:
    import sys

    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ in {"ZMQInteractiveShell", "Shell"}
