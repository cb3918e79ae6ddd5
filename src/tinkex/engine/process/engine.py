"""`Engine` for the API process, computed by a child process.

Nothing here imports torch. When the child dies, every waiting call fails at once with an
`EngineDiedError`; no second child is started by itself, because only whoever owns the work knows
what to do again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from tinkex.clock import SystemClock
from tinkex.engine.forwarded import ForwardedEngine
from tinkex.engine.process.lifecycle import EngineProcess
from tinkex.engine.process.spec import ProcessSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.clock import Clock
    from tinkex.engine.process.lifecycle import State
    from tinkex.engine.process.spec import EngineSpec
    from tinkex.engine.protocol import (
        ModelSpec,
        OnToken,
    )
    from tinkex.errors import EngineDiedError


class ProcessEngine(ForwardedEngine):
    """An engine in a child process: make one with `start`, use it on the loop that started it.

    Close it, or use it as an async context manager. One that died stays dead; start another.
    """

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        settings: ProcessSettings | None = None,
        *,
        clock: Clock | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> ProcessEngine:
        """Spawn a child, have it load `spec`, and return when it is ready.

        `on_phase` is told what it is doing meanwhile, such as "loading ... on cuda". Raises what
        the child ran into (`InputError`, `ModelError`, `MissingPackageError`), or an
        `EngineDiedError` when it ended or fell silent.
        """
        process = EngineProcess(settings or ProcessSettings(), clock or SystemClock(), on_phase)
        try:
            await process.start(spec)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await process.kill()
            raise
        return cls(process)

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The base models."""
        return self._process.models

    @property
    def state(self) -> State:
        """Whether it can be used."""
        return self._process.state

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    async def wait_dead(self) -> EngineDiedError | None:
        """Return when the child has ended: how it died, or None when it was closed."""
        return await self._process.wait_dead()

    async def close(self) -> None:
        """End the child; whoever still waits gets a `ClosedError`."""
        await self._process.close()

    async def __aenter__(self) -> ProcessEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(
        self, method: str, *args: Any, on_token: OnToken | None = None, **options: Any
    ) -> Any:
        return await self._process.calls.call(method, *args, on_token=on_token, **options)
