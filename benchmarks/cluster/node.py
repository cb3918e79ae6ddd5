"""`python -m benchmarks.cluster.node`: a real node with a simulated device; flags as of serve.

There are fewer cores than nodes here, so nodes that computed would share them. This device takes a
fixed time for each token and no core: one batch of training at a time, and `SLOTS` sequences of
samples beside each other. Everything else is the product: the API, the scheduler, the store.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from tinkex.cli import main as cli
from tinkex.clock import SystemClock
from tinkex.engine.protocol import Weights
from tinkex.serving import process
from tinkex.testing import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.engine.protocol import SampleOp, SampleResult

TRAINED_TOKEN_S = 0.003
SAMPLED_TOKEN_S = 0.08
SLOTS = 16


class SimulatedEngine(FakeEngine):
    """The toy model of the test kit on a device with fixed costs."""

    pid = 0

    def __init__(self) -> None:
        super().__init__()
        self._device = anyio.Lock()
        self._places = anyio.Semaphore(SLOTS)
        self._ended = anyio.Event()

    async def wait_dead(self) -> None:
        """It never dies."""
        await self._ended.wait()

    async def close(self) -> None:
        """End it."""
        self._ended.set()

    async def train(self, batch: Sequence[Any]) -> Any:
        """Forward and backward of a batch, one batch at a time."""
        tokens = sum(datum.model_input.length for op in batch for datum in op.data)
        async with self._device:
            await SystemClock().sleep(tokens * TRAINED_TOKEN_S)
            return await super().train(batch)

    async def load_adapter(self, model_id: str, location: str, *, optimizer: bool) -> None:
        """Weights of another node are not in this process, and make no difference here."""
        if location in self._saved:
            await super().load_adapter(model_id, location, optimizer=optimizer)

    async def sample(self, op: SampleOp, on_token: Any = None) -> SampleResult:
        """One sequence in each place of the device."""
        async with self._places:
            await SystemClock().sleep((op.params.max_tokens or 1) * SAMPLED_TOKEN_S)
            base = Weights(base_model=op.weights.base_model)
            return await super().sample(replace(op, weights=base), on_token)


class SimulatedHost(process.Host):
    """A server with that engine instead of a process of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._engine.takes_bodies = False

    async def _start_engine(self, on_phase: Callable[[str], None]) -> Any:
        return SimulatedEngine()


if __name__ == "__main__":
    process.Host = SimulatedHost
    cli.main(["serve", *sys.argv[1:]])
