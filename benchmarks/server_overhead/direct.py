"""The same work asked of the engine's process without a server between."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.server_overhead.work import LORA_RANK, MODEL, Figures, Size, batch, prompt
from tinkex.engine.base import AdapterSpec, OptimOp, SampleOp, TrainOp, Weights
from tinkex.engine.process import EngineSpec, ModelSource, ProcessEngine
from tinkex.types import AdamOptimizerConfig, AdamParams, LoraConfig, SamplingParams

if TYPE_CHECKING:
    from tinkex.engine.base import Engine


async def measure(size: Size) -> Figures:
    """Steps one after another, then samples all at once."""
    with tempfile.TemporaryDirectory() as folder:
        spec = EngineSpec(models=(ModelSource(MODEL),), folder=Path(folder))
        async with await ProcessEngine.start(spec) as engine:
            return Figures(
                step_s=await _steps(engine, size),
                **await _samples(engine, size),
            )


async def _steps(engine: Engine, size: Size) -> float:
    lora, optimizer = LoraConfig(rank=LORA_RANK), AdamOptimizerConfig()
    await engine.create_adapter(
        AdapterSpec(model_id="m", base_model=MODEL, lora=lora, optimizer=optimizer)
    )
    data, params, taken = batch(), AdamParams(learning_rate=1e-4), []
    for number in range(size.steps + size.warm_up):
        start = time.perf_counter()
        train = TrainOp(op_id=f"t{number}", model_id="m", data=data, loss_fn="cross_entropy")
        await engine.train([train])
        await engine.optim_step([OptimOp(op_id=f"o{number}", model_id="m", params=params)])
        taken.append(time.perf_counter() - start)
    return median(taken[size.warm_up :])


async def _samples(engine: Engine, size: Size) -> dict[str, float]:
    params = SamplingParams(max_tokens=size.new_tokens, stop=[])

    async def sample(number: int) -> None:
        await engine.sample(
            SampleOp(
                op_id=f"s{number}",
                weights=Weights(base_model=MODEL),
                prompt=prompt(number),
                params=params,
                sequence_ids=(f"s{number}:0",),
            )
        )

    await asyncio.gather(*(sample(number) for number in range(size.at_once)))
    start, cpu = time.perf_counter(), _cpu_s()
    for _ in range(size.waves):
        await asyncio.gather(*(sample(number) for number in range(size.at_once)))
    count = size.waves * size.at_once
    return {
        "samples_s": (time.perf_counter() - start) / size.waves,
        "caller_cpu_ms": (_cpu_s() - cpu) / count * 1e3,
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
