"""`Engine` for the API process, computed by a child process.

Nothing here imports torch. When the child dies, every waiting call fails at once with an
`EngineDiedError`; no second child is started by itself, because only whoever owns the work knows
what to do again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from tinkex.clock import SystemClock
from tinkex.engine.process.lifecycle import EngineProcess
from tinkex.engine.process.spec import ProcessSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinkex.clock import Clock
    from tinkex.engine.base import (
        AdapterSpec,
        Layout,
        ModelSpec,
        OnToken,
        OptimOp,
        OptimResult,
        SampleOp,
        SampleResult,
        SavedAdapter,
        TrainOp,
        TrainResult,
    )
    from tinkex.engine.process.lifecycle import State
    from tinkex.engine.process.spec import EngineSpec
    from tinkex.errors import EngineDiedError, RequestFailedError


class ProcessEngine:
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

    async def create_adapter(self, spec: AdapterSpec) -> None:
        """Make a fresh adapter on its base model."""
        await self._call("create_adapter", spec)

    async def load_adapter(self, model_id: str, location: str, *, optimizer: bool) -> None:
        """Replace an adapter's weights, and its optimizer state too when asked."""
        await self._call("load_adapter", model_id, location, optimizer=optimizer)

    async def save_adapter(self, model_id: str, location: str, *, optimizer: bool) -> SavedAdapter:
        """Write an adapter; complete and durable when it returns."""
        return await self._call("save_adapter", model_id, location, optimizer=optimizer)

    async def drop_adapter(self, model_id: str) -> None:
        """Free an adapter; unknown names are fine."""
        await self._call("drop_adapter", model_id)

    async def train(self, batch: Sequence[TrainOp]) -> Sequence[TrainResult | RequestFailedError]:
        """Run forward or forward_backward of many operations at once."""
        return await self._call("train", batch)

    async def optim_step(
        self, batch: Sequence[OptimOp]
    ) -> Sequence[OptimResult | RequestFailedError]:
        """Apply and clear the gradients of many adapters."""
        return await self._call("optim_step", batch)

    async def publish(self, model_id: str, snapshot: str) -> None:
        """Freeze an adapter as it is for sampling under the name `snapshot`."""
        await self._call("publish", model_id, snapshot)

    async def save_snapshot(self, snapshot: str, location: str) -> SavedAdapter:
        """Write what was published; complete and durable when it returns."""
        return await self._call("save_snapshot", snapshot, location)

    async def drop_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot; unknown names are fine."""
        await self._call("drop_snapshot", snapshot)

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        """Sample; cancelling the call frees its place."""
        return await self._call("sample", op, on_token=on_token)

    async def copy_saved(self, source: str, target: str) -> None:
        """Copy what was saved at one location to another."""
        await self._call("copy_saved", source, target)

    async def delete_saved(self, location: str) -> None:
        """Delete a saved adapter; samples that use it keep it until they end."""
        await self._call("delete_saved", location)

    async def export_saved(self, location: str, layout: Layout = "peft") -> Mapping[str, bytes]:
        """The two files of a saved adapter, by name."""
        return await self._call("export_saved", location, layout)

    async def stats(self) -> Mapping[str, float]:
        """The gauges and counters of the child's engine."""
        return await self._call("stats")

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
