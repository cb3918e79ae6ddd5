"""What clients do: many runs that train, and one run that samples much."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex import TrainingClient

MODEL = "tinkex/tiny"
KEY = "tml-of-a-benchmark"
TOKENS = 32
SAMPLED = 16
WAIT_S = 120.0
_WARM_UP_S = 6.0


def batch() -> list[Datum]:
    """One sequence."""
    tokens = [1 + number % 200 for number in range(TOKENS + 1)]
    return [
        Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * TOKENS},
        )
    ]


def step(training: TrainingClient) -> None:
    """Forward, backward and an optimizer step, waited for together."""
    passed = training.forward_backward(batch(), "cross_entropy")
    training.optim_step(AdamParams(learning_rate=1e-3)).result(WAIT_S)
    passed.result(WAIT_S)


def rate(work: Sequence[Callable[[], None]], seconds: float) -> float:
    """How often the pieces of work are done in a second, each of them again and again."""
    begins = time.monotonic() + _WARM_UP_S
    ends = begins + seconds
    counts = [0] * len(work)
    failures: list[BaseException] = []

    def repeat(number: int) -> None:
        try:
            while (now := time.monotonic()) < ends:
                work[number]()
                counts[number] += now >= begins
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(n,)) for n in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(counts) / seconds


def training_rate(urls: Sequence[str], runs: int, seconds: float) -> float:
    """Steps per second of many runs, whose clients know different nodes."""
    with ExitStack() as stack:
        trainings = []
        for number in range(runs):
            url = urls[number % len(urls)]
            client = stack.enter_context(ServiceClient(base_url=url, api_key=KEY))
            trainings.append(client.create_lora_training_client(MODEL, rank=4, seed=number))
        return rate([lambda t=t: step(t) for t in trainings], seconds)


def sampling_rate(urls: Sequence[str], callers: int, seconds: float) -> float:
    """Samples per second from the weights of one run."""
    with ServiceClient(base_url=urls[0], api_key=KEY) as client:
        training = client.create_lora_training_client(MODEL, rank=4, seed=1)
        step(training)
        sampler = training.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=SAMPLED, seed=1)

        def one(number: int) -> None:
            prompt = ModelInput.from_ints([1 + number, 2, 3])
            sampler.sample(prompt, 1, params).result(WAIT_S)

        return rate([lambda n=n: one(n) for n in range(callers)], seconds)
