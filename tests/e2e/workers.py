"""What the child processes of these tests run; they import it by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from tests.patience import PATIENCE_S
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient, TinkerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex import SamplingClient, TrainingClient
    from tinkex.futures.future import APIFuture
    from tinkex.types import ForwardBackwardOutput

MODEL = "tinkex/tiny"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=4, seed=1)


def datum() -> Datum:
    return Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )


def losses(training: TrainingClient, count: int) -> list[float]:
    """The losses of so many steps, submitted all at once."""
    futures: list[APIFuture[ForwardBackwardOutput]] = []
    for _ in range(count):
        futures.append(training.forward_backward([datum()], "cross_entropy"))
        training.optim_step(AdamParams(learning_rate=0.01))
    return [future.result(PATIENCE_S).metrics["loss:sum"] for future in futures]


def sample(client: SamplingClient) -> list[list[int]]:
    answer = client.sample(PROMPT, 2, PARAMS).result(PATIENCE_S)
    return [sequence.tokens for sequence in answer.sequences]


def sample_from_handle(handle: str, api_key: str | None) -> list[list[int]]:
    from tinkex import SamplingClient

    return sample(SamplingClient.from_sampler_handle(handle, api_key=api_key))


def serve() -> None:
    """A server that never finishes a training step, until it is killed."""
    from tinkex.testing import Delays, FakeServer

    with FakeServer(delays=Delays(train_s=3600.0, sample_s=3600.0)).serve() as server:
        print(server.url, flush=True)  # noqa: T201
        sys.stdin.read()


def wait_for_ever(url: str) -> None:
    """Blocks on a result that does not come; its parent interrupts it."""
    service = ServiceClient(base_url=url, api_key="tml-test")
    training = service.create_lora_training_client(MODEL, rank=2)
    future = training.forward_backward([datum()], "cross_entropy")
    print("waiting", flush=True)  # noqa: T201
    future.result()


def leave_without_closing(url: str) -> None:
    """Ends with calls under way and nothing closed."""
    service = ServiceClient(base_url=url, api_key="tml-test")
    training = service.create_lora_training_client(MODEL, rank=2)
    sampler = service.create_sampling_client(base_model=MODEL)
    futures = [training.forward_backward([datum()], "cross_entropy") for _ in range(3)]
    futures += [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]
    training.optim_step(AdamParams())
    print(len(futures), flush=True)  # noqa: T201


def die(url: str, way: str) -> None:
    """Ends with an error and without closing anything, in one of several ways."""
    service = ServiceClient(base_url=url, api_key="tml-test")
    training = service.create_lora_training_client(MODEL, rank=2)
    WAYS[way](training, url)


def _fail(training: TrainingClient, _: str) -> None:
    training.forward_backward([datum()], "cross_entropy").result()


def _fail_and_exit(training: TrainingClient, _: str) -> None:
    try:
        training.forward_backward([datum()], "cross_entropy").result()
    except TinkerError:
        sys.exit(3)


def _fail_in_main_coroutine(training: TrainingClient, _: str) -> None:
    async def main() -> None:
        await training.forward_backward([datum()], "cross_entropy")

    asyncio.run(main())


def _fail_in_forgotten_task(training: TrainingClient, _: str) -> None:
    async def step() -> None:
        await training.forward_backward([datum()], "cross_entropy")

    async def main() -> None:
        tasks = [asyncio.create_task(step())]
        await asyncio.wait(tasks)

    asyncio.run(main())


def _fail_in_thread(training: TrainingClient, url: str) -> None:
    thread = threading.Thread(target=_fail, args=(training, url))
    thread.start()
    thread.join()


def _own_error(*_: object) -> None:
    raise LookupError("canary prompt")


def _own_error_in_thread(*_: object) -> None:
    thread = threading.Thread(target=_own_error)
    thread.start()
    thread.join()


def _fail_in_forked_child(training: TrainingClient, url: str) -> None:
    # Python cannot fork while another thread is importing, as the first calls do.
    training.forward([datum()], "cross_entropy").result()
    child = os.fork()
    if child == 0:
        die(url, "result")
    os.waitpid(child, 0)


def _fail_and_wait_for_ever(training: TrainingClient, _: str) -> None:
    with contextlib.suppress(TinkerError):
        training.forward_backward([datum()], "cross_entropy").result()
    print("waiting", flush=True)  # noqa: T201
    threading.Event().wait()


WAYS: dict[str, Callable[[TrainingClient, str], None]] = {
    "result": _fail,
    "sys.exit": _fail_and_exit,
    "asyncio.run": _fail_in_main_coroutine,
    "task": _fail_in_forgotten_task,
    "thread": _fail_in_thread,
    "own error": _own_error,
    "own error in a thread": _own_error_in_thread,
    "forked child": _fail_in_forked_child,
    "interrupted": _fail_and_wait_for_ever,
}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
