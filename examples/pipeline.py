"""Keep the server busy: send the next step before the last one's result is read.

    python examples/pipeline.py      # seconds on the embedded server; needs tinkex[engine,server]

Every call returns a future at once, and one client's calls run in the order they were made. So a
loop that waits for nothing computes the same numbers as one that waits for everything, and while
the server trains, the program prepares the next batch and judges what has been saved.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser
from collections import deque
from time import perf_counter

import tinkex
from tinkex import AdamParams, APIFuture, Datum, ForwardBackwardOutput, ModelInput, SamplingParams

MODEL = "tinkex/tiny"  # its ids below 256 are bytes, so text needs no tokenizer
AHEAD = 2  # steps that are sent before the oldest of them is read
PAUSE_S = 0.04
TEXT = "round and round the ragged rock the ragged rascal ran "
Step = tuple[APIFuture[ForwardBackwardOutput], APIFuture[tinkex.OptimStepResponse]]


def datum(number: int, length: int = 24) -> Datum:
    tokens = list((2 * TEXT).encode()[number % len(TEXT) :][: length + 1])
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


async def prepare(step: int) -> list[Datum]:
    """Stands for slow work of your own: reading, tokenizing, asking another service."""
    await asyncio.sleep(PAUSE_S)
    return [datum(8 * step + number) for number in range(8)]


async def submit(training: tinkex.TrainingClient, batch: list[Datum]) -> Step:
    """Awaiting this only sends the step; its futures are for whoever wants the result."""
    forward_backward = await training.forward_backward_async(batch, "cross_entropy")
    return forward_backward, await training.optim_step_async(AdamParams(learning_rate=0.003))


async def finish(step: Step) -> float:
    forward_backward, optim_step = step
    await optim_step
    metrics = (await forward_backward).metrics
    return metrics["loss:sum"] / metrics["weights:sum"]


async def one_by_one(training: tinkex.TrainingClient, steps: int) -> list[float]:
    """The server waits while a batch is prepared, and the program while it is trained on."""
    return [await finish(await submit(training, await prepare(step))) for step in range(steps)]


async def pipelined(training: tinkex.TrainingClient, steps: int) -> list[float]:
    """Batches are prepared while the server works on the ones before."""
    in_flight: deque[Step] = deque()
    losses: list[float] = []
    for step in range(steps):
        in_flight.append(await submit(training, await prepare(step)))
        if len(in_flight) > AHEAD:
            losses.append(await finish(in_flight.popleft()))
    return losses + [await finish(step) for step in in_flight]


async def judge(sampler: tinkex.SamplingClient, count: int = 8) -> float:
    """The share of sampled tokens that occur in the text."""
    prompt, known = ModelInput.from_ints(list(b"round and ")), set(TEXT.encode())
    params = SamplingParams(max_tokens=16, seed=1)
    answer = await sampler.sample_async(prompt, count, params)
    tokens = [token for sequence in answer.sequences for token in sequence.tokens]
    return sum(token in known for token in tokens) / len(tokens)


async def overlapped(training: tinkex.TrainingClient, steps: int) -> tuple[list[float], float]:
    """What was saved is judged while training goes on: samples and steps share the server."""
    sampler = await training.save_weights_and_get_sampling_client_async()
    losses, score = await asyncio.gather(pipelined(training, steps), judge(sampler))
    return losses, score


async def main() -> int:
    parser = ArgumentParser(description="The same steps one by one and pipelined.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    with tinkex.ServiceClient() as service:
        create = service.create_lora_training_client_async
        first, second = [await create(options.model, rank=8, seed=1) for _ in range(2)]
        untrained = await judge(await second.save_weights_and_get_sampling_client_async())
        began = perf_counter()
        waited = await one_by_one(first, options.steps)
        between = perf_counter()
        piped = await pipelined(second, options.steps)
        ended = perf_counter()
        more, score = await overlapped(second, options.steps)
    # Times are for looking at; what is checked does not depend on how busy the machine is.
    print(f"{options.steps} steps one by one  {between - began:.2f} s")
    print(f"{options.steps} steps pipelined   {ended - between:.2f} s")
    gap = max(abs(one - other) for one, other in zip(waited, piped, strict=True))
    checks = {
        f"both ways the losses are the same: they differ by {gap:g}": gap < 0.01,
        f"loss {piped[0]:.2f} -> {piped[-1]:.2f} -> {more[-1]:.2f}": more[-1] < 0.5 * piped[0],
        f"judged meanwhile: {untrained:.0%} -> {score:.0%} letters of the text": (
            score > untrained + 0.2
        ),
    }
    for claim, holds in checks.items():
        print(f"{'ok' if holds else 'NO'}: {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
