"""The same work asked of the engine's process without a server between."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.server_overhead.work import LORA_RANK, MODEL, Size, batch, cpu_s, prompt
from tinkex.engine.process import EngineSpec, ModelSource, ProcessEngine
from tinkex.engine.protocol import AdapterSpec, OptimOp, SampleOp, TrainOp, Weights
from tinkex.types import AdamOptimizerConfig, AdamParams, LoraConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tinkex.engine.protocol import Engine


class Direct:
    """An engine with one adapter; its event loop runs only while it is asked for something."""

    def __init__(self, runner: asyncio.Runner, engine: Engine, size: Size) -> None:
        self._runner, self._engine, self._size = runner, engine, size
        # Mutable: every operation has a number of its own.
        self._numbers = itertools.count()

    def steps(self, count: int) -> tuple[list[float], float]:
        """Seconds of steps that follow one another, and the caller's CPU of each, ms."""
        cpu = cpu_s()
        taken = self._runner.run(self._steps(count))
        return taken, (cpu_s() - cpu) / count * 1e3

    def waves(self, count: int) -> tuple[float, float]:
        """Seconds of a wave of samples, and the caller's CPU of each sample in milliseconds."""
        start, cpu = time.perf_counter(), cpu_s()
        self._runner.run(self._waves(count))
        taken = (time.perf_counter() - start) / count
        return taken, (cpu_s() - cpu) / (count * self._size.at_once) * 1e3

    async def _steps(self, count: int) -> list[float]:
        data, params, taken = batch(), AdamParams(learning_rate=1e-4), list[float]()
        for _ in range(count):
            number = next(self._numbers)
            start = time.perf_counter()
            train = TrainOp(op_id=f"t{number}", model_id="m", data=data, loss_fn="cross_entropy")
            await self._engine.train([train])
            step = OptimOp(op_id=f"o{number}", model_id="m", params=params)
            await self._engine.optim_step([step])
            taken.append(time.perf_counter() - start)
        return taken

    async def _waves(self, count: int) -> None:
        for _ in range(count):
            await asyncio.gather(*(self._sample(i) for i in range(self._size.at_once)))

    async def _sample(self, index: int) -> None:
        number = next(self._numbers)
        await self._engine.sample(
            SampleOp(
                op_id=f"s{number}",
                weights=Weights(base_model=MODEL),
                prompt=prompt(index),
                params=SamplingParams(max_tokens=self._size.new_tokens, stop=[]),
                sequence_ids=(f"s{number}:0",),
            )
        )


@contextmanager
def opened(folder: Path, size: Size) -> Generator[Direct]:
    """An engine in a process of its own, until the end of the block."""
    spec = EngineSpec(models=(ModelSource(MODEL),), folder=folder)
    adapter = AdapterSpec(
        model_id="m",
        base_model=MODEL,
        lora=LoraConfig(rank=LORA_RANK),
        optimizer=AdamOptimizerConfig(),
    )
    with asyncio.Runner() as runner:
        engine = runner.run(ProcessEngine.start(spec))
        runner.run(engine.__aenter__())
        try:
            runner.run(engine.create_adapter(adapter))
            yield Direct(runner, engine, size)
        finally:
            runner.run(engine.__aexit__(None, None, None))
