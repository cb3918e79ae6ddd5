"""An `Engine` that computes nothing: each call goes on, by its name, to one that does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tinkex.engine.protocol import (
        AdapterSpec,
        ImportedAdapter,
        Layout,
        OnToken,
        OptimOp,
        OptimResult,
        SampleOp,
        SampleResult,
        SavedAdapter,
        TrainOp,
        TrainResult,
    )
    from tinkex.errors import RequestFailedError


class ForwardedEngine(ABC):
    """The calls of `Engine`; a subclass says where they go."""

    @abstractmethod
    async def _call(self, name: str, *args: Any, **options: Any) -> Any: ...

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

    async def import_saved(self, base_model: str, folder: Path, location: str) -> ImportedAdapter:
        """Save the PEFT adapter in a folder of this machine; complete and durable at the end."""
        return await self._call("import_saved", base_model, folder, location)

    async def stats(self) -> Mapping[str, float]:
        """The gauges and counters of the engine that answers."""
        return await self._call("stats")
