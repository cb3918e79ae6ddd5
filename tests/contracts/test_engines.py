"""Every engine against the one suite."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import anyio
import pytest

from tests.contracts.engine_suite import MODEL, EngineSuite
from tinkex.clock import SystemClock
from tinkex.engine.local import LocalEngine
from tinkex.engine.models.loader import load_model
from tinkex.engine.process import EngineSpec, LocalSettings, ModelSource, ProcessEngine
from tinkex.engine.process.supervisor import RestartingEngine
from tinkex.errors import RequestFailedError
from tinkex.server.cluster.sample_wire import (
    decode_op,
    decode_outcome,
    encode_op,
    encode_outcome,
)
from tinkex.testing import Delays, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinkex.engine.protocol import Engine, OnToken, SampleOp, SampleResult

# One sequence at a time, so that a place which is not given back is missed.
SETTINGS = LocalSettings(max_sequences=1, cache_bytes=1 << 24)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class TestFakeEngine(EngineSuite):
    def open_engine(self, tmp_path: Any) -> AbstractAsyncContextManager[Engine]:
        @asynccontextmanager
        async def fake() -> AsyncIterator[Engine]:
            # With no time between tokens nothing could be cancelled.
            yield FakeEngine(delays=Delays(token_s=1e-4))

        return fake()


class TestRestartingEngine(EngineSuite):
    def open_engine(self, tmp_path: Any) -> AbstractAsyncContextManager[Engine]:
        class Child(FakeEngine):
            """Lives as long as its test."""

            pid = 1

            async def wait_dead(self) -> None:
                await anyio.sleep_forever()

            async def close(self) -> None:
                """Nothing to end."""

        async def start(_: object) -> Child:
            return Child(delays=Delays(token_s=1e-4))

        @asynccontextmanager
        async def restarting() -> AsyncIterator[Engine]:
            engine = RestartingEngine(start, SystemClock())
            async with anyio.create_task_group() as group:
                group.start_soon(engine.run)
                await engine.wait_ready()
                yield engine
                group.cancel_scope.cancel()

        return restarting()


class TestLocalEngine(EngineSuite):
    def open_engine(self, tmp_path: Any) -> AbstractAsyncContextManager[Engine]:
        return LocalEngine([load_model(MODEL)], tmp_path, SETTINGS)


class TestLocalEngineWithArtifactsElsewhere(EngineSuite):
    def open_engine(self, tmp_path: Any) -> AbstractAsyncContextManager[Engine]:
        url = f"memory://{uuid4().hex}"
        # With no room for copies, everything is read from there.
        settings = replace(SETTINGS, artifact_cache_bytes=0)
        return LocalEngine([load_model(MODEL)], tmp_path, settings, artifacts=url)


class TwoNodes:
    """Engines on the same artifacts: one trains, the other computes samples that it can load."""

    def __init__(self, owner: Engine, other: Engine) -> None:
        self._owner = owner
        self._other = other
        self._deleted: set[str | None] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name)

    async def sample(self, op: SampleOp, on_token: OnToken | None = None) -> SampleResult:
        weights = op.weights
        # Only in its memory; or streamed; or deleted, which is when no sampler is left for it.
        if weights.snapshot or on_token is not None or weights.location in self._deleted:
            return await self._owner.sample(op, on_token)
        try:
            outcome = await self._other.sample(decode_op(encode_op(op)))
        except RequestFailedError as error:
            outcome = error
        outcome = decode_outcome(encode_outcome(outcome), op)
        if isinstance(outcome, RequestFailedError):
            raise outcome
        return outcome

    async def delete_saved(self, location: str) -> None:
        await self._owner.delete_saved(location)
        self._deleted.add(location)

    async def stats(self) -> dict[str, float]:
        both = [await self._owner.stats(), await self._other.stats()]
        return {name: sum(each[name] for each in both) for name in both[0]}


class TestEnginesOfTwoNodes(EngineSuite):
    def open_engine(self, tmp_path: Any) -> AbstractAsyncContextManager[Engine]:
        @asynccontextmanager
        async def two() -> AsyncIterator[Engine]:
            url = f"memory://{uuid4().hex}"
            async with (
                LocalEngine([load_model(MODEL)], tmp_path / "a", SETTINGS, artifacts=url) as owner,
                LocalEngine([load_model(MODEL)], tmp_path / "b", SETTINGS, artifacts=url) as other,
            ):
                yield cast("Engine", TwoNodes(owner, other))

        return two()


class TestProcessEngine(EngineSuite):
    @pytest.fixture(scope="class")
    async def engine(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
        """One child for all: starting it takes longer than all that it is asked."""
        spec = EngineSpec(
            models=(ModelSource(MODEL),),
            folder=tmp_path_factory.mktemp("engine"),
            threads=1,
            settings=SETTINGS,
        )
        async with await ProcessEngine.start(spec) as engine:
            yield engine
