"""Keep the server busy: overlap steps, and read a large batch part by part.

    python examples/async_pipeline.py

Every call returns a future at once, and one client's calls run in the order they were made. The
fake server is told to be slow here, so that waiting shows.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import tinkex
from tinkex import AdamParams, Datum, ModelInput
from tinkex.testing import API_KEY, Delays, FakeServer

STEPS = 6
PAUSE_S = 0.05
MANY = 2_500  # a request carries 1,024 examples at most, so this travels as three


def datum(number: int, length: int = 16) -> Datum:
    tokens = [(number + i) % 256 for i in range(length + 1)]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
    )


async def prepare(step: int) -> list[Datum]:
    """Stands for your own slow work: reading, tokenizing, sampling."""
    await asyncio.sleep(PAUSE_S)
    return [datum(step)]


async def one_by_one(training: tinkex.TrainingClient) -> float:
    began = time.perf_counter()
    for step in range(STEPS):
        await training.forward_backward(await prepare(step), "cross_entropy")
        await training.optim_step(AdamParams())
    return time.perf_counter() - began


async def overlapped(training: tinkex.TrainingClient) -> float:
    """The next batch is prepared while the server works on this one."""
    began = time.perf_counter()
    steps: list[tinkex.APIFuture[Any]] = []
    for step in range(STEPS):
        steps.append(training.forward_backward(await prepare(step), "cross_entropy"))
        steps.append(training.optim_step(AdamParams()))
    await asyncio.gather(*steps)
    return time.perf_counter() - began


async def parts(training: tinkex.TrainingClient) -> list[int]:
    """A batch too large for one request: results as they arrive, in the order of the data."""
    future = training.forward([datum(i) for i in range(MANY)], "cross_entropy")
    sizes: list[int] = []
    async for part in future:
        sizes.append(len(part.loss_fn_outputs))
        print(f"part {len(sizes)}: {sizes[-1]} examples, whole batch: {future.status().state}")
    assert len((await future).loss_fn_outputs) == MANY
    return sizes


async def main() -> int:
    slow = Delays(train_s=PAUSE_S, optim_s=PAUSE_S / 5)
    with FakeServer(delays=slow).serve() as server:
        async with tinkex.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            training = await service.create_lora_training_client_async("tinkex/tiny", rank=8)
            before, after = await one_by_one(training), await overlapped(training)
            sizes = await parts(training)
    # Times are for looking at; what must hold does not depend on how busy the machine is.
    print(f"{STEPS} steps one by one {before:.2f} s, overlapped {after:.2f} s")
    good = len(sizes) > 1 and sum(sizes) == MANY
    print("ok" if good else "NO: parts were missing")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
