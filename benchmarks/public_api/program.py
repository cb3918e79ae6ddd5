"""What is measured, as a user's program: runs in an interpreter with a client, prints JSON.

    python program.py tinker|tinkex MODEL SECONDS      (server and key from the environment)

Needs nothing but the client and the standard library. Everything runs once before it is timed.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

RANK = 8
VOCABULARY = 200
WAIT_S = 300.0
NEW_TOKENS = 64


def main(sdk_name: str, model: str, seconds: str) -> None:
    sdk = importlib.import_module(sdk_name)
    service = sdk.ServiceClient()
    clients = [service.create_lora_training_client(base_model=model, rank=RANK) for _ in range(4)]
    sampler = service.create_sampling_client(base_model=model)
    budget_s = float(seconds)
    found = {"step_latency_s": latency(sdk, clients[0], budget_s)}
    for rows, length in ((8, 128), (32, 128), (8, 512)):
        found[f"train_{rows}x{length}"] = training(sdk, clients[:1], rows, length, budget_s)
    found["train_4_adapters"] = training(sdk, clients, 8, 128, budget_s)
    found["train_4_in_turn"] = in_turn(sdk, clients, 8, 128, budget_s)
    for name, requests, samples in (("1", 1, 1), ("8", 1, 8), ("16x4", 16, 4)):
        found[f"sample_{name}"] = sampling(sdk, sampler, requests, samples, budget_s)
    print(json.dumps(found))


def data(sdk: Any, rows: int, length: int) -> list[Any]:
    """Sequences that are all different, so that no server can remember an answer."""
    made = []
    for row in range(rows):
        tokens = [(row * 31 + position * 7) % VOCABULARY + 1 for position in range(length + 1)]
        made.append(
            sdk.Datum(
                model_input=sdk.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
            )
        )
    return made


def step(sdk: Any, clients: list[Any], batch: list[Any]) -> None:
    """One step of every client: all submitted, then all awaited."""
    adam = sdk.AdamParams(learning_rate=1e-4)
    pending = []
    for client in clients:
        pending += [client.forward_backward(batch, "cross_entropy"), client.optim_step(adam)]
    for future in pending:
        future.result(WAIT_S)


def repeated(work: Callable[[], None], budget_s: float) -> list[float]:
    """Seconds of each run of `work` within a time budget, at least three."""
    work()
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken


def latency(sdk: Any, client: Any, budget_s: float) -> float:
    """Seconds of a step on one short sequence."""
    batch = data(sdk, 1, 16)
    return statistics.median(repeated(lambda: step(sdk, [client], batch), budget_s))


def training(sdk: Any, clients: list[Any], rows: int, length: int, budget_s: float) -> float:
    """Trained tokens per second, of all clients together."""
    batch = data(sdk, rows, length)
    taken = repeated(lambda: step(sdk, clients, batch), budget_s)
    return len(clients) * rows * length / statistics.median(taken)


def in_turn(sdk: Any, clients: list[Any], rows: int, length: int, budget_s: float) -> float:
    """The same when each client's step is awaited before the next client's begins."""
    batch = data(sdk, rows, length)

    def work() -> None:
        for client in clients:
            step(sdk, [client], batch)

    return len(clients) * rows * length / statistics.median(repeated(work, budget_s))


def sampling(sdk: Any, sampler: Any, requests: int, samples: int, budget_s: float) -> float:
    """Generated tokens per second."""
    params = sdk.SamplingParams(max_tokens=NEW_TOKENS, stop=[], temperature=1.0)
    prompts = [
        sdk.ModelInput.from_ints([(n * 13 + i * 5) % VOCABULARY + 1 for i in range(32)])
        for n in range(requests)
    ]

    def work() -> None:
        futures = [sampler.sample(prompt, samples, params) for prompt in prompts]
        for future in futures:
            answer = future.result(WAIT_S)
            assert sum(len(s.tokens) for s in answer.sequences) == samples * NEW_TOKENS

    taken = statistics.median(repeated(work, budget_s))
    return requests * samples * NEW_TOKENS / taken


if __name__ == "__main__":
    main(*sys.argv[1:])
