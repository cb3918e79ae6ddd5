"""Derives the blocking or async twin of a method, so that no body is written twice."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tinkex.clients.portal import Operations
    from tinkex.futures.future import APIFuture

T = TypeVar("T")
P = ParamSpec("P")
_log = logging.getLogger(__name__)


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


def on_loop(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """An async method whose body runs on the client's loop, whichever loop awaits it."""

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.operations.run(lambda: method(self, *args, **kwargs))

    return call


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
        # Looked up at the call: programs replace the method and expect both twins to follow.
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
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ in {"ZMQInteractiveShell", "Shell"}
