"""What is measured, as a user's program: runs in an interpreter with a client.

    python program.py tinker|tinkex MODEL      (server and key from the environment)

Reads one JSON object per line, `{"figure": NAME, "seconds": TIME}`, measures that figure for about
that time and answers with one number per line. It needs nothing but the client and the standard
library. Each figure runs once before it is timed.
"""

from __future__ import annotations

import importlib
import json
import os
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
ADAPTERS = 4


class Program:
    """The clients of one server, and how each figure is measured with them."""

    def __init__(self, sdk: Any, model: str) -> None:
        self._sdk = sdk
        service = sdk.ServiceClient()
        self._clients = [
            service.create_lora_training_client(base_model=model, rank=RANK)
            for _ in range(ADAPTERS)
        ]
        self._sampler = service.create_sampling_client(base_model=model)
        # Mutable: the figures that have had their run before the first timed one.
        self._warm: set[str] = set()

    def measure(self, figure: str, seconds: float) -> float:
        """One figure: seconds of a step, or tokens per second."""
        work, tokens = self._work(figure)
        if figure not in self._warm:
            self._warm.add(figure)
            work()
        taken = statistics.median(repeated(work, seconds))
        return tokens / taken if tokens else taken

    def _work(self, figure: str) -> tuple[Callable[[], None], int]:
        """What to run, and how many tokens it trains or samples; 0 for a latency."""
        first, every = self._clients[:1], self._clients
        match figure:
            case "step_latency_s":
                return self._steps(first, 1, 16), 0
            case "train_8x128":
                return self._steps(first, 8, 128), 8 * 128
            case "train_32x128":
                return self._steps(first, 32, 128), 32 * 128
            case "train_8x512":
                return self._steps(first, 8, 512), 8 * 512
            case "train_4_adapters":
                return self._steps(every, 8, 128), ADAPTERS * 8 * 128
            case "train_4_in_turn":
                return self._steps_in_turn(every, 8, 128), ADAPTERS * 8 * 128
            case "sample_1":
                return self._samples(1, 1), NEW_TOKENS
            case "sample_8":
                return self._samples(1, 8), 8 * NEW_TOKENS
            case "sample_16x4":
                return self._samples(16, 4), 16 * 4 * NEW_TOKENS
            case _:
                raise ValueError(f"unknown figure {figure!r}")

    def _steps(self, clients: list[Any], rows: int, length: int) -> Callable[[], None]:
        """One step of every client: all are submitted, then all are awaited."""
        batch = data(self._sdk, rows, length)
        adam = self._sdk.AdamParams(learning_rate=1e-4)

        def work() -> None:
            pending: list[Any] = []
            for client in clients:
                pending += [
                    client.forward_backward(batch, "cross_entropy"),
                    client.optim_step(adam),
                ]
            for future in pending:
                future.result(WAIT_S)

        return work

    def _steps_in_turn(self, clients: list[Any], rows: int, length: int) -> Callable[[], None]:
        """The same when each client's step is awaited before the next client's begins."""
        steps = [self._steps([client], rows, length) for client in clients]

        def work() -> None:
            for step in steps:
                step()

        return work

    def _samples(self, requests: int, samples: int) -> Callable[[], None]:
        params = self._sdk.SamplingParams(max_tokens=NEW_TOKENS, stop=[], temperature=1.0)
        prompts = [
            self._sdk.ModelInput.from_ints([(n * 13 + i * 5) % VOCABULARY + 1 for i in range(32)])
            for n in range(requests)
        ]

        def work() -> None:
            futures = [self._sampler.sample(prompt, samples, params) for prompt in prompts]
            for future in futures:
                answer = future.result(WAIT_S)
                assert sum(len(s.tokens) for s in answer.sequences) == samples * NEW_TOKENS

        return work


def data(sdk: Any, rows: int, length: int) -> list[Any]:
    """Sequences that are all different, so that no server can reuse an answer."""
    made: list[Any] = []
    for row in range(rows):
        tokens = [(row * 31 + position * 7) % VOCABULARY + 1 for position in range(length + 1)]
        made.append(
            sdk.Datum(
                model_input=sdk.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
            )
        )
    return made


def repeated(work: Callable[[], None], budget_s: float) -> list[float]:
    """Seconds of each run of `work` within a time budget; at least one."""
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken


def main(sdk_name: str, model: str) -> None:
    # What the client prints goes to standard error; standard output is for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = Program(importlib.import_module(sdk_name), model)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(program.measure(asked["figure"], asked["seconds"])), file=answers)
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
