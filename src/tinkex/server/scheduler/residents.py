"""What the present engine holds: which models, which published snapshots, and since when.

An engine that died has lost all of it. Every call is guarded, so that an answer counts only if
the engine that gave it still lives: what it did would be gone with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.errors import ClosedError, EngineDiedError, RequestFailedError, TinkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinkex.engine.base import Engine

T = TypeVar("T")

Generation = tuple[int, int]


class EngineRestartedError(Exception):
    """Another engine has come meanwhile, or none; nothing that runs now is to blame."""


class Residents:
    """Forgets everything when the engine dies."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Mutable state: what the engine holds, how many engines are known to have died, and
        # which one was seen last.
        self._models: set[str] = set()
        self._published: set[str] = set()
        self._died = 0
        self._seen: Generation = (0, 0)

    def has_model(self, model_id: str) -> bool:
        """Whether the engine has a model as its journal says."""
        self.generation()
        return model_id in self._models

    def has_published(self, snapshot: str) -> bool:
        """Whether the engine has a published snapshot."""
        self.generation()
        return snapshot in self._published

    def models(self) -> list[str]:
        """All models that the engine has."""
        self.generation()
        return list(self._models)

    def add_model(self, model_id: str, generation: Generation) -> None:
        """Note that an engine has a model, if it is still the present one."""
        if generation == self.generation():
            self._models.add(model_id)

    def add_published(self, snapshot: str, generation: Generation) -> None:
        """Note that an engine has a snapshot, if it is still the present one."""
        if generation == self.generation():
            self._published.add(snapshot)

    def remove_model(self, model_id: str) -> None:
        """The engine no longer has a model, or not as it should be."""
        self._models.discard(model_id)

    def remove_published(self, snapshot: str) -> None:
        """The engine no longer has a snapshot."""
        self._published.discard(snapshot)

    def generation(self) -> Generation:
        """Which engine this is; noticing another one forgets what the last one held."""
        # An engine that starts its own successor counts them; others just fail from then on.
        now = (self._died, int(getattr(self.engine, "generation", 0)))
        if now != self._seen:
            self._seen = now
            self._models.clear()
            self._published.clear()
        return now

    async def ready(self) -> Generation:
        """Wait for an engine that is being started, and name it."""
        wait_ready: Callable[[], Awaitable[Any]] | None = getattr(self.engine, "wait_ready", None)
        if wait_ready is not None:
            try:
                await wait_ready()
            except TinkerError as error:
                raise EngineRestartedError(str(error)) from error
        return self.generation()

    @property
    def hopeless(self) -> bool:
        """Whether no engine will come by itself."""
        return getattr(self.engine, "state", None) in ("failed", "closed")

    async def guard(self, generation: Generation, call: Awaitable[T]) -> T:
        """An engine call's answer; raises when it came from another engine or from none."""
        try:
            answer = await call
        except EngineDiedError:
            if generation == self.generation():
                self._died += 1
                self.generation()
            raise
        except ClosedError as error:
            raise EngineRestartedError(str(error)) from error
        except RequestFailedError as error:
            if generation != self.generation():
                raise EngineRestartedError("the engine was started again") from error
            raise
        if generation != self.generation():
            raise EngineRestartedError("the engine was started again")
        return answer
