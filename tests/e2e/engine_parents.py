"""Programs that own an engine process; tests run them and kill them.

Each prints the child's pid once a call is under way, so that a test acts while it computes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.contracts.engine_suite import MODEL, base, sample_op
from tinkex.engine.process import EngineSpec, ModelSource, ProcessEngine
from tinkex.types import SamplingParams

LONG = SamplingParams(max_tokens=8000, seed=1, stop=[])


async def own(folder: str) -> None:
    """Sample for a long time; when interrupted, close the engine and say so."""
    spec = EngineSpec(models=(ModelSource(MODEL),), folder=Path(folder), threads=1)
    engine = await ProcessEngine.start(spec)
    heard = asyncio.Event()

    async def tell() -> None:
        await heard.wait()
        print(engine.pid, flush=True)  # noqa: T201

    telling = asyncio.ensure_future(tell())
    try:
        await engine.sample(sample_op(base(), samples=8, params=LONG), lambda *_: heard.set())
    finally:
        telling.cancel()
        state = engine.state
        await engine.close()
        print(f"was {state}, now {engine.state}", flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1]))
