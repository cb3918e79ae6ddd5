"""Every engine against the one suite."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio
import pytest

from tests.contracts.engine_suite import MODEL, EngineSuite
from tinkex.clock import SystemClock
from tinkex.engine.local import LocalEngine
from tinkex.engine.models.loader import load_model
from tinkex.engine.process import EngineSpec, LocalSettings, ModelSource, ProcessEngine
from tinkex.engine.process.supervisor import RestartingEngine
from tinkex.testing import Delays, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinkex.engine.protocol import Engine

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
