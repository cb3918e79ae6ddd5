"""The engine of a node that has none: it serves no base model, and every call fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import anyio

from tinkex.engine.process.calls import ForwardingEngine
from tinkex.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.engine.protocol import ModelSpec

_NONE: Final = "this node has no engine (role = api); other nodes compute"


class NoEngine(ForwardingEngine):
    """In the place of an engine's process; never dies."""

    pid = 0

    def __init__(self) -> None:
        self._closed = anyio.Event()

    @property
    def models(self) -> Sequence[ModelSpec]:
        """None."""
        return ()

    async def wait_dead(self) -> None:
        """Return when it is closed."""
        await self._closed.wait()

    async def close(self) -> None:
        """Nothing to free."""
        self._closed.set()

    async def _call(self, name: str, **arguments: Any) -> NoReturn:
        raise RequestFailedError(_NONE, None, "server")

    async def stats(self) -> Mapping[str, float]:
        """Nothing is computed."""
        return {}
