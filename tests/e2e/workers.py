"""What the child processes of these tests run; they import it by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient

if TYPE_CHECKING:
    from tinkex import SamplingClient

MODEL = "tinkex/tiny"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=4, seed=1)


def datum() -> Datum:
    return Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )


def sample(client: SamplingClient) -> list[list[int]]:
    answer = client.sample(PROMPT, 2, PARAMS).result(20)
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


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
